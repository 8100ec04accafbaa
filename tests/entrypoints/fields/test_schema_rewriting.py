"""Rewritten JSON schemas: what llguidance then takes is valid by the schema as it was written, and the other way round
for values whose properties come in the schema's order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.entrypoints.fields import schema_rewriting
from baton.entrypoints.fields.schema_rewriting import UnenforceableError, rewrite_for_reader, rewrite_schema
from baton.runtime.constraints.json_checks import LEAST, UNIQUE
from tests.doubles.counted_lines import lines_run


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), eos_token=[256])

OBJECTS = [
    {name: value for name, value in zip("abc", values) if value is not None}
    for values in itertools.product([None, 1, "x"], repeat=3)
]
VALUES: list[Any] = [
    *OBJECTS, None, True, False, 0, 1, 5, -3, 2.5, "", "x", "y", "xyz", [], [1], ["x"], [1, 1], [1, 2, 3], {"d": 1},
    {"ab": 1}, {"kind": "x"}, {"kind": "x", "v": 1}, {"kind": "y"}, {"kind": "y", "w": 1}, {"kind": "z", "v": 1},
]  # fmt: skip

KIND = {"enum": ["x", "y", "z"]}
ABC = {"properties": {"a": True, "b": True, "c": True}}
SCHEMAS: list[Any] = [
    {**ABC, "dependentRequired": {"a": ["b"], "b": ["c"]}},
    {**ABC, "type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
    {**ABC, "dependencies": {"a": ["c"], "c": {"properties": {"a": {"const": 1}}}}},
    {"properties": {"kind": KIND, "v": True, "w": True}, "if": {"properties": {"kind": {"const": "x"}}},
     "then": {"required": ["v"]}, "else": {"required": ["w"]}},
    {"type": "object", "properties": {"kind": KIND, "v": True},
     "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}, "then": {"required": ["v"]}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": ["integer", "array"]}},
    {"if": {"required": ["a"]}, "else": {"required": ["b"]}, **ABC},
    {"then": {"type": "string"}},
    {"not": {"type": "string"}}, {"not": {"type": ["object", "array", "number"]}}, {"not": {"required": ["a"]}},
    {"not": {"not": {"type": "string"}}}, {"not": {"enum": [None, True]}}, {"not": {"const": False}},
    {"enum": ["x", "y", 1, None], "not": {"enum": ["x", 1.0]}},
    {"not": {"anyOf": [{"type": "string"}, {"minimum": 1}]}},
    {"not": {"const": 1}}, {"type": "integer", "not": {"enum": [1, 0, 5.0]}}, {"type": "number", "not": {"const": 2.5}},
    {"type": ["number", "null"], "not": {"enum": ["x", None, 1]}}, {"properties": {"a": {"not": {"const": 1}}}},
    {"type": "object", **ABC, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    {"type": "integer", "not": {"minimum": 2}}, {"not": {"maxItems": 1}}, {"not": {"minLength": 1}}, {"not": {}},
    {"not": {"allOf": [{"type": "array"}, {"minItems": 2}]}}, {"not": {"properties": {"a": {"type": "string"}}}},
    {"type": "string", "not": {"const": 3}},
    {"oneOf": [{"type": "string"}, {"type": "number"}, {"const": None}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "x"}, "v": True}, "required": ["kind"]},
               {"type": "object", "properties": {"kind": {"const": "y"}, "w": True}, "required": ["kind"]}]},
    {"oneOf": [{"type": "object", "properties": {"a": True}, "required": ["a"], "additionalProperties": False},
               {"type": "object", "properties": {"b": True}, "required": ["b"], "additionalProperties": False}]},
    {"oneOf": [{"type": "number", "minimum": 1}, {"type": "number", "maximum": 3}]},
    {"oneOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/n"}],
     "$defs": {"s": {"type": "string"}, "n": {"type": "null"}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object", "propertyNames": {"maxLength": 1}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}}, {"propertyNames": False}, {"propertyNames": True},
    {**ABC, "type": "object", "propertyNames": {"enum": ["a", "c"]}},
    {**ABC, "type": "object", "unevaluatedProperties": False}, {"prefixItems": [True], "unevaluatedItems": False},
    {"type": "array", "uniqueItems": False}, {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "contains": True}, {"type": "array", "contains": {"type": "string"}, "minContains": 0},
    {"contains": True, "minContains": 2, "maxContains": 2}, {"type": "array", "minContains": 2}, {"contains": False},
    {"type": "string", "format": "weird"}, {**ABC, "minProperties": 1, "additionalProperties": False},
    {**ABC, "required": ["a"], "minProperties": 1},
    {"allOf": [{"not": {"type": "string"}}, {"not": {"type": "null"}}]},
    {"items": {"not": {"type": "string"}}, "type": "array"}, True, {},
]  # fmt: skip


def takes(matcher: LLMatcher, value: Any) -> bool:
    text = json.dumps(value).encode()
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(list(text)) == len(text) and copy.is_accepting()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_rewritten_schema_has_the_same_meaning(schema: Any) -> None:
    before = json.dumps(schema)
    found = rewrite_schema(schema)
    assert json.dumps(schema) == before, "the schema itself stays as it is"
    source = LLMatcher.grammar_from_json_schema(json.dumps(found))
    matcher = LLMatcher(TOKENIZER, source, log_level=0)
    validator = jsonschema_rs.validator_for(schema)
    if not any(map(validator.is_valid, VALUES)):
        return
    assert not matcher.is_error(), (found, matcher.get_error()[:200])
    for value in VALUES:
        assert takes(matcher, value) == validator.is_valid(value), (value, found)


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems", "#/properties/a"),
        ({"items": {"contains": {"type": "string"}, "minContains": 65}}, "contains", "#/items"),
        ({"contains": {"type": "string"}, "items": [True]}, "contains", "#"),
        ({"contains": {"pattern": "a"}, "maxContains": 1}, "not", "#/contains"),
        ({"not": {"pattern": "^a"}}, "not", "#/not"),
        ({"not": {"type": "integer"}}, "not", "#/not"),
        ({"type": "string", "not": {"const": "x"}}, "not", "#/not"),
        ({"anyOf": [{"propertyNames": {"pattern": "a"}, "properties": {"a": True}}]}, "propertyNames", "#/anyOf/0"),
        ({"type": "object", "minProperties": 2}, "minProperties", "#"),
        ({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"$defs": {"x": {"if": {"pattern": "a"}, "then": False}}}, "not", "#/$defs/x/if"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "not", "#/oneOf"),
        ({"$dynamicRef": "#x"}, "$dynamicRef", "#"),
    ],
)
def test_what_has_no_other_form_is_refused_by_keyword_and_place(schema: Any, keyword: str, place: str) -> None:
    with pytest.raises(UnenforceableError) as refused:
        rewrite_schema(schema)
    assert str(refused.value).startswith(f"{keyword} at {place} cannot be enforced")


LISTS = [list(values) for size in range(5) for values in itertools.product([0, 1, "x"], repeat=size)]

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"contains": STRING}, ["x", 0]),
        ({"contains": STRING, "minContains": 2, "items": {"enum": ["x", 1]}}, ["x", "x", 1]),
        ({"contains": STRING, "minContains": 1, "maxContains": 2}, ["x", "x", 1, 0]),
        ({"contains": STRING, "minContains": 0, "maxContains": 1}, [1, 0]),
        ({"contains": STRING, "maxContains": 1, "prefixItems": [True, True]}, [0, 1, "x"]),
        ({"contains": STRING, "prefixItems": [{"type": "integer"}]}, [1, "x", 0]),
        ({"contains": STRING, "prefixItems": [True, True], "items": False}, ["x", 1]),
        ({"contains": STRING, "prefixItems": [True], "maxItems": 1}, ["x"]),
        ({"contains": STRING, "minContains": 2.0, "maxItems": 3.0}, ["x", "x", 0]),
        ({"type": ["array", "null"], "contains": STRING, "minContains": 3, "maxContains": 2}, None),
    ],
    ids=str,
)
def test_contains_narrows_a_schema(schema: Any, taken: Any) -> None:
    """The items that it asks for come first."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(rewrite_schema(schema)))
    matcher = LLMatcher(TOKENIZER, source, log_level=0)
    validator = jsonschema_rs.validator_for(schema)
    for value in LISTS:
        assert validator.is_valid(value) or not takes(matcher, value)
    assert takes(matcher, taken)


def test_keywords_that_compare_values_are_left_to_a_reader() -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"minProperties": 2.0}}}
    found, checked = rewrite_for_reader(schema)
    assert checked and found == {
        "properties": {"a": {"type": "array", UNIQUE: True}, "b": {"minProperties": 2, LEAST: 2}}
    }
    assert rewrite_for_reader({"uniqueItems": False, "minProperties": 1, "required": ["a"]}) == (
        {"required": ["a"]},
        False,
    )


@pytest.mark.parametrize("schema", [{"not": {"uniqueItems": True}}, {"if": {"minProperties": 1}, "else": False}])
def test_what_a_reader_checks_has_no_opposite(schema: Any) -> None:
    with pytest.raises(UnenforceableError, match=r"values that (uniqueItems|minProperties) excludes"):
        rewrite_for_reader(schema)


def test_reader_needs_references_that_it_can_follow() -> None:
    schema = {"$defs": {"x": {"$anchor": "here"}}, "items": {"$ref": "#here"}, "uniqueItems": True}
    with pytest.raises(UnenforceableError, match='uniqueItems at # cannot be enforced beside \\$ref to "#here"'):
        rewrite_for_reader(schema)


@pytest.mark.parametrize("schema", [5, {"not": 5}, {"allOf": {}}, {"properties": []}, {"items": "x"}, {"allOf": [3]}])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="schema"):
        rewrite_schema(schema)


def nested(levels: int, wrap: Callable[[Any], Any], innermost: Any) -> Any:
    for _ in range(levels):
        innermost = wrap(innermost)
    return innermost


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(4, lambda inner: {"contains": inner, "minContains": 60}, {"type": "null"}), "300000 characters once"),
        (nested(100, lambda inner: {"contains": inner, "minContains": 60}, True), "300000 characters once"),
        (nested(30, lambda inner: {"if": inner, "then": {"type": ["null", "string"]},
                                   "else": {"type": ["object", "array"]}}, {"type": "null"}), "steps to read"),
        ({"allOf": [{}] * 70_000}, "steps to read"),
        ({"oneOf": [{"required": [f"r{number}" for number in range(150)]}] * 150}, "steps to read"),
        ({"oneOf": [{"type": "object", "properties": {f"p{number}": True}, "required": [f"p{number}"],
                     "additionalProperties": False} for number in range(1000)]}, "steps to read"),
        ({"dependentRequired": {f"p{number}": ["a"] for number in range(15_000)}}, "steps to read"),
        ({"pattern": "." * 50_000}, "steps to read"),
        ({"const": [[]] * 70_000, "not": {"const": 1}}, "steps to read"),
        ({"oneOf": [{"$ref": "#/$defs/0"}] * 500, "$defs": {str(number): {"$ref": f"#/$defs/{number + 1}"}
                                                            for number in range(120)}}, "steps to read"),
    ],
    ids=range(10),
)  # fmt: skip
def test_short_schemas_do_not_take_long(schema: Any, words: str) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=words):
            rewrite_schema(schema)

    assert lines_run(refused, schema_rewriting) < 500_000


def test_alternatives_that_are_told_apart_by_a_value_are_not_compared_with_each_other() -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": f"k{number}"}, "v": {"type": "integer"}},
              "required": ["kind", "v"]} for number in range(1000)]  # fmt: skip
    texts: list[Any] = [{"enum": [f"t{number}", f"u{number}"]} for number in range(500)]
    every = [*kinds, *texts, {"type": "null"}]
    assert rewrite_schema({"oneOf": every}) == {"allOf": [{"anyOf": every}]}
    with pytest.raises(ValueError, match="not at #/oneOf"):
        rewrite_schema({"oneOf": [*texts[:20], {"enum": ["t3"]}]})


def test_nesting_is_bounded() -> None:
    schema: Any = True
    for _ in range(200):
        schema = {"not": schema}
    with pytest.raises(ValueError, match="120 deep"):
        rewrite_schema(schema)


def test_references_into_moved_schemas_are_refused() -> None:
    moved = {"allOf": [{"$ref": "#/allOf/1"}, {"type": "object"}], "dependentRequired": {"a": ["b"]}}
    with pytest.raises(UnenforceableError, match="#/allOf/1 cannot be kept beside dependentRequired"):
        rewrite_schema(moved)
    del moved["dependentRequired"]
    assert rewrite_schema(moved) == moved


def test_references_may_name_the_schema_itself() -> None:
    schema = {"$id": "http://x/y", "$defs": {"a": {"type": "string"}}, "items": {"$ref": "http://x/y#/$defs/a"}}
    assert rewrite_schema(schema) == schema


def test_values_that_look_like_schemas_stay() -> None:
    schema = {"enum": [{"not": 5}], "const": {"uniqueItems": True}, "default": {"if": 1}, "examples": [{"oneOf": 3}]}
    assert rewrite_schema(schema) == schema
