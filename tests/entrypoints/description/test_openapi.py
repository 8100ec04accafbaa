from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.description.json_schema import Schema, list_of, string, taken
from baton.entrypoints.description.openapi import Described, Operation, openapi_document

ITEM = taken({"name": string()}, title="Item")


def document(*routes: Described) -> dict[str, Any]:
    return openapi_document(routes, title="T", version="1", about="")


def route(operation: Operation, *, path: str = "/a", methods: tuple[str, ...] = ("POST",), open: bool = False):
    return Described(path, methods, operation, "application/json", needs_key=not open)


def test_what_has_a_title_is_described_once() -> None:
    found = document(route(Operation(summary="S", body=ITEM, answer=list_of(ITEM))))
    operation = found["paths"]["/a"]["post"]
    reference = {"$ref": "#/components/schemas/Item"}
    assert operation["requestBody"]["content"]["application/json"]["schema"] == reference
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["items"] == reference
    assert found["components"]["schemas"]["Item"]["properties"]["name"] == {"type": ["string", "null"]}


def test_one_title_is_not_given_twice() -> None:
    other: Schema = {"title": "Item", "type": "string"}
    with pytest.raises(ValueError, match="two schemas have the title 'Item'"):
        document(route(Operation(summary="S", body=ITEM, answer=other)))


def test_a_field_may_be_called_title() -> None:
    found = document(route(Operation(summary="S", body=taken({"title": string()}))))
    schema = found["paths"]["/a"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["title"] == {"type": ["string", "null"]}


def test_refusals_follow_from_what_the_endpoint_takes() -> None:
    def statuses(method: str, described: Described) -> set[str]:
        return set(document(described)["paths"]["/a"][method]["responses"]) - {"200"}

    reads = route(Operation(summary="S", body=ITEM, refusals=(404,)))
    probe = route(Operation(summary="S"), methods=("GET",), open=True)
    assert statuses("post", reads) - statuses("get", probe) == {"401", "404", "413", "415"}
    assert statuses("get", probe) < statuses("post", reads)


def test_parameters_of_path_and_query() -> None:
    operation = Operation(summary="S", query={"limit": string("How many.")}, required_query=("limit",))
    found = document(route(operation, path="/a/{name:path}", methods=("GET",)))
    in_path, in_query = found["paths"]["/a/{name}"]["get"]["parameters"]
    assert in_path == {"in": "path", "name": "name", "required": True, "schema": {"type": "string"}}
    assert in_query == {
        "in": "query", "name": "limit", "required": True, "schema": {"type": "string"}, "description": "How many.",
    }  # fmt: skip


def test_examples_say_what_they_show() -> None:
    found = document(route(Operation(summary="S", body=ITEM, examples={"a name": {"name": "x"}})))
    content = found["paths"]["/a"]["post"]["requestBody"]["content"]["application/json"]
    assert content["examples"] == {"a name": {"summary": "a name", "value": {"name": "x"}}}


def test_a_body_is_of_post_alone() -> None:
    found = document(route(Operation(summary="S", body=ITEM, body_is_optional=True), methods=("GET", "POST")))
    assert "requestBody" not in found["paths"]["/a"]["get"]
    assert not found["paths"]["/a"]["post"]["requestBody"]["required"]
