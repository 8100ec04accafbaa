"""Bare text -> JSON, by the schema."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.tool_parsers.pieces import ToolSpec
from baton.entrypoints.tool_parsers.qwen3_coder import parameter_types, value_to_json


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("12", {"string"}, '"12"'),
        ("12", set(), '"12"'),
        (" 12 ", set(), '" 12 "'),
        (" 12 ", {"integer"}, "12"),
        ("12345678901234567890.10", {"number"}, "12345678901234567890.10"),
        ("twelve", {"integer"}, '"twelve"'),
        ("012", {"integer"}, '"012"'),
        ("NaN", {"number"}, '"NaN"'),
        ("True", {"boolean"}, "true"),
        ("False", {"string"}, '"False"'),
        ("yes", {"boolean"}, '"yes"'),
        ("null", {"string"}, '"null"'),
        ("null", set(), '"null"'),
        ("None", {"integer"}, "null"),
        ("null", {"string", "null"}, "null"),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ('{"a": [1]}', {"string"}, '"{\\"a\\": [1]}"'),
        ("{'a': (True, None)}", {"object"}, '{"a": [true, null]}'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("[NaN]", {"array"}, '"[NaN]"'),
        ("[1]", {"object"}, '"[1]"'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
    ],
)
def test_parameter_values_are_converted_to_json(text: str, types: set[str], expected: str) -> None:
    assert value_to_json(text, frozenset(types)) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null", 5]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, "nonsense"]}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, {"object"}),
        ({"$ref": "#/$defs/Missing/type"}, set()),
        ({"$ref": "#/$defs/Circle"}, {"array"}),
        ({"enum": ["a", 1, 2.5, True, None]}, {"string", "number", "boolean", "null"}),
        ({"type": 5, "anyOf": 5, "enum": 5, "$ref": 5}, set()),
        ({}, set()),
        ("nonsense", set()),
    ],
)
def test_parameter_types_are_read_from_the_schema(schema: Any, expected: set[str]) -> None:
    definitions = {"Place": {"type": "object"}, "Circle": {"type": "array", "anyOf": [{"$ref": "#/$defs/Circle"}]}}
    tool = ToolSpec("f", {"properties": {"x": schema}, "$defs": definitions})
    assert parameter_types(tool, "x") == expected


def test_unknown_parameters_have_no_types() -> None:
    assert parameter_types(None, "x") == frozenset()
    assert parameter_types(ToolSpec("f"), "x") == frozenset()
    assert parameter_types(ToolSpec("f", {"properties": ["x"]}), "x") == frozenset()
