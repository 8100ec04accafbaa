"""Chats for tests: the byte tokenizer's template, and turns as they are recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.entrypoints.chat.answer_parsers import AnswerParsers
from baton.entrypoints.chat.conversations import Conversations, GoesOn, Turn
from baton.entrypoints.chat.messages import Conversation
from baton.entrypoints.chat.rendering import Renderer
from baton.entrypoints.chat.template_choice import ChatTemplates, has_place_for_tools
from baton.runtime.text.chat_template import ChatTemplate
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE


def make_renderer(template: str = CHAT_TEMPLATE) -> Renderer:
    plain = ChatTemplate(template, {"eos_token": "<eos>"})
    return Renderer(ChatTemplates(plain, plain if has_place_for_tools(plain) else None))


def conversation(*words: str, **options: Any) -> Conversation:
    """User and assistant in turn; an assistant's words may be a whole message."""
    roles = ["user", "assistant"] * len(words)
    messages = [said if isinstance(said, dict) else {"role": role, "content": said} for role, said in zip(roles, words)]
    return Conversation(messages=messages, **options)


class Recorder:
    """Answers are recorded as if the model had said them; ids are those of the bytes."""

    def __init__(self, template: str = CHAT_TEMPLATE) -> None:
        self.renderer = make_renderer(template)
        self.parsers = AnswerParsers("hermes", "qwen3", template)
        self.conversations = Conversations(self.renderer, self.parsers.says_the_same, ["", "<eos>"])

    def answer(
        self,
        asked: Conversation,
        said: str,
        rid: str = "turn",
        *,
        index: int = 0,
        salt: str = "",
        client: str = "",
        name: str | None = None,
    ) -> Turn:
        prompt = self.renderer.render(asked)
        turn = Turn(
            rid=rid,
            index=index,
            scope=salt,
            num_messages=len(asked.messages) - asked.goes_on,
            prompt_chars=len(prompt),
            text=prompt + said,
            ids=np.frombuffer((prompt + said).encode(), dtype=np.uint8).astype(np.int32),
            conversation=name,
        )
        self.conversations.record(turn, client)
        return turn

    def find_turn(self, asked: Conversation, salt: str = "", name: str | None = None) -> GoesOn | None:
        return self.conversations.find_turn(asked, self.renderer.render(asked), salt, name)
