"""Python literals -> JSON. Oracle: Python itself."""

from __future__ import annotations

import ast
import json

import pytest

from baton.entrypoints.tool_parsers.python_literals import MAX_DEPTH, literal_to_json


@pytest.mark.parametrize(
    "source",
    [
        "1", "-1", "+1", "1_000", "0x1F", "0b11", "1.", ".5", "-.5", "1e5", "1E-5", "1.5e+3", "123456789012345678901",
        "'a'", '"a"', "'''a\n'b'''", '"""a"b"""', "''", "''''''", r"'\''", r"'\\'", r"'\n\t\r\x41\u00e9\U0001f600\0'",
        "'a\\\nb'", '"{[(,"', "True", "False", "None", "[]", "[1, 'a', [2.5, None]]", "[1,]", "()", "(1,)", "(1, 2)",
        "(1)", "((1), 'b')", "{}", "{'a': 1, 'b': {'c': [True]}}", "{'a': 1,}", " [ 1 , 2 ] ", "'é😀'",
    ],
)  # fmt: skip
def test_literals_match_python(source: str) -> None:
    text = literal_to_json(source)
    expected = ast.literal_eval(source.strip())
    assert text is not None
    assert json.loads(text) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("true", "true"),
        ("[false, null]", "[false, null]"),
        ("{1: 2, None: 3, 'a': 4}", '{"1": 2, "null": 3, "a": 4}'),
        (r"'\d\N{DIGIT ONE}'", r'"\\d\\N{DIGIT ONE}"'),
        (r"'\ud800'", r'"\ud800"'),
        (r"'\U00110000'", r'"\\U00110000"'),
        ("1.50", "1.50"),
        ("1e999", "1e999"),
    ],
)
def test_json_literals_and_keys_are_converted(source: str, expected: str) -> None:
    assert literal_to_json(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "", " ", "a", "f(1)", "1 2", "[1 2]", "[1", "1]", "{'a'}", "{'a': }", "{'a': 1 'b': 2}", "{[1]: 2}", "[,]",
        "'a", '"a\'', "'''a'", "1_0e999", "nan", "1 + 2", "0x", "5a", ".", "{1, 2}", "'a' 'b'", "f'a'", "]",
    ],
)  # fmt: skip
def test_invalid_literals_are_rejected(source: str) -> None:
    assert literal_to_json(source) is None


def test_literal_nesting_depth_is_limited() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert literal_to_json(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert literal_to_json(nested(MAX_DEPTH + 1)) is None
    assert literal_to_json("{'a': " * 100_000) is None
