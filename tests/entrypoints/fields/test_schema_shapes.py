"""Keywords with values that they do not take are refused by name, and nothing else happens to them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baton.entrypoints.chat.answer_grammar import arguments_source
from baton.entrypoints.fields.grammars import take_grammar
from baton.entrypoints.fields.schema_rewriting import rewrite_schema
from baton.scheduler.outcome import RequestRefused

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"format": {}}, "format at # is {}; it takes a string"),
        ({"format": []}, "format at # is []"),
        ({"dependentRequired": []}, "dependentRequired at # is []; it takes an object of lists of names"),
        ({"dependentRequired": {"a": [1]}}, "dependentRequired at #"),
        ({"dependencies": []}, "dependencies at # is []"),
        ({"dependencies": {"a": ["b", {}]}}, "dependencies at #"),
        ({"not": {"type": 0}}, "type at #/not is 0; it takes null, boolean"),
        ({"oneOf": [{"required": 0}, STRING]}, "required at #/oneOf/0 is 0; it takes a list of names"),
        ({"oneOf": [{"minItems": {}}, STRING]}, "minItems at #/oneOf/0 is {}; it takes a whole number from 0"),
        ({"oneOf": [{"enum": 0}, STRING]}, "enum at #/oneOf/0 is 0; it takes a list"),
        ({"propertyNames": {"enum": 5}}, "enum at #/propertyNames is 5"),
        ({"items": {"maxLength": -1}}, "maxLength at #/items is -1"),
        ({"properties": {"a": {"minimum": "1"}}}, 'minimum at #/properties/a is "1"; it takes a number'),
        ({"minimum": True}, "minimum at # is true"),
        ({"multipleOf": 0}, "multipleOf at # is 0; it takes a number above 0"),
        ({"oneOf": [{"$ref": "#/$defs/a"}, STRING], "$defs": {"a": {"required": {}}}}, "required at #/$defs/a is {}"),
        ({"$ref": "#/other", "other": {"required": 0}}, '$ref to "#/other" cannot be followed'),
        ({"$ref": "#/oth%65r", "other": {"required": 0}}, '$ref to "#/oth%65r" cannot be followed'),
        ({"$ref": "x#/default", "$id": "x", "default": {}}, "cannot be followed"),
        ({"uniqueItems": 1}, "uniqueItems at # is 1; it takes true or false"),
    ],
    ids=str,
)
def test_values_of_another_shape_are_refused_by_keyword_and_place(schema: Any, words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        take_grammar({"json_schema": schema}, "")
    assert words in refused.value.message and refused.value.code == "invalid_grammar"


KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "items", "not",
    "if", "prefixItems", "minItems", "maxItems", "minLength", "pattern", "minimum", "exclusiveMaximum", "multipleOf",
    "anyOf", "allOf", "oneOf", "$ref", "$defs", "maxProperties", "minProperties", "format", "dependentRequired",
    "dependencies",
    "dependentSchemas", "then", "else", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains",
    "minContains", "maxContains", "uniqueItems", "$dynamicRef", "default", "x-guidance", "x-baton-min-names",
    "x-baton-unique-items", "contentSchema", "unknown",
)  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 2.0, 2.5, 1e300, 2**53, 2**63, 10**400, "", "a", "^a", "#", "#/$defs/a", "#/unknown",
    "string", "object", "date", [], {}, [1], ["a"], [["a"]], [{}], [True], {"a": 1}, {"a": ["b"]}, {"a": {}},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_any_value_of_any_keyword_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.randrange(8)
        if depth > 2 or kind > 3:
            return rng.choice(VALUES)
        if kind == 0:
            return [schema(depth + 1) for _ in range(rng.randrange(3))]
        return schema(depth + 1) if kind < 3 else {name: schema(depth + 1) for name in rng.sample("ab", 2)}

    def schema(depth: int) -> dict[str, Any]:
        return {rng.choice(KEYWORDS): value(depth) for _ in range(rng.randrange(1, 4))}

    ends = [0, 0]
    for _ in range(1500):
        drawn = schema(0)
        for read in (lambda drawn=drawn: take_grammar({"json_schema": drawn}, ""),
                     lambda drawn=drawn: arguments_source(json.dumps(drawn), True)):  # fmt: skip
            try:
                read()
                ends[0] += 1
            except RequestRefused as refusal:
                ends[1] += 1
                assert refusal.code == "invalid_grammar", (seed, drawn)
    assert min(ends) > 300


@pytest.mark.parametrize("keyword", ["x-baton-unique-items", "x-baton-min-names", "x-guidance", "contentSchema"])
def test_a_clients_schema_has_no_keywords_of_the_servers_own(keyword: str) -> None:
    schema = {"type": "array", "minItems": 3, "items": {"type": "string", "maxLength": 2, keyword: "abc"}}
    left = {"type": "array", "minItems": 3, "items": {"type": "string", "maxLength": 2}}
    assert rewrite_schema({**schema, keyword: {"items": 5}}) == left
    assert rewrite_schema({"properties": {keyword: True}}) == {"properties": {keyword: True}}
