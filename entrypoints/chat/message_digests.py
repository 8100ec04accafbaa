"""Digests of a chat. By them a later chat of the same conversation is recognised although a part of it has changed, and
the first message that changed is found.

    keys       of the last messages that are the assistant's or stand beside one, each with the one before it: the texts
               that change (`prefix_rules`) are left out, and an assistant's message counts by what it says and calls;
               of a chat that has no answer yet, one key of all messages. Where there are such texts, the same keys
               with them come first, so that conversations that differ in nothing else are told apart
    messages   one digest for each message, as the template gets it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    turn are among them. last: of the last message that is not the system's; empty if there is none. begins: see
    `Recognition`. said: of what the
    answer of a recorded turn says and calls. thought: it has thoughts."""

    messages: np.ndarray
    tools: bytes
    variables: bytes
    keys: tuple[bytes, ...] = ()
    last: bytes = b""
    begins: bytes = b""
    fixed: Mapping[str, str] = field(default_factory=dict)
    said: bytes = b""
    thought: bool = False


def digest_chat(conversation: Conversation, known_by: Recognition, fixed: Mapping[str, str]) -> ChatDigests:
    """Digest a conversation as the template gets it, without a message that the model continues. ``known_by`` is made
    of the conversation as the client sent it."""
    count = len(conversation.messages) - conversation.goes_on
    joined = b"".join(map(_digest, conversation.messages[:count]))
    return ChatDigests(
        messages=np.frombuffer(joined, dtype=np.uint64),
        tools=_digest((conversation.tools, conversation.documents)),
        variables=_digest(conversation.variables),
        keys=known_by.keys,
        last=known_by.last,
        begins=known_by.begins,
        fixed=fixed,
    )


class Recognition(NamedTuple):
    """See `ChatDigests.keys` and `ChatDigests.last`. begins: digest of the messages before the first answer, as the
    client sent them, if they have texts that change; else empty. places: the message of each key."""

    keys: tuple[bytes, ...] = ()
    last: bytes = b""
    begins: bytes = b""
    places: tuple[int, ...] = ()

    def keys_from(self, given: int) -> tuple[bytes, ...]:
        """The keys of a turn whose conversation came with so many messages. Answers among these are examples, which
        other conversations may have, too; only the last of them counts, with the one before it."""
        return tuple(key for key, place in zip(self.keys, self.places, strict=True) if place >= given - 1)


def recognition_of(conversation: Conversation) -> Recognition:
    """A chat has one of these keys in common with a turn only if it repeats an answer of that conversation, or all of
    its messages. So clients that the server cannot tell apart do not see each other's texts because both say hello."""
    stable = without_volatile_texts(conversation.messages)
    numbered = [(place, message) for place, message in enumerate(stable) if message["role"] in _NOT_OF_SYSTEM]
    last = _key(numbered[-1][1]) if numbered else b""
    begins = b"" if stable is conversation.messages else _begins(conversation.messages)
    if not has_answers(conversation):
        whole = _digest([(message["role"], _words(message)) for message in stable])
        keys = _with_beginning([whole], begins)
        return Recognition(keys, last, begins, (len(stable) - 1,) * len(keys))
    found: list[tuple[int, bytes]] = []
    later: Message | None = None
    later_place = 0
    for place, message in numbered[: -MAX_KEYED_MESSAGES - 2 : -1]:
        if later is not None and "assistant" in (message["role"], later["role"]):
            found += [(later_place, key) for key in _keys(later, _key(message))]
        later, later_place = message, place
    if later is not None and later["role"] == "assistant" and len(numbered) <= MAX_KEYED_MESSAGES:
        found += [(later_place, key) for key in _keys(later, b"")]
    places = tuple(place for place, _ in found)
    keys = _with_beginning([key for _, key in found], begins)
    return Recognition(keys, last, begins, places * (len(keys) // max(1, len(places))))


def answer_keys(last: bytes, answer: Message, begins: bytes = b"") -> tuple[bytes, ...]:
    """The keys of an answer, which are those that it has where the client sends it back. last, begins: of the chat that
    it answers."""
    return _with_beginning(_keys(answer, last), begins)


def answer_message(text: str, calls: Iterable[tuple[str, str]]) -> Message:
    """An answer, as far as `said_digest` reads it. calls: (name, the JSON of the arguments)."""
    functions = [{"function": {"name": name, "arguments": read_arguments(json)}} for name, json in calls]
    return {"role": "assistant", "content": text, "tool_calls": functions}


def said_digest(message: Message) -> bytes:
    """Digest an assistant's text and calls, without its thoughts and the ids of calls."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return _digest((_words(message), [(call.get("name"), call.get("arguments") or {}) for call in calls]))


def _begins(messages: list[Message]) -> bytes:
    answer = next((number for number, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    return _digest([(message["role"], message.get("content")) for message in messages[:answer]])


def _with_beginning(keys: list[bytes], begins: bytes) -> tuple[bytes, ...]:
    if not begins:
        return tuple(keys)
    return (*(hashlib.blake2b(begins + key, digest_size=8).digest() for key in keys), *keys)


def _keys(message: Message, before: bytes) -> list[bytes]:
    """before: key of the message before it."""
    known = _key(message)
    keys = [hashlib.blake2b(before + known, digest_size=8).digest()]
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
