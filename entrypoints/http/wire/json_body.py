"""Decodes JSON bodies. Large ones piece by piece, with turns for everybody else in between, and within bounds: an
object in memory is up to sixty times as large as in JSON, and the decoder holds the GIL while it works.

A large piece is scanned for the characters that make values before anything is made of it. The counts are upper
bounds, since texts hold those characters too: a text has about as many tokens.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from ....scheduler.outcome import RequestRefused

PIECE_BYTES = 256 * 1024
"""A piece of up to this size is decoded at once, within some milliseconds."""

MAX_VALUES = 2_000_000
"""Of a body, but for its texts: token ids, lists, objects. A value takes up to a hundred bytes."""

_MAX_NAMES = MAX_VALUES // 2
_MAX_TEXTS = MAX_VALUES
_SPACE = b" \t\r\n"
_ESCAPE_BYTES = len("\\u0041")
_SECOND_OF_PAIR = re.compile(rb"\\u[dD][c-fC-F]")

_Texts = list[str | None]
_Numbers = list[int | float | None]
_Raws = list[msgspec.Raw]
_Fields = dict[str, msgspec.Raw]


async def decode_object(body: bytearray) -> dict[str, Any]:
    """The object in ``body``, which is emptied. Raises RequestRefused (400)."""
    try:
        decoded = msgspec.json.decode(body) if len(body) <= PIECE_BYTES else await _LargeBody().decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    body.clear()
    return decoded


class _LargeBody:
    """Counts what has been made of one body."""

    def __init__(self) -> None:
        self._values = 0
        self._bytes_since_turn = 0

    async def decode(self, piece: bytearray | msgspec.Raw) -> Any:
        """Raises RequestRefused, and what the decoder raises."""
        data = memoryview(piece)
        kind, inner = _kinds(data)
        size = len(data)
        if size > PIECE_BYTES and kind == b"{":
            await self._count(piece, b":", _MAX_NAMES)
            # Even looking for the fields would take long.
            await self._count(piece, b"{", MAX_VALUES)
            await self._count(piece, b"[", MAX_VALUES)
            fields = msgspec.json.decode(piece, type=_Fields)
            await asyncio.sleep(0)
            return {name: await self.decode(value) for name, value in fields.items()}
        if size > PIECE_BYTES and kind == b"[":
            return await self._decode_list(piece, inner)
        if size > PIECE_BYTES and kind == b'"':
            return await self._decode_text(data)
        if kind != b'"':
            self._add(bytes(data).count(b",") + 1)
        decoded = msgspec.json.decode(piece)
        await self._take_turns(size)
        return decoded

    async def _decode_list(self, piece: bytearray | msgspec.Raw, inner: bytes) -> list:
        try:
            if inner == b'"':
                await self._count(piece, b'"', 2 * _MAX_TEXTS)
                return msgspec.json.decode(piece, type=_Texts)
            count = await self._count(piece, b",", MAX_VALUES)
            if inner in b"[{":
                return [await self.decode(element) for element in msgspec.json.decode(piece, type=_Raws)]
            self._add(count + 1)
            return msgspec.json.decode(piece, type=_Numbers)
        except msgspec.ValidationError:
            raise RequestRefused(
                "a long list holds values of several kinds; it takes texts, numbers, lists or objects"
            ) from None

    async def _decode_text(self, quoted: memoryview) -> str:
        parts, start, end = [], 1, len(quoted) - 1
        while start < end:
            part = bytes(quoted[start : min(start + PIECE_BYTES + _ESCAPE_BYTES, end)])
            until = len(part) if start + len(part) == end else _cut(part)
            parts.append(msgspec.json.decode(b'"' + part[:until] + b'"', type=str))
            start += until
            await self._take_turns(PIECE_BYTES)
        return "".join(parts)

    async def _count(self, piece: bytearray | msgspec.Raw, character: bytes, most: int) -> int:
        """How often the character is there. Raises RequestRefused for more than ``most``."""
        data, count = memoryview(piece), 0
        for start in range(0, len(data), 4 * PIECE_BYTES):
            count += bytes(data[start : start + 4 * PIECE_BYTES]).count(character)
            if count > most:
                raise _too_many()
            await self._take_turns(PIECE_BYTES)
        return count

    def _add(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise _too_many()

    async def _take_turns(self, size: int) -> None:
        self._bytes_since_turn += size
        if self._bytes_since_turn >= PIECE_BYTES:
            self._bytes_since_turn = 0
            await asyncio.sleep(0)


def _cut(text: bytes) -> int:
    """The last place where this piece of a JSON text, which begins with a whole character, can be cut."""
    for at in range(len(text) - _ESCAPE_BYTES, 0, -1):
        if _can_be_cut(text, at):
            return at
    raise msgspec.DecodeError("an endless run of halves of characters")


def _can_be_cut(text: bytes, at: int) -> bool:
    """Whether no character, escape, or pair of escapes that make one character stands on both sides."""
    if text[at] & 0xC0 == 0x80:
        return False
    before = text.rfind(b"\\", max(0, at - _ESCAPE_BYTES + 1), at)
    if before >= 0 and _begins_an_escape(text, before):
        length = _ESCAPE_BYTES if text[before + 1 : before + 2] == b"u" else 2
        if at < before + length:
            return False
    return not _SECOND_OF_PAIR.match(text, at)


def _begins_an_escape(text: bytes, at: int) -> bool:
    """Whether this backslash is no second half of an escaped one."""
    before = at
    while before > 0 and text[before - 1] == 0x5C:
        before -= 1
    return (at - before) % 2 == 0


def _kinds(data: memoryview) -> tuple[bytes, bytes]:
    """The first character that is no space, and the next one; the latter says what a list holds."""
    begin = bytes(data[:1024]).lstrip(_SPACE)
    return begin[:1], begin[1:].lstrip(_SPACE)[:1]


def _too_many() -> RequestRefused:
    return RequestRefused(f"the body holds more than {MAX_VALUES} values; split the batch")
