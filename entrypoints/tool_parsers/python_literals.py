"""Python literals -> JSON text, for models that write arguments as Python.

Not by `ast.literal_eval`: it can crash the interpreter on hostile text, warns about escapes that Python would refuse,
and does not know the ``true`` and ``null`` that models mix in.
"""

from __future__ import annotations

import re

from .json_text import NUMBER, dumps

MAX_DEPTH = 64
"""Literals that are nested deeper count as none."""

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<number>[+-]?[0-9.][0-9a-zA-Z_.]*(?:(?<=[eE])[+-][0-9_]+)?)
    | (?P<name>[A-Za-z_]+)
    | (?P<mark>[][(){},:])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {
    "\\": "\\", "'": "'", '"': '"', "\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", "0": "\0",
}  # fmt: skip
_CLOSES = {"[": "]", "(": ")", "{": "}"}


def literal_to_json(source: str) -> str | None:
    """JSON text of a literal: strings, numbers, True, False, None, lists, tuples and dicts of them; None if the text is
    none, or is nested deeper than `MAX_DEPTH`."""
    try:
        reader = _Literals(source)
        text = reader.read_literal(0)
        return text if reader.at == len(source) else None
    except ValueError:
        return None


class _Literals:
    """Reads one literal after the other; ``at`` is behind the last token that was read. Raises ValueError."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.at = 0

    def read_literal(self, depth: int) -> str:
        kind, token = self._next()
        if kind == "string":
            return dumps(self._string(token))
        if kind == "number":
            return _number(token)
        if kind == "name" and token in _NAMES:
            return _NAMES[token]
        if token in _CLOSES and depth < MAX_DEPTH:
            return self._dict(depth) if token == "{" else self._list(token, depth)
        raise ValueError(token)

    def _list(self, opening: str, depth: int) -> str:
        items: list[str] = []
        comma = False
        while not self._skip(_CLOSES[opening]):
            if items and not comma:
                raise ValueError("a comma is missing")
            items.append(self.read_literal(depth + 1))
            comma = self._skip(",")
        if opening == "(" and len(items) == 1 and not comma:
            return items[0]
        return f"[{', '.join(items)}]"

    def _dict(self, depth: int) -> str:
        items: list[str] = []
        comma = False
        while not self._skip("}"):
            if items and not comma:
                raise ValueError("a comma is missing")
            key = self.read_literal(depth + 1)
            if not self._skip(":") or key[0] in "[{":
                raise ValueError("no key")
            name = key if key[0] == '"' else dumps(key)
            items.append(f"{name}: {self.read_literal(depth + 1)}")
            comma = self._skip(",")
        return f"{{{', '.join(items)}}}"

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._source, self.at)
        if found is None:
            raise ValueError("no token")
        self.at = found.end()
        kind = found.lastgroup or ""
        return kind, found[kind]

    def _skip(self, mark: str) -> bool:
        found = _TOKEN.match(self._source, self.at)
        if found is None or found["mark"] != mark:
            return False
        self.at = found.end()
        return True

    def _string(self, token: str) -> str:
        quotes = 3 if token[:3] in ("'''", '"""') else 1
        return _ESCAPE.sub(_unescape, token[quotes:-quotes])


def _unescape(found: re.Match[str]) -> str:
    text = found[0]
    if text[1] in "xuU" and len(text) > 2:
        code = int(text[2:], 16)
        return chr(code) if code <= 0x10FFFF else text
    return _ESCAPES.get(text[1], text)


def _number(token: str) -> str:
    """A JSON number of the same value; the token itself where it is one."""
    token = token.removeprefix("+")
    if NUMBER.fullmatch(token):
        return token
    try:
        return str(int(token, 0))
    except ValueError:
        value = float(token)
    if value - value != 0:
        raise ValueError(f"{token} is no JSON number")
    return repr(value)
