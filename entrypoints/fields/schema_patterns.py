r"""Regular expressions of JSON schemas, which are ECMAScript's, as Rust's, which llguidance reads.

    \d \w \s     ASCII digits and letters, and ECMAScript's spaces     [[a]      a class with [ and a, none in another
    .            no \u2028 and \u2029, either                          [a&&b]    no intersection
    \cA \u0041   characters by number                                  \A \z     no anchors, but no letters, either

What has another meaning in other dialects, or none, is refused. (?P<name>…) and (?i), which ECMAScript does not have,
mean the same wherever there are any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_SPACES = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_SETS: Mapping[str, str] = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACES}]",
    "S": f"[^{_SPACES}]",
}
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}

_COUNT = re.compile(r"\{\d+(,\d*)?\}")
_PROPERTY = re.compile(r"[pP]\{[^{}]*\}")
_BY_NUMBER = re.compile(
    r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})(?:\\u([dD][c-fC-F][0-9a-fA-F]{2}))?"
)
_SIMPLE = re.compile(r"""[\w /,:;@%'"<>=!#&~^$|()-]*""")
_GROUP = re.compile(r"\?(:|i:|P?<[A-Za-z_]\w*>)")
_ANY_CASE = "(?i)"


def translate_pattern(pattern: str) -> str:
    """Raises ValueError for what cannot be translated."""
    return pattern if is_simple(pattern) else _Translation(pattern).run()


def is_simple(pattern: str) -> bool:
    """Has it the same meaning everywhere?"""
    return _SIMPLE.fullmatch(pattern) is not None


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0
        self._found: list[str] = []

    def run(self) -> str:
        if self._pattern.startswith(_ANY_CASE):
            self._at = len(_ANY_CASE)
            self._found.append(_ANY_CASE)
        may_repeat = False
        while self._at < len(self._pattern):
            may_repeat = self._term(may_repeat)
        return "".join(self._found)

    def _term(self, may_repeat: bool) -> bool:
        """Reads one term. Returns whether a quantifier may follow."""
        character = self._next()
        match character:
            case "\\":
                self._found.append(self._escape())
            case "[":
                self._found.append(self._set())
            case ".":
                self._found.append(r"[^\n\r\x{2028}\x{2029}]")
            case "(":
                self._found.append("(" + self._group())
                return False
            case "^" | "$" | "|":
                self._found.append(character)
                return False
            case ")":
                self._found.append(character)
            case "*" | "+" | "?" | "{":
                return self._quantifier(character, may_repeat)
            case _:
                self._found.append(_quoted(character))
        return True

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise ValueError("it ends within an escape or a class")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._pattern, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _group(self) -> str:
        if self._pattern[self._at : self._at + 1] != "?":
            return ""
        found = self._take(_GROUP)
        if found is None:
            kind = self._pattern[self._at - 1 : self._at + 3]
            what = "a look-around" if kind[2:3] in ("=", "!", "<") else "a group of another dialect"
            raise ValueError(f"{kind!r} begins {what}")
        return "?i:" if found[1] == "i:" else "?:"

    def _quantifier(self, character: str, may_repeat: bool) -> bool:
        if character == "{":
            self._at -= 1
            found = self._take(_COUNT)
            if found is None:
                if re.match(r"\{\s*,", self._pattern[self._at :]):
                    raise ValueError("{,n} has several meanings; write {0,n}")
                self._at += 1
                self._found.append(r"\{")
                return True
            character = found[0]
        if not may_repeat:
            raise ValueError(f"{character!r} repeats nothing")
        self._found.append(character)
        if self._pattern[self._at : self._at + 1] == "?":
            self._at += 1
            self._found.append("?")
        return False

    def _escape(self) -> str:
        """Outside of a class."""
        if self._pattern[self._at : self._at + 1] in ("b", "B"):
            raise ValueError(r"\b and \B look around")
        return self._escaped()

    def _escaped(self) -> str:
        """The set or the character that a backslash escapes."""
        if (by_number := self._take(_BY_NUMBER)) is not None:
            return _quoted(self._character(by_number))
        if (names := self._take(_PROPERTY)) is not None:
            return rf"\{names[0]}"
        character = self._next()
        if character in _SETS:
            return _SETS[character]
        if character in _CONTROLS:
            return _quoted(_CONTROLS[character])
        following = self._pattern[self._at : self._at + 1]
        if character == "c" and following.isascii() and following.isalpha():
            self._at += 1
            return _quoted(chr(ord(following) % 32))
        if character == "0" and not following.isdecimal():
            return _quoted("\0")
        if character.isalnum():
            kind = "refers back" if character.isdecimal() or character == "k" else "is no escape of ECMAScript"
            raise ValueError(rf"\{character} {kind}")
        return _quoted(character)

    def _character(self, found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code <= 0xDBFF and found[4]:
            code = 0x10000 + ((code - 0xD800) << 10) + int(found[4], 16) - 0xDC00
        elif found[4]:  # a character, and something else behind it
            self._at -= len(r"\uffff")
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise ValueError(f"{found[0]} is no character")
        return chr(code)

    # -- classes -------------------------------------------------------------------------------------------------------

    def _set(self) -> str:
        opening = "[^" if self._pattern[self._at : self._at + 1] == "^" else "["
        self._at += len(opening) - 1
        if self._pattern[self._at : self._at + 1] == "]":
            raise ValueError(f"{opening}] has several meanings; escape the ]")
        found = [opening]
        while (first := self._member()) is not None:
            found.append(first)
            is_range = (
                self._pattern[self._at : self._at + 1] == "-" and self._pattern[self._at + 1 : self._at + 2] != "]"
            )
            if is_range:
                self._at += 1
                last = self._member()
                if last is None or _is_set(first) or _is_set(last):
                    raise ValueError("a range in a class has no end, or a class as an end; escape the -")
                found += ["-", last]
        return "".join((*found, "]"))

    def _member(self) -> str | None:
        """A character of a class, or a class in it; None at its end."""
        character = self._next()
        if character == "]":
            return None
        if character != "\\":
            return _quoted(character)
        if self._pattern[self._at : self._at + 1] == "b":
            self._at += 1
            return _quoted("\b")
        if self._pattern[self._at : self._at + 1] == "B":
            raise ValueError(r"\B in a class is no escape of ECMAScript")
        return self._escaped()


def _quoted(character: str) -> str:
    """A character that stands for itself, also in a class."""
    if character.isalnum() or character in " \"'_/<>=!@%,:;`":
        return character
    return rf"\x{{{ord(character):x}}}"


def _is_set(member: str) -> bool:
    return member.startswith("[") or member[:2] in (r"\p", r"\P")


# -- formats -----------------------------------------------------------------------------------------------------------

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z]|[0-9A-Za-z-][0-9A-Za-z](?:[0-9A-Za-z-]{0,59}[0-9A-Za-z])?" \
         "|[0-9A-Za-z]-[0-9A-Za-z](?:[0-9A-Za-z-]{0,58}[0-9A-Za-z])?)?"  # fmt: skip
"""At most 63 characters, and no -- where an encoded label has it."""
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"

_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"
_LOCAL = (
    rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,31}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{2}}"
    rf"|{_ATOM}{{1,15}}(?:\.{_ATOM}{{1,15}}){{3}})"
)
"""At most 64 characters. Together with a pattern of its own for the length, llguidance could not tell whether there is
any such string."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_MAIL = rf"{_LOCAL}@(?:{_HOST}|\[{_BYTE}(?:\.{_BYTE}){{3}}\])"


class Format(NamedTuple):
    """longest: maxLength, if there is one."""

    pattern: str
    longest: int | None = None


FORMATS: Mapping[str, Format] = {
    "date": Format(f"^{_DATE}$"),
    "time": Format(f"^{_TIME}$"),
    "date-time": Format(f"^{_DATE}T{_TIME}$"),
    "hostname": Format(f"^{_HOST}$", 253),
    "email": Format(f"^{_MAIL}$", 254),
}
"""Formats for which llguidance takes too much: 30 February, hosts of any length. Leap seconds are left out: they depend
on the date and the time zone."""
