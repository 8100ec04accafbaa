"""Anthropic's messages, made of blocks, as the conversation that templates take.

    user       [tool_result, tool_result, text]    tool, tool, user
    assistant  [thinking, text, tool_use]          assistant, with reasoning_content and tool_calls

Neighbours of one role are one message, as Anthropic has it. Keys that are not read, of messages and of blocks, are
passed over: clients send back whole answers, and mark what is to be cached. The model continues a last
message of the assistant.
"""

from __future__ import annotations

from typing import Any

from ...scheduler.outcome import RequestRefused
from ..chat.messages import Conversation, Message
from ..fields.reading import one_of, shown, typed

Block = dict[str, Any]

ROLES = ("user", "assistant", "system")

_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}
"""Role -> the types of blocks that its messages take; any other takes text."""

ERROR_MARK = "Error: "
"""Put before the result of a tool that failed: templates have no other place for it."""


def read_conversation(given: Any, system: Any, *, tools: list[dict] | None, variables: dict[str, Any]) -> Conversation:
    """``messages`` and ``system`` of a request. tools: in OpenAI's shape. Raises RequestRefused."""
    if not isinstance(given, list) or not given:
        raise RequestRefused("messages takes a list with at least one message", param="messages")
    messages: list[Message] = []
    if text := _text(_blocks(system, "system", ("text",)) if system is not None else []):
        messages.append({"role": "system", "content": text})
    turns = _turns(given)
    for role, blocks in turns:
        messages += _WRITERS[role](blocks)
    role, blocks = turns[-1]
    if any(block["type"] == "tool_use" for block in blocks):
        raise RequestRefused(
            "the last message holds a tool_use; add a user message with its tool_result", param="messages"
        )
    return Conversation(messages=messages, tools=tools, variables=variables, goes_on=role == "assistant")


def _turns(given: list[Any]) -> list[tuple[str, list[Block]]]:
    """(role, blocks) of each message, neighbours of one role joined."""
    turns: list[tuple[str, list[Block]]] = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RequestRefused(f"{where} is {shown(message)}; it takes an object with role and content", param=where)
        role = one_of(message.get("role"), ROLES, f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content", _BLOCKS.get(role, ("text",)))
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(given: Any, where: str, kinds: tuple[str, ...]) -> list[Block]:
    """A text stands for a block of it."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {shown(given)}; it takes a string or a list of blocks", param=where)
    return [_block(block, f"{where}[{number}]", kinds) for number, block in enumerate(given)]


def _block(given: Any, where: str, kinds: tuple[str, ...]) -> Block:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise RequestRefused(f"{where} is {shown(given)}; it takes an object with a type", param=where)
    if kind not in kinds:
        raise RequestRefused(
            f"{where} is of type {shown(kind)}; here this server takes {' or '.join(kinds)}",
            code="unsupported_content",
            param=where,
        )
    for name in _STRINGS[kind]:
        typed(given.get(name), str, f"{where}.{name}")
    if kind == "tool_use" and not isinstance(given.get("input"), dict):
        raise RequestRefused(
            f"{where}.input is {shown(given.get('input'))}; it takes an object", param=f"{where}.input"
        )
    if kind == "tool_result":
        return _result(given, where)
    return given


_STRINGS = {
    "text": ("text",), "thinking": ("thinking",), "redacted_thinking": ("data",), "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",), "tool_reference": ("tool_name",),
}  # fmt: skip


def _result(given: Block, where: str) -> Block:
    """With ``content`` as a text."""
    content = given.get("content")
    blocks = _blocks([] if content is None else content, f"{where}.content", ("text", "tool_reference"))
    text = _text(blocks)
    failed = given.get("is_error")
    if typed(False if failed is None else failed, bool, f"{where}.is_error"):
        text = ERROR_MARK + text
    return {**given, "content": text}


def _text(blocks: list[Block]) -> str:
    """A reference to a tool is its name: every tool is offered from the start."""
    return "\n".join(block[_WORDS[block["type"]]] for block in blocks if block["type"] in _WORDS)


_WORDS = {"text": "text", "tool_reference": "tool_name"}

# -- the messages of one turn --------------------------------------------------------------------------------------


def _of_user(blocks: list[Block]) -> list[Message]:
    """Results first: they belong to the calls of the message before."""
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    if len(messages) < len(blocks) or not blocks:
        messages.append({"role": "user", "content": _text(blocks)})
    return messages


def _of_assistant(blocks: list[Block]) -> list[Message]:
    """Redacted thoughts are left out: only the model that made them can read them."""
    message: Message = {"role": "assistant", "content": _text(blocks)}
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _of_system(blocks: list[Block]) -> list[Message]:
    return [{"role": "system", "content": _text(blocks)}]


_WRITERS = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}
