"""Texts as terms of llguidance's Lark, where a special token is no text but a token of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


class Terms:
    """Writes texts as terms, for one model."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """special: text -> id of the tokens that no other spelling stands for."""
        self._special = special
        self.marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        """Finds special tokens in a text."""

    def text(self, text: str) -> str:
        """A text as terms of a rule: strings, and special tokens by id."""
        terms: list[str] = []
        at = 0
        for mark in self.marks.finditer(text):
            terms += [quoted(text[at : mark.start()]), f"<[{self._special[mark[0]]}]>"]
            at = mark.end()
        return " ".join(term for term in (*terms, quoted(text[at:])) if term)


def quoted(text: str) -> str:
    """A text as a string, or nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def in_regex(text: str) -> str:
    """A text as part of an expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("<", r"\x3c")


def ascii_digits(pattern: str) -> str:
    r"""The expression with 0 to 9 for \d, as llguidance has it in a schema's ``pattern``. Rust's \d has 700 digits
    more, which programs seldom expect."""
    return re.sub(r"\\.", lambda escape: "[0-9]" if escape[0] == r"\d" else escape[0], pattern, flags=re.DOTALL)


def as_parts(source: str, name: str) -> dict[str, dict[str, Any]]:
    """A grammar in llguidance's own form as a part of another one, and the parts that it refers to: name -> part."""
    if not source.lstrip().startswith("{"):
        return {name: {"lark_grammar": source}}
    first, *others = json.loads(source)["grammars"]
    parts = {name: {key: value for key, value in first.items() if key != "name" and value is not None}}
    for other in others:
        parts[other["name"]] = {key: value for key, value in other.items() if key != "name"}
    return parts


def joined_parts(lark: str, parts: Mapping[str, dict[str, Any]], name: str = "answer") -> str:
    """The source of a grammar whose rules refer to ``parts`` by ``@name``."""
    return json.dumps(
        {"grammars": [{"name": name, "lark_grammar": lark}, *({"name": k, **v} for k, v in parts.items())]}
    )
