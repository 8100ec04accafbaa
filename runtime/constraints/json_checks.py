"""Keywords of JSON Schema that no grammar holds, because they compare values: ``uniqueItems``, and ``minProperties``
where names are free (a name that is written twice counts once). Schemas have them here as `UNIQUE` and `LEAST`, which
llguidance passes over.

A `Reader` reads the output's bytes beside llguidance's matcher, and `Reader.withhold` takes tokens out of its masks:
those that would complete an item equal to an earlier one, or close an object with too few names.

    ["red", "re|        a token "d" may follow, but not "d\\""
    ["red", |           where only "red" and "green" may stand, the next item begins with "g (grammar.py tries it out)

Which arrays and objects of the output a keyword is about is overestimated: a value that *may* be held to a subschema,
one of ``anyOf`` or ``then``, is read as if it were. So an output is held to what its schema asks, or to more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple, Self

import numpy as np

UNIQUE = "x-baton-unique-items"
"""True: no two items of an array are equal."""

LEAST = "x-baton-min-names"
"""So many different names has an object at least."""

_LISTS_IN_PLACE = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("if", "then", "else")

_ENDLESS = frozenset({"type", "title", "description", "default", "examples", "minLength", UNIQUE, LEAST})
_FEW = frozenset({"boolean", "null"})

MAX_NESTED = 200
"""Arrays and objects inside of each other, from the first one whose items are compared. Python parses only some
hundreds."""

_MAX_DIGITS = 4000
"""Python's int refuses more than 4,300."""

_SPACE = b" \t\n\r"
_LITERALS = (b"true", b"false", b"null")
_WORD_BITS = 32
_KEY = "baton_checks"


# -- which values are checked ------------------------------------------------------------------------------------------


class Place:
    """The subschemas that one value may be held to."""

    def __init__(self, root: Mapping[str, Any], schemas: Sequence[Any]) -> None:
        self._root = root
        self._schemas = _with_parts(root, schemas)
        self.unique = any(each.get(UNIQUE, False) for each in self._schemas)
        self.least = max([0, *(each.get(LEAST, 0) for each in self._schemas)])
        """Names that an object must have."""
        self.is_free = not any(map(_may_check, self._schemas))
        """Nothing here or inside of it is checked."""
        self.is_endless = all(each.keys() <= _ENDLESS and not _is_finite(each.get("type")) for each in self._schemas)
        """It is certain that there are more values than an output can list."""
        self._known: dict[str | int, Place] = {}

    def property(self, name: str) -> Place:
        if name not in self._known:
            found: list[Any] = []
            for each in self._schemas:
                found.append(each.get("properties", {}).get(name, each.get("additionalProperties")))
                found += each.get("patternProperties", {}).values()
            self._known[name] = Place(self._root, found)
        return self._known[name]

    def item(self, index: int) -> Place:
        first = [each.get("prefixItems", []) for each in self._schemas]
        index = min(index, max(map(len, first), default=0))
        if index not in self._known:
            found = [
                own[index] if index < len(own) else each.get("items")
                for each, own in zip(self._schemas, first, strict=True)
            ]
            self._known[index] = Place(self._root, found)
        return self._known[index]


def _is_finite(kinds: Any) -> bool:
    """Are there few values of these types?"""
    return {kinds} <= _FEW if isinstance(kinds, str) else isinstance(kinds, list) and {*kinds} <= _FEW


def _may_check(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return not schema.keys().isdisjoint((UNIQUE, LEAST, "$ref")) or any(map(_may_check, schema.values()))
    return isinstance(schema, list) and any(map(_may_check, schema))


def _with_parts(root: Mapping[str, Any], schemas: Sequence[Any]) -> list[Mapping[str, Any]]:
    """These schemas and all that the same value may be held to through them."""
    found: list[Mapping[str, Any]] = []
    left, seen = [*schemas], set[int]()
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        found.append(each)
        for key in _LISTS_IN_PLACE:
            left += each.get(key, ())
        left += [each[key] for key in _IN_PLACE if key in each]
        left += each.get("dependentSchemas", {}).values()
        if "$ref" in each:
            left.append(resolve(root, each["$ref"]))
    return found


def resolve(root: Any, reference: str) -> Any:
    """The part of a schema that a reference names. Raises LookupError for one that is no pointer into it."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        raise LookupError(reference)
    found = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, Mapping) and step in found:
            found = found[step]
        else:
            raise LookupError(reference)
    return found


# -- what was read -----------------------------------------------------------------------------------------------------


class Tokens:
    """The tokens of a model, and those that can complete a value."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.bytes = tokens
        self.quoting = _mask_of(tokens, b'"')
        """uint32 [words]: inside of a string only these can."""
        self.closing = _mask_of(tokens, b'"]},' + _SPACE + b"el")
        """uint32 [words], outside of strings: a number ends where something follows it, a word with its last letter."""
        self.opening = self.closing | _mask_of(tokens, b"[{")
        self._ids = {token: number for number, token in enumerate(tokens) if token}
        self.longest = max(map(len, tokens), default=0)

    def beginnings_of(self, text: bytes) -> list[int]:
        """The tokens that a text may begin with."""
        found = (self._ids.get(text[:size]) for size in range(1, min(len(text), self.longest) + 1))
        return [token_id for token_id in found if token_id is not None]


def _mask_of(tokens: Sequence[bytes], wanted: bytes) -> np.ndarray:
    """The tokens that have one of these bytes."""
    bits = np.zeros(-(-len(tokens) // _WORD_BITS) * _WORD_BITS, dtype=bool)
    bits[: len(tokens)] = [not {*wanted}.isdisjoint(token) for token in tokens]
    return np.packbits(bits, bitorder="little").view(np.uint32)


def ids_of(mask: np.ndarray) -> np.ndarray:
    """int64 [n], ascending: the tokens of a mask, uint32 [words]."""
    words = np.flatnonzero(mask)
    places, bits = np.nonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, _WORD_BITS))
    return words[places] * _WORD_BITS + bits


class Beginning(NamedTuple):
    """Where in an output the JSON begins: behind ``mark``; with ``opening``, only if the output begins with that, and
    else at once."""

    mark: bytes = b""
    opening: bytes = b""


class JSONChecks(NamedTuple):
    """schema: that the JSON of an output is held to."""

    schema: Mapping[str, Any]
    beginning: Beginning


def wrap(source: str, checks: JSONChecks) -> str:
    """A grammar in llguidance's own form, with checks."""
    schema, (mark, opening) = checks
    return json.dumps({_KEY: {"schema": schema, "mark": mark.decode(), "opening": opening.decode()}, "source": source})


def unwrap(source: str) -> tuple[str, JSONChecks | None]:
    """A grammar in llguidance's own form, and what `wrap` has put around it."""
    if not source.startswith('{"' + _KEY):
        return source, None
    found = json.loads(source)
    schema, mark, opening = found[_KEY].values()
    return found["source"], JSONChecks(schema, Beginning(mark.encode(), opening.encode()))


@dataclass(frozen=True, slots=True)
class _Frame:
    """An array or object that is not closed yet. index: of the current item; -1 in objects. start: of the item, or of a
    name that is being read. name: of the current value; None before it. seen: items in a form that can be compared, or
    names."""

    place: Place
    index: int
    seen: frozenset = frozenset()
    start: int = -1
    name: str | None = None

    @property
    def is_checked(self) -> bool:
        return self.place.unique if self.index >= 0 else self.place.least > 0


_WAITING, _BETWEEN, _STRING, _ESCAPE, _SCALAR, _OVER = range(6)


@dataclass(frozen=True, slots=True)
class Reader:
    """What was read of an output. Immutable."""

    tokens: Tokens
    root: Place
    beginning: Beginning
    mode: int
    text: bytes = b""
    """Text of the JSON; of the output while the JSON has not begun."""
    frames: tuple[_Frame, ...] = ()
    """Outermost first."""

    @classmethod
    def start(cls, tokens: Tokens, checks: JSONChecks) -> Self:
        root = Place(checks.schema, [checks.schema])
        return cls(tokens, root, checks.beginning, _WAITING if checks.beginning.mark else _BETWEEN)

    def advance(self, token_id: int) -> Self | None:
        """None if the token completes what the schema excludes."""
        return self.read(self.tokens.bytes[token_id])

    def read(self, added: bytes) -> Self | None:
        if self.mode == _OVER:
            return self
        if self.mode == _WAITING:
            return self._wait(added)
        scan = _Scan(self.root, self.mode, bytearray(self.text), [*self.frames])
        try:
            fits = all(map(scan.read, added))
        except ValueError:  # a call of a tool, or whatever else the grammar lets stand here
            return replace(self, mode=_OVER, text=b"", frames=())
        return replace(self, mode=scan.mode, text=bytes(scan.text), frames=tuple(scan.frames)) if fits else None

    def _wait(self, added: bytes) -> Self | None:
        text, (mark, opening) = self.text + added, self.beginning
        if not text.startswith(opening):
            if opening.startswith(text):
                return replace(self, text=text)
            return replace(self, mode=_BETWEEN, text=b"").read(text)
        at = text.find(mark, max(0, len(self.text) - len(mark)))
        if at < 0:
            return replace(self, text=text)
        return replace(self, mode=_BETWEEN, text=b"").read(text[at + len(mark) :])

    def withhold(self, mask: np.ndarray) -> np.ndarray:
        """A mask, uint32 [words], without the tokens that `advance` refuses."""
        if self.mode == _OVER or (self.mode == _WAITING and not self._may_begin):
            return mask
        if self.frames and self.frames[-1].place.is_free and not any(frame.is_checked for frame in self.frames):
            return mask
        if self._nested + self.tokens.longest > MAX_NESTED:
            closing = self.tokens.opening
        else:
            closing = self.tokens.quoting if self.mode in (_STRING, _ESCAPE) else self.tokens.closing
        known = min(len(mask), len(closing))
        wrong = [i for i in ids_of(mask[:known] & closing[:known]).tolist() if self.advance(i) is None]
        return without(mask, wrong) if wrong else mask

    @property
    def _nested(self) -> int:
        return _nested(self.frames)

    @property
    def _may_begin(self) -> bool:
        """Could the next token hold the end of the mark, and JSON behind it?"""
        mark, opening = self.beginning
        return not self.text.startswith(opening) or any(self.text.endswith(mark[:size]) for size in range(1, len(mark)))

    @property
    def is_exhaustible(self) -> bool:
        """Could it be that no further item is left that an array, open here, does not have yet?"""
        arrays = [frame for frame in self.frames if frame.index >= 0 and frame.place.unique and frame.seen]
        return any(not frame.place.item(frame.index).is_endless for frame in arrays)

    def repeating(self) -> set[int]:
        """Tokens that an item which has been there would go on with, as it is usually written. Of strings."""
        top = self.frames[-1] if self.frames else None
        if top is None or top.index < 0 or not top.place.unique or self.mode not in (_BETWEEN, _STRING):
            return set()
        written = self.text[top.start :] if self.mode == _STRING else b""
        found: set[int] = set()
        for item in top.seen:
            spelled = json.dumps(item, ensure_ascii=False).encode(errors="replace") if isinstance(item, str) else b""
            if spelled.startswith(written):
                left = spelled[len(written) :]
                found.update(self.tokens.beginnings_of(left))
                found.update(self.tokens.beginnings_of(b" " + left) if self.mode == _BETWEEN else ())
        return found

    def got_further(self, later: Reader) -> bool:
        """Has ``later`` another item, or two if a further one must follow, in the innermost array that is held to
        uniqueItems, or is that closed?"""
        depth = max((at for at, frame in enumerate(self.frames) if frame.place.unique and frame.index >= 0), default=-1)
        if len(later.frames) <= depth:
            return True
        now = later.frames[depth]
        more = len(now.seen) - len(self.frames[depth].seen)
        return more > 1 or (more == 1 and len(now.seen) > now.index)


def without(mask: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """A mask, uint32 [words], without these tokens."""
    ids = np.array(token_ids, dtype=np.int64)
    mask = mask.copy()
    np.bitwise_and.at(mask, ids // _WORD_BITS, ~(np.uint32(1) << (ids % _WORD_BITS).astype(np.uint32)))
    return mask


@dataclass(slots=True)
class _Scan:
    """Reads a few bytes more. Raises ValueError for what is no JSON."""

    root: Place
    mode: int
    text: bytearray
    frames: list[_Frame]

    def read(self, byte: int) -> bool:
        """False if the byte completes what the schema excludes."""
        self.text.append(byte)
        if self.mode == _STRING:
            if byte == ord("\\"):
                self.mode = _ESCAPE
            elif byte == ord('"'):
                self.mode = _BETWEEN
                return self._end_string()
            return True
        if self.mode == _ESCAPE:
            self.mode = _STRING
            return True
        if self.mode == _SCALAR:
            if byte not in b",]}" + _SPACE:
                frame = self.frames[-1] if self.frames else None
                start = frame.start if frame is not None else 0
                if self.text[start:].endswith((b"e", b"l")) and bytes(self.text[start:]) in _LITERALS:
                    self.mode = _BETWEEN
                    return self._complete(len(self.text))
                return True
            self.mode = _BETWEEN
            if not self._complete(len(self.text) - 1):
                return False
        return self._between(byte)

    def _between(self, byte: int) -> bool:
        if byte in _SPACE or byte == ord(":"):
            return True
        top = self.frames[-1] if self.frames else None
        if byte == ord(","):
            if top is None:
                raise ValueError("a comma outside of JSON")
            self.frames[-1] = replace(top, index=top.index + 1 if top.index >= 0 else -1, name=None)
            return True
        if byte in b"]}":
            if top is None or (byte == ord("]")) != (top.index >= 0):
                raise ValueError("a bracket that closes nothing")
            if top.index < 0 and len(top.seen) < top.place.least:
                return False
            self.frames.pop()
            return self._complete(len(self.text))
        if top is None and len(self.text.strip()) > 1:
            raise ValueError("text behind JSON")
        if top is not None:
            self.frames[-1] = replace(top, start=len(self.text) - 1)
        if byte == ord('"'):
            self.mode = _STRING
        elif byte in b"[{":
            if _nested(self.frames) >= MAX_NESTED:
                return False
            self.frames.append(_Frame(self._place(top), 0 if byte == ord("[") else -1))
        else:
            self.mode = _SCALAR
        return True

    def _place(self, top: _Frame | None) -> Place:
        """Place of the value that begins."""
        if top is None:
            return self.root
        return top.place.item(top.index) if top.index >= 0 else top.place.property(top.name or "")

    def _end_string(self) -> bool:
        top = self.frames[-1] if self.frames else None
        if top is not None and top.index < 0 and top.name is None:
            name = _parsed(self.text[top.start :])
            self.frames[-1] = replace(top, name=name, seen=top.seen | {name})
            return True
        return self._complete(len(self.text))

    def _complete(self, stop: int) -> bool:
        """A value ends before ``stop``."""
        top = self.frames[-1] if self.frames else None
        if top is None or top.index < 0 or not top.place.unique:
            return True
        value = comparable(_parsed(self.text[top.start : stop]))
        if value in top.seen:
            return False
        self.frames[-1] = replace(top, seen=top.seen | {value})
        return True


def _nested(frames: Sequence[_Frame]) -> int:
    """Arrays and objects that are open from the first one whose items are compared."""
    return next((len(frames) - at for at, frame in enumerate(frames) if frame.index >= 0 and frame.place.unique), 0)


def _parsed(text: bytearray) -> Any:
    """Raises ValueError for what is no JSON."""
    return json.loads(text, parse_int=_whole)


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _MAX_DIGITS else Decimal(digits)


def comparable(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal: 1 is 1.0, and not true."""
    match value:
        case bool():
            return ("bool", value)
        case list():
            return ("list", tuple(map(comparable, value)))
        case dict():
            return ("object", frozenset((name, comparable(each)) for name, each in value.items()))
    return value
