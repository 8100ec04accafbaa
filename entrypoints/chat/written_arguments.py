"""Grammars of arguments that models do not write as one JSON object: Python's keywords, and tags around each value.

Both take the arguments in the order of the schema; those that are not required may be left out:

    s0 ─▶ path ─▶ c1        s: nothing is written yet        c: something is, so a separator comes first
    s0 ─▶ s1                if path is not required
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher

from ...scheduler.outcome import RequestRefused
from ..fields.grammars import JSON_OPTIONS
from ..fields.reading import shown
from ..fields.schema_rewriting import rewrite_schema
from ..fields.schema_shapes import shape_missed
from ..tool_parsers.pieces import ToolSpec
from ..tool_parsers.qwen3_coder import parameter_types

_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_TEXT_ONLY = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})
_LENGTHS = frozenset({"minLength", "maxLength"})


class WrittenArguments:
    """The rules for the arguments of one tool, in Lark, and the grammars that they name."""

    def __init__(self, spec: ToolSpec, number: int) -> None:
        """number: of the tool; begins the names of its rules. Raises RequestRefused for a schema that cannot be
        enforced in this form, unless the tool is not strict: then such values are free."""
        self._spec = spec
        self._prefix = f"a{number}"
        self.rules: list[str] = []
        self.parts: dict[str, str] = {}
        self.start = f"{self._prefix}_s0"

    def as_python(self) -> WrittenArguments:
        """path="a.txt", lines=[1, 2]"""
        self._in_order('", "', self._python_value)
        return self

    def as_tags(self) -> WrittenArguments:
        """<parameter=path>, a line break, the value, a line break, </parameter>, a line break"""
        self._in_order("", self._tagged_value)
        return self

    def _in_order(self, separator: str, value: Callable[[int, str, Any], str]) -> None:
        properties, required = self._spec.properties, self._spec.parameters.get("required", [])
        if shape_missed("required", required) is not None:
            if self._spec.strict:
                raise self._refuse("required", f"it is {shown(required)}, and takes a list of names")
            required = []
        more = f"{separator} " if separator else ""
        for number, (name, schema) in enumerate(properties.items()):
            written, after = value(number, name, schema), f"{self._prefix}_c{number + 1}"
            skips = name not in required
            for state, before in (("s", ""), ("c", more)):
                left_out = f" | {self._prefix}_{state}{number + 1}" if skips else ""
                self.rules.append(f"{self._prefix}_{state}{number}: {before}{written} {after}{left_out}")
        for state in "sc":
            self.rules.append(f'{self._prefix}_{state}{len(properties)}: ""')

    # -- Python -------------------------------------------------------------------------------------------------------

    def _python_value(self, number: int, name: str, schema: Any) -> str:
        if not _IDENTIFIER.fullmatch(name):
            raise self._refuse(name, "its name cannot be a keyword of a Python call")
        types = parameter_types(self._spec, name)
        literals = [word for kind, words in _PYTHON_WORDS.items() if kind in types for word in words]
        if literals and types <= _PYTHON_WORDS.keys():
            value = " | ".join(map(json.dumps, literals))
        elif (literals and self._spec.strict) or not types or _has_words(schema):
            if self._spec.strict:
                raise self._refuse(name, "true, false and null inside of it are written otherwise in Python")
            value = r"/[^,)\n]+/"
        else:
            value = self._json(number, schema)
        return f"{json.dumps(name + '=')} ({value})"

    # -- tags ---------------------------------------------------------------------------------------------------------

    def _tagged_value(self, number: int, name: str, schema: Any) -> str:
        types = parameter_types(self._spec, name)
        opening, closing = json.dumps(f"<parameter={name}>\n"), json.dumps("\n</parameter>\n")
        if types and "string" not in types:
            return f"{opening} {self._json(number, schema)} {closing}"
        if isinstance(schema, Mapping) and types == {"string"}:
            choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if choices is not None:
                return f"{opening} ({' | '.join(json.dumps(each, ensure_ascii=False) for each in choices)}) {closing}"
        keywords = set(schema) if isinstance(schema, Mapping) else set()
        if self._spec.strict and (types != {"string"} or keywords - _TEXT_ONLY - _LENGTHS):
            raise self._refuse(name, "text between tags is held to enum, const, minLength and maxLength only")
        least, most = (schema.get(key) if keywords else None for key in ("minLength", "maxLength"))
        rule = f"{self._prefix.upper()}_T{number}"
        length = f"{{{least or 0},{'' if most is None else most}}}" if least or most is not None else "*"
        # One lexeme with the closing tag: lexers are greedy, and do not go back.
        end = r"\n<\/parameter>\n"
        inside = r"(?s:.*)(<\/parameter>|\n<parameter=|\n<\/function>)(?s:.*)"
        self.rules.append(f"{rule}: /(?s:.){length}{end}/ & ~/{inside}{end}/")
        return f"{opening} {rule}"

    # -- both ---------------------------------------------------------------------------------------------------------

    def _json(self, number: int, schema: Any) -> str:
        """A value as JSON; its schema may refer to definitions of the tool's."""
        whole = schema if isinstance(schema, Mapping) else {}
        shared = {key: self._spec.parameters[key] for key in ("$defs", "definitions") if key in self._spec.parameters}
        options = JSON_OPTIONS | ({} if self._spec.strict else {"lenient": True, "coerce_one_of": True})
        name = f"{self._prefix}_v{number}"
        found: Any = {**shared, **whole}
        try:
            found = rewrite_schema(found)
        except (ValueError, RecursionError) as error:
            if self._spec.strict:
                raise RequestRefused(f"tools: {error}", code="invalid_grammar", param="tools") from None
        try:
            self.parts[name] = LLMatcher.grammar_from_json_schema(json.dumps(found), overrides=options)
        except ValueError as error:  # numbers beyond doubles, or nested too deeply for its reader
            if self._spec.strict:
                raise RequestRefused(f"tools: {error}", code="invalid_grammar", param="tools") from None
            self.parts[name] = LLMatcher.grammar_from_json_schema("{}", overrides=JSON_OPTIONS)
        return f"@{name}"

    def _refuse(self, name: str, why: str) -> RequestRefused:
        return RequestRefused(
            f"tools: strict cannot be kept for {name!r} of {self._spec.name!r} in the form in which this model writes "
            f"calls: {why}; leave out strict",
            code="invalid_grammar",
            param="tools",
        )


_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def _has_words(schema: Any) -> bool:
    """Could a value hold true, false or null? As far as the schema's text says."""
    text = json.dumps(schema)
    return any(word in text for word in ('"boolean"', '"null"', "true", "false", "null")) or (
        '"object"' in text and '"properties"' not in text
    )
