"""The commands of a shell script, each as its words; as much of the language as it takes to find where they begin.

No parser: what a shell would refuse is read somehow. Every step moves forward, so that a script costs time in
proportion to its length whatever it holds, quotes that nobody closes included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_TOKENS = 4096
"""Words and operators that are looked at. Quoted text and here-documents count as one."""

_KEPT_WORDS = 64
"""Of one command: enough for what stands before its name, and the options behind it."""

_BLANK = re.compile(r"(?:[ \t\r\f\v]|\\\r?\n)++")
_CONTROL = re.compile(r"&&|\|\||;;&?|;&|[;|&()\n]")
_REDIRECT = re.compile(r"[0-9]*+(?:&>>?|<<<|<<-?|<>|>>|>\||[<>]&|[<>])(?!\()")
_PLAIN = re.compile(r"[^\\ \t\r\f\v\n'\"`$;&|<>()]*+")
_ANSI_STRING = re.compile(r"(?:[^'\\]|\\.)*+'?", re.DOTALL)
_SPECIAL = {
    '"': re.compile(r'[\\"`$]'),
    "`": re.compile(r"[\\`]"),
    "'": re.compile(r"'"),
    ")": re.compile(r"[\\'\"`$()]"),
    "}": re.compile(r"[\\'\"`$}]"),
}
"""By the mark that ends a part of a word: what has to be looked at until it comes."""

_OPENS = {"(": ")", "{": "}"}


class Command(NamedTuple):
    """One simple command: its first words as written, quotes and all, without redirections. ends_with: the operator
    behind it, "" for none."""

    words: list[str]
    has_here_document: bool
    ends_with: str


def commands(script: str) -> Iterator[Command]:
    """In the order they are written; those without a word are left out."""
    words: list[str] = []
    here = _HereDocuments()
    has_here_document = in_test = False
    at = 0
    for _ in range(MAX_TOKENS):
        blank = _BLANK.match(script, at)
        at = blank.end() if blank else at
        if at >= len(script):
            break
        if script[at] == "#":
            at = _or_end(script, script.find("\n", at))
        elif redirect := _REDIRECT.match(script, at):
            target, at = _word(script, redirect.end())
            if redirect[0].lstrip("0123456789") in ("<<", "<<-"):
                has_here_document = True
                here.announce(unquoted(target), redirect[0].endswith("-"))
        elif (control := _CONTROL.match(script, at)) and not script.startswith("((", at):
            at = here.skip(script, control.end()) if control[0] == "\n" else control.end()
            if words and not in_test:
                yield Command(words, has_here_document, control[0])
                words, has_here_document = [], False
        else:
            word, at = _word(script, at)
            in_test = (in_test or (not words and word == "[[")) and word != "]]"
            if len(words) < _KEPT_WORDS:
                words.append(word)
    if words:
        yield Command(words, has_here_document, "")


def unquoted(word: str) -> str:
    """Its text without quotes and backslashes; what a shell would put in place of a variable stays as it is written."""
    if len(word) > 1 and word[0] == word[-1] == "'" and "'" not in word[1:-1]:
        return word[1:-1]
    if len(word) > 1 and word[0] == word[-1] == '"':
        return re.sub(r'\\([\\"$`])', r"\1", word[1:-1])
    return re.sub(r"\\\r?\n|[\"'\\]", "", word)


class _HereDocuments:
    """Those that the current line has announced; their text begins behind it."""

    def __init__(self) -> None:
        self._ends: list[re.Pattern[str]] = []

    def announce(self, delimiter: str, is_indented: bool) -> None:
        tabs = r"\t*+" if is_indented else ""
        self._ends.append(re.compile(rf"^{tabs}{re.escape(delimiter)}\r?$", re.MULTILINE))

    def skip(self, script: str, at: int) -> int:
        """The place behind their text, which begins here."""
        for end in self._ends:
            found = end.search(script, at)
            at = found.end() if found else len(script)
        self._ends.clear()
        return at


def _word(script: str, start: int) -> tuple[str, int]:
    """The word that begins here, behind blanks, and where it ends; empty where an operator stands."""
    blank = _BLANK.match(script, start)
    start = at = blank.end() if blank else start
    if script.startswith(("((", "<(", ">("), at):
        at = _nested_end(script, at + 2, ")")
    while at < len(script):
        at = _PLAIN.match(script, at).end()  # type: ignore[union-attr]
        mark = script[at : at + 1]
        if mark == "\\":
            at += 2
        elif mark in ("'", '"', "`"):
            at = _nested_end(script, at + 1, mark)
        elif mark == "$":
            at = _expansion_end(script, at + 1)
        elif mark == "(" and at > start and script[at - 1] in "=@?*+!":
            at = _nested_end(script, at + 1, ")")  # an array, or a pattern
        else:
            break
    end = min(at, len(script))
    return script[start:end], end


def _expansion_end(script: str, at: int) -> int:
    """Behind a dollar sign."""
    mark = script[at : at + 1]
    if mark in _OPENS:
        return _nested_end(script, at + 1, _OPENS[mark])
    if mark == "'":
        return _ANSI_STRING.match(script, at + 1).end()  # type: ignore[union-attr]
    return at


def _nested_end(script: str, at: int, closes: str) -> int:
    """Behind the mark that closes what has been opened before ``at``, and all that is opened until then."""
    open_marks = [closes]
    while open_marks:
        innermost = open_marks[-1]
        found = _SPECIAL[innermost].search(script, at)
        if found is None:
            return len(script)
        mark, at = found[0], found.end()
        if mark == innermost:
            open_marks.pop()
        elif mark == "\\":
            at += 1
        elif mark == "(":
            open_marks.append(")")
        elif mark != "$":
            open_marks.append(mark)
        elif script[at : at + 1] in _OPENS:
            open_marks.append(_OPENS[script[at]])
            at += 1
    return at


def _or_end(script: str, found: int) -> int:
    return found if found >= 0 else len(script)
