"""The common part of both languages: a conversation, and its chat format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
Language = Literal["agent", "recommendation"]

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
ITEM_START, ITEM_END = "<|sid_begin|>", "<|sid_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('role is ' ~ message['role'] ~ '; use system, user, assistant or tool') -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Every turn is kept as it was written, thoughts too, so that the text of a turn is a prefix of the next one's."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str

    def render(self) -> str:
        """The message as the chat template writes it."""
        return f"{TURN_START}{self.role}\n{self.content}{TURN_END}\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and facts about them that an evaluation needs (``category`` of a recommendation)."""

    language: Language
    messages: list[Message]
    facts: dict[str, str] = field(default_factory=dict)

    def render(self) -> str:
        return "".join(message.render() for message in self.messages)

    def prompts(self) -> list[tuple[str, str]]:
        """(prompt, answer) of every assistant turn; the answer includes the token that ends the turn."""
        pairs, text = [], ""
        for message in self.messages:
            if message.role == "assistant":
                pairs.append((f"{text}{TURN_START}assistant\n", message.content + TURN_END))
            text += message.render()
        return pairs
