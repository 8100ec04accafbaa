"""Digests of a chat. By them a later chat of the same conversation is recognised although a part of it has changed, and
the first message that changed is found.

    keys       of the last messages that are the assistant's or stand beside one, each with the one before it: the texts
               that change (`prefix_rules`) are left out, and an assistant's message counts by what it says and calls;
               of a chat that has no answer yet, one key of all messages
    messages   one digest for each message, as the template gets it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from .messages import Conversation, Message, has_answers, read_arguments
from .prefix_rules import without_volatile_texts

MAX_KEYED_MESSAGES = 64
"""Last messages of a chat that have keys."""

_TELLING_CHARS = 32
"""An assistant's message that says as much has a key without the message before it, too."""

_NOT_OF_SYSTEM = ("user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatDigests:
    """messages: uint64 [n]. tools: of tools and documents. variables: of the template's. fixed: the values that rules
    keep for the conversation (`Normalized.fixed`). keys: the latest message first; those of the answer of a recorded
    turn are among them. said: of what that answer says and calls; 0 where there is none. thought: it has thoughts."""

    messages: np.ndarray
    tools: bytes
    variables: bytes
    keys: tuple[bytes, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    said: bytes = b""
    thought: bool = False


def digest_chat(conversation: Conversation, keys: tuple[bytes, ...], fixed: Mapping[str, str]) -> ChatDigests:
    """Of a conversation as the template gets it; a message that the model continues is left out. keys:
    `recognition_keys` of it as the client sent it."""
    count = len(conversation.messages) - conversation.goes_on
    joined = b"".join(map(_digest, conversation.messages[:count]))
    return ChatDigests(
        messages=np.frombuffer(joined, dtype=np.uint64),
        tools=_digest((conversation.tools, conversation.documents)),
        variables=_digest(conversation.variables),
        keys=keys,
        fixed=fixed,
    )


def recognition_keys(conversation: Conversation) -> tuple[bytes, ...]:
    """A chat has one of these keys in common with a turn only if it repeats an answer of that conversation, or all of
    its messages. So clients that the server cannot tell apart do not see each other's texts because both say hello."""
    if not has_answers(conversation):
        stable = without_volatile_texts(conversation.messages)
        return (_digest([(message["role"], _words(message)) for message in stable]),)
    messages = _told_apart(conversation)
    keys: list[bytes] = []
    for number in range(len(messages) - 1, max(-1, len(messages) - 1 - MAX_KEYED_MESSAGES), -1):
        keys += _keys(messages[number], messages[number - 1] if number else None)
    return tuple(keys)


def answer_keys(conversation: Conversation, answer: Message) -> tuple[bytes, ...]:
    """The keys of an answer to the conversation, which are those that it has where the client sends it back."""
    messages = _told_apart(conversation)
    return tuple(_keys(answer, messages[-1] if messages else None))


def answer_message(text: str, calls: Iterable[tuple[str, str]]) -> Message:
    """An answer, as far as `said_digest` reads it. calls: (name, the JSON of the arguments)."""
    functions = [{"function": {"name": name, "arguments": read_arguments(json)}} for name, json in calls]
    return {"role": "assistant", "content": text, "tool_calls": functions}


def said_digest(message: Message) -> bytes:
    """Of what an assistant's message says and calls, without its thoughts and the ids of calls."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return _digest((_words(message), [(call.get("name"), call.get("arguments") or {}) for call in calls]))


def _told_apart(conversation: Conversation) -> list[Message]:
    messages = without_volatile_texts(conversation.messages)
    return [message for message in messages if message["role"] in _NOT_OF_SYSTEM]


def _keys(message: Message, before: Message | None) -> list[bytes]:
    known = _key(message)
    if "assistant" not in (message["role"], before["role"] if before is not None else ""):
        return []
    keys = [hashlib.blake2b((_key(before) if before is not None else b"") + known, digest_size=8).digest()]
    if message["role"] == "assistant" and len(_words(message)) >= _TELLING_CHARS:
        keys.append(known)
    return keys


def _key(message: Message) -> bytes:
    if message["role"] == "assistant":
        return said_digest(message)
    return _digest((message["role"], _words(message)))


def _words(message: Message) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _digest(value: Any) -> bytes:
    """8 bytes; the same for all values that are nested too deeply."""
    try:
        data = msgspec.json.encode(value, order="sorted")
    except RecursionError:
        data = b""
    return hashlib.blake2b(data, digest_size=8).digest()
