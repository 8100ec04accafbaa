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


def test_titled_schema_becomes_one_component() -> None:
    found = document(route(Operation(summary="S", body=ITEM, answer=list_of(ITEM))))
    operation = found["paths"]["/a"]["post"]
    reference = {"$ref": "#/components/schemas/Item"}
    assert operation["requestBody"]["content"]["application/json"]["schema"] == reference
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["items"] == reference
    assert found["components"]["schemas"]["Item"]["properties"]["name"] == {"type": ["string", "null"]}


def test_duplicate_schema_titles_are_an_error() -> None:
    other: Schema = {"title": "Item", "type": "string"}
    with pytest.raises(ValueError, match="two schemas have the title 'Item'"):
        document(route(Operation(summary="S", body=ITEM, answer=other)))


def test_field_named_title_is_allowed() -> None:
    found = document(route(Operation(summary="S", body=taken({"title": string()}))))
    schema = found["paths"]["/a"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["title"] == {"type": ["string", "null"]}


def test_documented_refusals_follow_from_the_route() -> None:
    def statuses(method: str, described: Described) -> set[str]:
        return set(document(described)["paths"]["/a"][method]["responses"]) - {"200"}

    reads = route(Operation(summary="S", body=ITEM, refusals=(404,)))
    probe = route(Operation(summary="S"), methods=("GET",), open=True)
    assert statuses("post", reads) - statuses("get", probe) == {"401", "404", "413", "415"}
    assert statuses("get", probe) < statuses("post", reads)


def test_path_and_query_parameters_are_documented() -> None:
    operation = Operation(summary="S", query={"limit": string("How many.")}, required_query=("limit",))
    found = document(route(operation, path="/a/{name:path}", methods=("GET",)))
    in_path, in_query = found["paths"]["/a/{name}"]["get"]["parameters"]
    assert in_path == {"in": "path", "name": "name", "required": True, "schema": {"type": "string"}}
    assert in_query == {
        "in": "query", "name": "limit", "required": True, "schema": {"type": "string"}, "description": "How many.",
    }  # fmt: skip


def test_examples_are_documented_with_summaries() -> None:
    found = document(route(Operation(summary="S", body=ITEM, examples={"a name": {"name": "x"}})))
    content = found["paths"]["/a"]["post"]["requestBody"]["content"]["application/json"]
    assert content["examples"] == {"a name": {"summary": "a name", "value": {"name": "x"}}}


def test_request_body_is_documented_for_post_only() -> None:
    found = document(route(Operation(summary="S", body=ITEM, body_is_optional=True), methods=("GET", "POST")))
    assert "requestBody" not in found["paths"]["/a"]["get"]
    assert not found["paths"]["/a"]["post"]["requestBody"]["required"]
