"""Numbers that a double does not hold are enforced as they are, or refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from baton.entrypoints.fields.grammars import take_grammar
from baton.scheduler.outcome import RequestRefused
from tests.doubles.byte_matcher import takes

BIG = 1733333333333333333


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": [BIG, BIG + 1]}, f"enum at # cannot be enforced: {BIG + 1} has too many digits"),
        ({"properties": {"id": {"const": 1234567890123456789}}}, "const at #/properties/id cannot be enforced"),
        ({"const": {"ids": ["x", BIG]}}, f"const at # cannot be enforced: {BIG} has"),
        ({"const": 1.2345678901234567e18}, "const at #"),
        ({"const": 2**63}, "const at #"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum at # cannot be enforced: 9007199254740993 has too many"),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum at #"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum at #"),
        ({"type": "number", "maximum": 2**60}, "maximum at #"),
        ({"maximum": 10**400}, "maximum at #"),
        ({"type": "integer", "minimum": 10**400}, "minimum at #"),
        (
            {"type": "integer", "minimum": 10**18},
            "minimum at # cannot be enforced: 1000000000000000000 has more than 18",
        ),
        ({"type": "integer", "maximum": -(10**18)}, "maximum at #"),
        ({"not": {"const": 2**53}}, "not at #/not cannot be enforced: numbers beyond 2**53"),
        ({"not": {"enum": [1, 2**62]}}, "not at #/not"),
        ({"not": {"minimum": 2**53}}, "not at #/not"),
        ({"multipleOf": 2**32}, "multipleOf at # cannot be enforced: 4294967296 has too many digits"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf cannot be enforced"),
        ({"$defs": {"a": {"multipleOf": 100000}}, "allOf": [{"$ref": "#/$defs/a"}] * 2}, "multipleOf cannot be"),
    ],
    ids=str,
)
def test_numbers_that_are_not_held_exactly_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        take_grammar({"json_schema": schema}, "")
    assert words in refused.value.message and len(refused.value.message) < 400


EDGES = (2**53, 2**53 + 2, 2**53 + 4, 10**17, 2**62, 2**63 - 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**62}, {"enum": [2**53, 17]}, {"const": -(2**62)}, {"type": "integer", "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 2**53 + 2}, {"type": "integer", "maximum": 2**53 + 2},
        {"type": "integer", "exclusiveMaximum": 2**53 + 1}, {"type": "integer", "exclusiveMinimum": 2**53 + 1},
        {"type": "integer", "exclusiveMaximum": 2**63}, {"type": "integer", "minimum": 2**62, "maximum": 2**62},
        {"type": "integer", "minimum": -(2**53) - 2}, {"type": "number", "maximum": 10**18},
        {"type": "number", "minimum": 2**53 + 2}, {"type": ["integer", "null"], "minimum": 10, "maximum": 2**53 + 2},
        {"type": "integer", "minimum": 9007199254740993.0},
        {"type": "integer", "exclusiveMaximum": 2**53 + 3, "maximum": 2**53 + 4},
        {"type": "string", "minimum": 2**70 + 1},
        {"allOf": [{"multipleOf": 1000}, {"multipleOf": 0.5}]}, {"multipleOf": 100_000},
    ],
    ids=str,
)  # fmt: skip
def test_large_numbers_are_held_exactly(schema: dict[str, Any]) -> None:
    grammar = take_grammar({"json_schema": schema}, "")
    validator = jsonschema_rs.validator_for(schema)
    values = {0, *(sign * (edge + step) for edge in EDGES for step in range(-4, 5) for sign in (1, -1))}
    for value in sorted(values):
        if abs(value) < 2**63:
            assert takes(grammar, str(value)) == validator.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"minimum": 0, "maximum": 2**64 - 1}, (0, 2**63 - 1), (-1, 2**64)),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, (2**63 - 1, -(2**63) + 1024), (2**63, -(2**63) - 1)),
        ({"maximum": 1e300}, (2**63 - 1,), (10**301,)),
    ],
)
def test_limits_of_64_bits_are_kept(schema: dict[str, Any], taken: tuple[int, ...], refused: tuple[int, ...]) -> None:
    grammar = take_grammar({"json_schema": json.dumps({"type": "integer", **schema})}, "")
    assert all(takes(grammar, str(value)) for value in taken)
    assert not any(takes(grammar, str(value)) for value in refused)


def test_draft_4_has_exclusive_limits_of_its_own() -> None:
    grammar = take_grammar({"json_schema": {"type": "integer", "minimum": 3, "exclusiveMinimum": True,
                                            "maximum": 5, "exclusiveMaximum": False}}, "")  # fmt: skip
    assert [value for value in range(9) if takes(grammar, str(value))] == [4, 5]


@pytest.mark.parametrize("text", ["a\x01", "\x7f", "\x00"])
def test_values_with_characters_that_cannot_be_written_are_refused(text: str) -> None:
    with pytest.raises(RequestRefused, match=r"const at #/items cannot be enforced: .* control character"):
        take_grammar({"json_schema": {"items": {"const": {"a": [text]}}}}, "")
    grammar = take_grammar({"json_schema": {"const": "\t\n\r\b\f \\u0001 1234567890123456"}}, "")
    assert takes(grammar, json.dumps("\t\n\r\b\f \\u0001 1234567890123456"))
