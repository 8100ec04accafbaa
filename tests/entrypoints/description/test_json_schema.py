from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from baton.entrypoints.description.json_schema import (
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    open_object,
    per_prompt,
    string,
    taken,
    whole,
)

REQUEST = taken(
    {"name": string(least=1, most=3), "count": whole("", 0, 9), "share": number("", above=0, high=1)},
    required=("name",),
    unsupported={"images": ([],), "session": ({},)},
    without_effect=("label",),
    instead={"images": "text"},
)


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        ({"name": "a"}, True),
        ({"name": "abcd"}, False),
        ({"name": ""}, False),
        ({"name": None}, False),
        ({}, False),
        ({"name": "a", "count": None, "share": None}, True),
        ({"name": "a", "count": 9, "share": 1}, True),
        ({"name": "a", "count": 10}, False),
        ({"name": "a", "count": -1}, False),
        ({"name": "a", "count": True}, False),
        ({"name": "a", "share": 0}, False),
        ({"name": "a", "images": []}, True),
        ({"name": "a", "images": None}, True),
        ({"name": "a", "images": ["x"]}, False),
        ({"name": "a", "session": {"id": None}}, True),
        ({"name": "a", "session": {"id": 1}}, False),
        ({"name": "a", "label": {"any": 1}}, True),
        ({"name": "a", "nmae": 1}, False),
    ],
)
def test_request_schema_validates_bodies(body: dict[str, Any], is_valid: bool) -> None:
    assert jsonschema_rs.is_valid(REQUEST, body) == is_valid


def test_unsupported_field_description_names_the_alternative() -> None:
    assert "use text" in REQUEST["properties"]["images"]["description"]


@pytest.mark.parametrize(
    "schema",
    [
        flag(),
        enum(1, "x"),
        either(string(), whole()),
        list_of(string()),
        taken({}, title="T"),
        per_prompt(flag()),
        open_object(),
    ],
)
def test_nullable_schema_accepts_null(schema: dict[str, Any]) -> None:
    assert not jsonschema_rs.is_valid(schema, None)
    assert jsonschema_rs.is_valid(nullable(schema), None)
    assert nullable(schema).get("description") == schema.get("description")


def test_per_prompt_schema_accepts_one_value_or_a_list() -> None:
    schema = per_prompt(whole("How many.", 0, 3))
    assert [jsonschema_rs.is_valid(schema, value) for value in (2, [1, None], 4, [4])] == [True, True, False, False]
    assert schema["description"].startswith("How many.")


def test_answer_schema_requires_all_fields_and_no_others() -> None:
    schema = answered({"a": string()}, optional={"b": string()})
    bodies: list[Any] = [{"a": ""}, {"a": "", "b": ""}, {"b": ""}, {"a": "", "c": ""}]
    assert [jsonschema_rs.is_valid(schema, body) for body in bodies] == [True, True, False, False]
