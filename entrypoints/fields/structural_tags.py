"""Reads SGLang's and vLLM's structural tags, in XGrammar's two forms:

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"format": {"type": "triggered_tags", ...}}

What the formats mean stands in runtime/constraints/structural_tags.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.constraints.lark import ascii_digits
from ...runtime.constraints.structural_tags import (
    MAX_SLOTS,
    Either,
    Form,
    Format,
    Free,
    Item,
    Regex,
    Repeated,
    Separated,
    Sequence,
    Tag,
    Text,
    Triggered,
    is_free,
)
from ...scheduler.outcome import RequestRefused
from .reading import shown

MAX_DEPTH = 30
"""Most levels of nested formats."""

Read = Callable[[Any, str], str]
"""Reads a JSON schema, or a grammar: (value, its name) -> a grammar in llguidance's own form."""


def read_structural_tag(value: Any, name: str, read_schema: Read, read_ebnf: Read) -> Format:
    """value: the object, or its JSON text. Raises RequestRefused."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"{name} is not valid JSON: {error}", param=name) from None
    reader = _Reader(name, read_schema, read_ebnf)
    if isinstance(value, dict) and "structures" in value:
        return reader.structures(value)
    if isinstance(value, dict) and "format" in value:
        return reader.format(value["format"], f"{name}.format", 0)
    raise RequestRefused(
        f"{name} is {shown(value)}; it takes an object with format, or structures and triggers", param=name
    )


class _Reader:
    def __init__(self, name: str, read_schema: Read, read_ebnf: Read) -> None:
        self._name, self._read_schema, self._read_ebnf = name, read_schema, read_ebnf
        self._tries: set[str] = set()

    def structures(self, value: Mapping[str, Any]) -> Format:
        tags = []
        for number, each in enumerate(self._list(value, "structures", self._name)):
            where = f"{self._name}.structures.{number}"
            schema = each.get("schema") if isinstance(each, dict) else None
            content = Form(self._read_schema(True if schema is None else schema, f"{where}.schema"))
            tags.append(Tag(self._string(each, "begin", where), content, (self._string(each, "end", where),)))
        return self._triggered(self._strings(value, "triggers", self._name), tags, self._name)

    def format(self, value: Any, where: str, depth: int) -> Format:
        if depth > MAX_DEPTH:
            raise RequestRefused(f"{where} is nested more than {MAX_DEPTH} deep", param=self._name)
        if not isinstance(value, dict):
            raise RequestRefused(f"{where} is {shown(value)}; it takes an object", param=self._name)
        kind = value.get("type")
        if kind is None and "begin" in value:
            kind = "tag"
        match kind:
            case "const_string":
                return Text(self._string(value, "value", where))
            case "json_schema":
                return Form(self._read_schema(value.get("json_schema", True), f"{where}.json_schema"))
            case "grammar":
                return Form(self._read_ebnf(value.get("grammar"), f"{where}.grammar"))
            case "regex":
                return Regex(ascii_digits(self._string(value, "pattern", where)))
            case "item_trie":
                return self._item(value, where)
            case "any_text":
                self._refuse_set(value, "excludes", where)
                return Free()
            case "sequence" | "or":
                parts = self._formats(value, "elements", where, depth)
                if kind == "or":
                    return Either(parts)
                for number, part in enumerate(parts[:-1]):
                    self._refuse_free(part, f"{where}.elements.{number}")
                return Sequence(parts)
            case "optional" | "star" | "plus" | "repeat":
                return self._repeated(kind, value, where, depth)
            case "tag":
                return self._tag(value, where, depth)
            case "triggered_tags":
                self._refuse_set(value, "excludes", where)
                tags = self._tags(value, where, depth)
                begins, single = self._bool(value, "at_least_one", where), self._bool(value, "stop_after_first", where)
                return self._triggered(self._strings(value, "triggers", where), tags, where, begins, single)
            case "tags_with_separator":
                tags = self._tags(value, where, depth)
                for number, tag in enumerate(tags):
                    self._refuse_free(tag, f"{where}.tags.{number}")
                return Separated(
                    tuple(tags),
                    self._string(value, "separator", where),
                    not self._bool(value, "at_least_one", where),
                    self._bool(value, "stop_after_first", where),
                )
        raise RequestRefused(
            f"{where}.type is {shown(kind)}; it is const_string, json_schema, grammar, regex, item_trie, any_text, "
            "sequence, or, optional, star, plus, repeat, tag, triggered_tags or tags_with_separator",
            param=self._name,
        )

    # -- formats ------------------------------------------------------------------------------------------------------

    def _triggered(
        self, triggers: list[str], tags: list[Tag], where: str, begins: bool = False, single: bool = False
    ) -> Format:
        for number, tag in enumerate(tags):
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                raise RequestRefused(
                    f"{where}: the tag {shown(tag.begin)} begins with none of the triggers {shown(triggers)}",
                    param=self._name,
                )
            self._refuse_free(tag, f"{where}.tags.{number}")
        for trigger in triggers:
            if not trigger or not any(tag.begin.startswith(trigger) for tag in tags):
                raise RequestRefused(f"{where}: no tag begins with the trigger {shown(trigger)}", param=self._name)
        return Triggered(tuple(triggers), tuple(tags), begins, single)

    def _item(self, value: Mapping[str, Any], where: str) -> Format:
        name = self._string(value, "item_trie", where)
        self._tries.add(name)
        if len(self._tries) > MAX_SLOTS:
            raise RequestRefused(
                f"{self._name} names more than {MAX_SLOTS} item tries; use at most {MAX_SLOTS}", param=self._name
            )
        return Item(name)

    def _tags(self, value: Mapping[str, Any], where: str, depth: int) -> list[Tag]:
        given = self._list(value, "tags", where)
        return [self._tag(each, f"{where}.tags.{number}", depth) for number, each in enumerate(given)]

    def _tag(self, value: Any, where: str, depth: int) -> Tag:
        if not isinstance(value, dict):
            raise RequestRefused(f"{where} is {shown(value)}; it takes an object", param=self._name)
        end = value.get("end")
        ends = (
            tuple(self._strings(value, "end", where)) if isinstance(end, list) else (self._string(value, "end", where),)
        )
        if "" in ends and len(ends) > 1:
            raise RequestRefused(f'{where}.end has "" among others; give it alone, or leave it out', param=self._name)
        content = self.format(value.get("content"), f"{where}.content", depth + 1)
        return Tag(self._string(value, "begin", where), content, ends)

    def _formats(self, value: Mapping[str, Any], key: str, where: str, depth: int) -> tuple[Format, ...]:
        given = self._list(value, key, where)
        return tuple(self.format(each, f"{where}.{key}.{number}", depth + 1) for number, each in enumerate(given))

    def _repeated(self, kind: str, value: Mapping[str, Any], where: str, depth: int) -> Format:
        part = self.format(value.get("content"), f"{where}.content", depth + 1)
        self._refuse_free(part, f"{where}.content")
        if kind != "repeat":
            return Repeated(part, int(kind == "plus"), 1 if kind == "optional" else None)
        least, most = value.get("min", 0), value.get("max")
        most = None if most == -1 else most
        for key, number in (("min", least), ("max", most)):
            is_count = type(number) is int and 0 <= number <= 10_000
            if not is_count and not (number is None and key == "max"):
                raise RequestRefused(f"{where}.{key} is {shown(number)}; it takes 0 to 10000", param=self._name)
        if most is not None and most < least:
            raise RequestRefused(f"{where}.max is {most}, less than min, {least}", param=self._name)
        return Repeated(part, least, most)

    # -- values -------------------------------------------------------------------------------------------------------

    def _refuse_free(self, format: Format, where: str) -> None:
        if is_free(format):
            raise RequestRefused(
                f"{where} is text without an end, and something may follow it; put it into a tag with an end",
                param=self._name,
            )

    def _refuse_set(self, value: Mapping[str, Any], key: str, where: str) -> None:
        if value.get(key):
            raise RequestRefused(f"{where}.{key} is not supported", code="unsupported_field", param=self._name)

    def _list(self, value: Any, key: str, where: str) -> list[Any]:
        found = value.get(key) if isinstance(value, dict) else None
        if not isinstance(found, list) or not found:
            raise RequestRefused(
                f"{where}.{key} is {shown(found)}; it takes a list with one entry at least", param=self._name
            )
        return found

    def _strings(self, value: Any, key: str, where: str) -> list[str]:
        found = self._list(value, key, where)
        for each in found:
            if not isinstance(each, str):
                raise RequestRefused(f"{where}.{key} has {shown(each)}; it takes strings", param=self._name)
        return found

    def _string(self, value: Any, key: str, where: str) -> str:
        found = value.get(key) if isinstance(value, dict) else None
        if not isinstance(found, str):
            raise RequestRefused(f"{where}.{key} is {shown(found)}; it takes a string", param=self._name)
        return found

    def _bool(self, value: Mapping[str, Any], key: str, where: str) -> bool:
        found = value.get(key, False)
        if not isinstance(found, bool):
            raise RequestRefused(f"{where}.{key} is {shown(found)}; it takes true or false", param=self._name)
        return found
