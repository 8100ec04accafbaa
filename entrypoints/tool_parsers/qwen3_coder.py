"""Calls as tags, with each argument as bare text: Qwen3-Coder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from .json_text import NUMBER, dumps, loads
from .pieces import ArgumentsForm, Text, ToolSpec
from .python_literals import literal_to_json
from .reader import Steps, StreamParser

_NAME = re.compile(r"[^<>\s]*")
_PARAMETER_NAME = re.compile(r"[^>\n]*")
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")


class Qwen3CoderParser(StreamParser):
    """
    I will write it.
    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    <parameter=lines>
    ["first", "second"]
    </parameter>
    </function>
    </tool_call>

    A value is what stands between the line breaks of its tags; the tool's schema tells "12" from 12 (see
    `value_to_json`). Arguments go out one by one, when each is complete. A value may hold any text but
    "</parameter>"; a forgotten one is understood where the next tag begins a line. "<function=" without the outer tag
    begins a call if a tool has that name.
    """

    keeps_special_tokens: ClassVar[bool] = False
    _OPENS: ClassVar[tuple[str, ...]] = ("\n<tool_call>", "<tool_call>", "\n<function=", "<function=")

    call_start: ClassVar[str] = "<tool_call>\n<function="
    name_end: ClassVar[str] = ">\n"
    call_end: ClassVar[str] = "</function>\n</tool_call>"
    next_call: ClassVar[str | None] = f"\n{call_start}"
    calls_end: ClassVar[str] = ""
    arguments_form: ClassVar[ArgumentsForm] = "tags"
    marks_calls: ClassVar[bool] = True

    def _parse(self) -> Steps[None]:
        while marker := (yield from self.words(*self._OPENS)):
            while marker:
                marker = yield from self._read_block(marker)

    def _read_block(self, opening: str) -> Steps[str]:
        """The calls after an opening tag. Returns the tag that comes next without words between, or ""."""
        reader = self.reader
        reader.keep(opening)
        wrapped = opening.endswith("<tool_call>")
        if wrapped:
            yield from reader.space()
            if not (yield from reader.one_of("<function=")):
                yield Text(reader.kept())
                return ""
        name = yield from reader.run(_NAME)
        if not (wrapped or name in self.tools) or not name or not (yield from reader.one_of(">")):
            yield Text(reader.kept())
            return ""
        yield self.begin_call(name)
        yield from self._read_arguments(name)
        marker = yield from self.gap("</tool_call>", *self._OPENS[1::2])
        return (yield from self.gap(*self._OPENS[1::2])) if marker == "</tool_call>" else marker

    def _read_arguments(self, function: str) -> Steps[None]:
        """Give out the arguments as parts of an object, and its end where the function's is."""
        reader = self.reader
        before = "{"
        tag = ""
        while True:
            if not tag:
                space = yield from reader.space()
                tag = yield from reader.one_of("<parameter=", "</parameter>", "</function>")
                if not tag and reader.at_end:
                    return
                if not tag:
                    # The closing tag is missing, or other words came in between; they are not the call's.
                    yield self.arguments("{}" if before == "{" else "}")
                    if space and not (yield from reader.sees("</tool_call>", *self._OPENS[1::2])):
                        yield Text(space)
                    return
            if tag.endswith("</function>"):
                yield self.arguments("{}" if before == "{" else "}")
                return
            if tag.endswith("<parameter="):
                tag = yield from self._read_argument(function, before)
                before = ", "
            if tag.endswith("</parameter>"):
                tag = ""
            elif not tag:
                return

    def _read_argument(self, function: str, before: str) -> Steps[str]:
        """Give out one argument. Returns the tag that ended it; "" at the end of the answer."""
        name = yield from self.reader.run(_PARAMETER_NAME)
        key = f"{before}{dumps(name)}"
        if self.reader.at_end:
            yield self.arguments(key[:-1])
            return ""
        yield from self.reader.one_of(">")
        yield from self.reader.one_of("\n")
        parts: list[str] = []
        ended = ""
        while not ended and not self.reader.at_end:
            text, ended = self.reader.split(_VALUE_ENDS)
            parts.append(text)
            if not ended and not self.reader.at_end:
                yield None
        text = "".join(parts)
        types = parameter_types(self.tools.get(function), name)
        if ended:
            yield self.arguments(f"{key}: {value_to_json(text, types)}")
        else:
            is_text = not types or "string" in types
            yield self.arguments(f"{key}: {dumps(text)[:-1] if is_text else text}")
        return ended


def parameter_types(tool: ToolSpec | None, name: str) -> frozenset[str]:
    """JSON types that the schema allows for this parameter; empty if it says nothing."""
    if tool is None:
        return frozenset()
    return frozenset(_types(tool.properties.get(name), tool.parameters))


def value_to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value. What is of none of the types, or of unknown type, is a string, to the letter."""
    bare = text.strip()
    lowered = bare.lower()
    if lowered in ("null", "none") and types and types != {"string"}:
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if types & {"integer", "number"} and NUMBER.fullmatch(bare):
        return bare
    kinds = {"object": "{", "array": "["}
    if any(kind in types and bare.startswith(first) for kind, first in kinds.items()):
        try:
            loads(bare)
            return bare
        except ValueError:
            literal = literal_to_json(bare)
            if literal is not None:
                return literal
    return dumps(text)


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema names, directly, by its alternatives, or by references into ``root``."""
    types: set[str] = set()
    seen: set[int] = set()  # of schemas: they may refer to each other in circles
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        given = schema.get("type")
        choices = schema.get("enum")
        if isinstance(given, str):
            types.add(given)
        elif isinstance(given, list):
            types.update(kind for kind in given if isinstance(kind, str))
        elif isinstance(choices, list):
            types.update(map(_type_of, choices))
        for name in ("anyOf", "oneOf", "allOf"):
            alternatives = schema.get(name)
            waiting.extend(alternatives if isinstance(alternatives, list) else ())
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            waiting.append(_follow(reference, root))
    return types


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string"
