"""Conversations -> prompts, by the chat templates of `template_choice`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ...scheduler.outcome import RequestRefused
from .messages import Conversation, Message
from .template_choice import ChatTemplates

T = TypeVar("T")

_INLINE_BYTES = 20_000
"""Longer conversations are rendered, and compared, in a thread, so that the loop keeps serving other requests."""

_MARK = "BatonGoesOnHere7Q"
"""Only letters and digits: templates strip, split and escape other characters."""


class Renderer:
    """Renders conversations with the chat templates of a model."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates

    @property
    def source(self) -> str:
        """Source of the template for chats without tools; empty if there is none."""
        return _source(self._templates.plain)

    @property
    def source_with_tools(self) -> str:
        """Source of the template for chats with tools; `source` where the model takes none."""
        return _source(self._templates.with_tools or self._templates.plain)

    @property
    def knows_tools(self) -> bool:
        return self._templates.with_tools is not None

    @property
    def bundled(self) -> str:
        """The file of the template for chats that bring tools, if it is none of the model's; else empty."""
        return self._templates.bundled

    def render(self, conversation: Conversation) -> str:
        """The text that the model continues. Raises RequestRefused."""
        if conversation.goes_on:
            return self._up_to_the_last_content(conversation) + conversation.forced
        return self._rendered(conversation, conversation.messages) + conversation.forced

    def after_content(self, conversation: Conversation) -> str:
        """Text that the template writes after the content of the last message, which is the assistant's."""
        *before, last = conversation.messages
        marked = {"role": last["role"], "content": _MARK}
        return self._rendered(conversation, [*before, marked]).rpartition(_MARK)[2]

    def _up_to_the_last_content(self, conversation: Conversation) -> str:
        *before, last = conversation.messages
        marked = {**last, "content": (last.get("content") or "") + _MARK}
        text, mark, _ = self._rendered(conversation, [*before, marked]).rpartition(_MARK)
        if not mark:
            raise RequestRefused(
                "the chat template changes or drops the content of the last message, so the model cannot continue it "
                "(continue_final_message)",
                code="chat_template_error",
                param="messages",
            )
        return text

    def _rendered(self, conversation: Conversation, messages: list[Message]) -> str:
        template = self._template_of(conversation)
        if template is None:
            raise RequestRefused(
                "the model's folder has no chat template; start the server with --chat-template FILE, or use "
                "/v1/completions with a prompt of your own",
                code="no_chat_template",
                param="messages",
            )
        if "developer" not in template.source:  # OpenAI's newer name for the system's role
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        try:
            return self._of_template(template, conversation, messages)
        except ChatTemplateError as error:
            joined = with_roles_in_turn(messages)
            if joined != messages:
                with contextlib.suppress(ChatTemplateError):
                    return self._of_template(template, conversation, joined)
            raise RequestRefused(str(error), code="chat_template_error", param="messages") from None

    def _of_template(self, template: ChatTemplate, conversation: Conversation, messages: list[Message]) -> str:
        """Raises ChatTemplateError."""
        return template.render(
            messages,
            add_generation_prompt=conversation.add_generation_prompt,
            tools=_as_described(conversation.tools),
            documents=conversation.documents,
            **conversation.variables,
        )

    def _template_of(self, conversation: Conversation) -> ChatTemplate | None:
        """A bundled template also writes the calls of earlier messages, which the model's own would drop."""
        templates = self._templates
        has_tools = bool(conversation.tools)
        if templates.bundled:
            has_tools = has_tools or any(message.get("tool_calls") for message in conversation.messages)
        return (templates.with_tools if has_tools else None) or templates.plain


def _as_described(tools: list[dict] | None) -> list[dict] | None:
    """Tools as the model is told of them: whether their arguments are enforced is not its concern."""
    if not any("strict" in tool["function"] for tool in tools or ()):
        return tools
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools or ()
    ]


def with_roles_in_turn(messages: list[Message]) -> list[Message]:
    """For templates that take one system message, at the beginning, and users and assistants in turn. Neighbours of
    the role system, or user, become one message. A system message behind others becomes the user's.

    Agents send such messages: instructions in several parts, reminders between two turns. What stands before a message
    is never changed by one that follows an answer, so a conversation that grows still begins as it did.
    """
    joined: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "system" and any(before["role"] != "system" for before in joined):
            role = "user"
        if joined and joined[-1]["role"] == role and role in ("system", "user"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined


def _source(template: ChatTemplate | None) -> str:
    return "" if template is None else template.source


async def beside_others(size: int, work: Callable[[], T]) -> T:
    """The result of ``work`` on a conversation of this `size_of`, or on its text; in a thread where it is large."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


def size_of(conversation: Conversation) -> int:
    """Bytes of what the template gets, as JSON. Raises RequestRefused."""
    given = (conversation.messages, conversation.tools, conversation.documents, conversation.variables)
    try:
        return len(msgspec.json.encode(given))
    except RecursionError:  # the encoder gives up a little earlier than the decoder did
        raise RequestRefused("the chat is nested too deeply; send flatter objects", param="messages") from None
