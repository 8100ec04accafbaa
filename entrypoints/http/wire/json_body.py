"""Decodes JSON bodies: large ones piece by piece, with turns for other requests in between, and within bounds. An
object in memory is up to sixty times as large as in JSON, and the decoder holds the GIL while it works.

Nothing looks at more than a piece at once. Expressions find as many whole elements as a piece has, the decoder makes
values of these and is the judge of what is JSON; only what is longer than a piece, or deep, is taken apart here.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from ....scheduler.outcome import RequestRefused

PIECE_BYTES = 32 * 1024
"""A piece of up to this size is decoded at once: within milliseconds, whatever it holds. An answer to others takes some
turns of the loop, each of which may come after a piece."""

MAX_VALUES = 2_000_000
"""Values in a large body: texts, token ids, names. A value takes up to a hundred bytes, beside its text."""

_TEXT_BYTES = 50
"""So many bytes of text count as one more value. A text takes four bytes a character once it has one emoji."""

_LIST_WEIGHT = 8
"""A list or an object counts as so many values: the garbage collector stops the process while it visits them all."""

_STEP_BYTES = 128
"""A step of the walk takes as long as so many bytes."""

_FAILURE_BYTES = 2048
"""Likewise a look that finds nothing; it may have looked at a whole piece."""

_SPACE = rb"[ \t\r\n]*+"
_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_TEXT = rb'"' + _INSIDE + rb'"'
_DEPTH = 6
"""Deeper elements are walked through."""


def _nested(depth: int) -> bytes:
    """Lists and objects in each other, seen as brackets and texts."""
    inner = rb"|" + _nested(depth - 1) if depth > 1 else b""
    return rb'[{\[](?:[^{}\[\]"]++|' + _TEXT + inner + rb")*+[}\]]"


_WHOLE = rb"(?:" + _TEXT + rb'|[^{}\[\]",: \t\r\n]++|' + _nested(_DEPTH) + rb")"


def _expression(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_SPACES = _expression(_SPACE)
_INSIDE_OF_TEXT = _expression(_INSIDE)
_VALUE = _expression(_WHOLE)
_ELEMENTS = _expression(rb"(?:" + _SPACE + _WHOLE + _SPACE + rb",)++")
_MEMBERS = _expression(rb"(?:" + _SPACE + _TEXT + _SPACE + rb":" + _SPACE + _WHOLE + _SPACE + rb",)++")

_ESCAPE_BYTES = len("\\u0041")
_FURTHEST_CUT = 2 * len("\\ud83d\\ude00")
"""In any text that is valid there is a place within so many bytes."""
_SECOND_OF_PAIR = _expression(rb"\\u[dD][c-fC-F]")
_ESCAPES = _expression(
    rb"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<half>u[dD][89a-fA-F][\da-fA-F]{2})|.)"
)
"""Each is one character, but for a half of one."""


async def decode_object(body: bytearray) -> dict[str, Any]:
    """The object in ``body``, which is emptied. Raises RequestRefused (400)."""
    try:
        decoded = _decode_piece(body) if len(body) <= PIECE_BYTES else await _LargeBody(body).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    body.clear()
    return decoded


class _LargeBody:
    """Walks through one body, and counts what it has made of it. Methods raise RequestRefused, and what the decoder
    raises."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 0
        self._values = 0
        self._bytes_since_turn = 0

    async def decode(self) -> Any:
        value = await self._value()
        await self._expect(b"")
        return value

    async def _value(self) -> Any:
        await self._skip_spaces()
        if found := self._match(_VALUE):
            value = _decode_piece(found)
            await self._add(value)
            return value
        opening = await self._expect(b'"', b"[", b"{")
        if opening != b'"':
            await self._count(_LIST_WEIGHT)
        return await (self._text() if opening == b'"' else self._list() if opening == b"[" else self._object())

    async def _list(self) -> list:
        """Its opening bracket has been passed; likewise below."""
        found: list = []
        while True:
            if group := self._match(_ELEMENTS):
                elements = _decode_piece(b"[" + group[:-1] + b"]", type=list)
                await self._add(elements)
                found += elements
            found.append(await self._value())
            if await self._expect(b"]", b",") == b"]":
                return found

    async def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            if group := self._match(_MEMBERS):
                members = _decode_piece(b"{" + group[:-1] + b"}", type=dict[str, Any])
                await self._add(members)
                found |= members
            await self._expect(b'"')
            name = await self._text()
            await self._expect(b":")
            found[name] = await self._value()
            if await self._expect(b"}", b",") == b"}":
                return found

    async def _text(self) -> str:
        parts: list[str] = []
        length, is_ascii, counted = 0, True, 0
        while True:
            part = self._match(_INSIDE_OF_TEXT)
            is_end = self._data[self._at : self._at + 1] == b'"'
            until = len(part) if is_end else _cut(part)
            parts.append(_decode_piece(b'"' + part[:until] + b'"', type=str))
            self._at += until - len(part) + is_end
            length, is_ascii = length + len(parts[-1]), is_ascii and parts[-1].isascii()
            weight = 1 + _text_weight(length, is_ascii)
            await self._count(weight - counted)
            counted = weight
            if is_end:
                return "".join(parts)

    def _match(self, expression: re.Pattern[bytes]) -> bytes:
        """The text that the expression finds here, which is consumed; empty for none. Never more than a piece."""
        start = self._at
        found = expression.match(self._data, start, start + PIECE_BYTES)
        if found is None:
            self._bytes_since_turn += _FAILURE_BYTES
            return b""
        self._at = found.end()
        self._bytes_since_turn += self._at - start
        return bytes(self._data[start : self._at])

    async def _skip_spaces(self) -> None:
        while self._match(_SPACES):
            await self._take_turns()

    async def _expect(self, *characters: bytes) -> bytes:
        """The next character that is no space, which is passed; it must be one of these, of which b"" is the end."""
        await self._skip_spaces()
        here = bytes(self._data[self._at : self._at + 1])
        if here not in characters:
            what = repr(here.decode("latin-1")) if here else "end"
            raise msgspec.DecodeError(f"unexpected {what} (byte {self._at})")
        self._at += len(here)
        return here

    async def _add(self, made: Any) -> None:
        """Count the values that a step has made."""
        await self._count(_weight(made))

    async def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise RequestRefused(
                f"the body holds more than {MAX_VALUES} values, each {_TEXT_BYTES} bytes of text counted as one; "
                "split the batch"
            )
        await self._take_turns()

    async def _take_turns(self) -> None:
        """After every step."""
        self._bytes_since_turn += _STEP_BYTES
        if self._bytes_since_turn >= PIECE_BYTES:
            self._bytes_since_turn = 0
            await asyncio.sleep(0)


def _decode_piece(piece: bytes | bytearray, type: Any = Any) -> Any:
    """What `msgspec.json.decode` returns. Raises what that raises; for half a surrogate pair, of which the decoder only
    says that the data end too early, a DecodeError that names it."""
    try:
        return msgspec.json.decode(piece, type=type)
    except msgspec.DecodeError:
        for escape in _ESCAPES.finditer(piece):
            if half := escape["half"]:
                raise msgspec.DecodeError(
                    f"\\{half.decode()} is half of a surrogate pair, which is no character; send both halves, or the "
                    "character itself"
                ) from None
        raise


def _weight(made: Any) -> int:
    """How many values it counts as."""
    if isinstance(made, dict):
        return _LIST_WEIGHT + sum(map(_weight, made)) + sum(map(_weight, made.values()))
    if isinstance(made, list):
        larger = [value for value in made if isinstance(value, list | dict | str)]
        return _LIST_WEIGHT + len(made) - len(larger) + sum(map(_weight, larger))
    return 1 + _text_weight(len(made), made.isascii()) if isinstance(made, str) else 1


def _text_weight(length: int, is_ascii: bool) -> int:
    """length: in characters."""
    return (length if is_ascii else 4 * length) // _TEXT_BYTES


def _cut(text: bytes) -> int:
    """The last place where this piece of a JSON text, which begins with a whole character, can be cut."""
    last = len(text) - _ESCAPE_BYTES
    for at in range(last, max(0, last - _FURTHEST_CUT), -1):
        if _can_be_cut(text, at):
            return at
    raise msgspec.DecodeError("an endless run of halves of characters")


def _can_be_cut(text: bytes, at: int) -> bool:
    """True if the cut splits no character, escape, or pair of escapes that make one character."""
    if text[at] & 0xC0 == 0x80:
        return False
    before = text.rfind(b"\\", max(0, at - _ESCAPE_BYTES + 1), at)
    if before >= 0 and _begins_an_escape(text, before):
        length = _ESCAPE_BYTES if text[before + 1 : before + 2] == b"u" else 2
        if at < before + length:
            return False
    return not _SECOND_OF_PAIR.match(text, at)


def _begins_an_escape(text: bytes, at: int) -> bool:
    """True if this backslash is not the second half of an escaped one."""
    before = text[:at]
    return (at - len(before.rstrip(b"\\"))) % 2 == 0
