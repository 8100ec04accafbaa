"""Schemas and documents of the benchmark: documents fulfil their schemas, and a seed gives the same ones again."""

from __future__ import annotations

import json

import jsonschema

from benchmarks.grammars.masks import read_schema
from benchmarks.grammars.schemas import make_document, make_schemas, make_text

SCHEMAS = make_schemas(60, 1)


def test_documents_fulfil_their_schemas() -> None:
    for number, schema in enumerate(SCHEMAS):
        jsonschema.Draft202012Validator.check_schema(schema)
        for seed in range(3):
            document = make_document(schema, seed)
            jsonschema.validate(document, schema)
            assert json.loads(make_text(schema, seed)) == document, number


def test_same_seed_gives_same_schemas() -> None:
    assert make_schemas(60, 1) == SCHEMAS
    assert make_schemas(60, 2) != SCHEMAS
    assert make_schemas(9, 1) == SCHEMAS[:9]


def test_nearly_all_schemas_are_taken() -> None:
    taken = [grammar for schema in SCHEMAS if (grammar := read_schema(schema)) is not None]
    assert len(taken) >= 0.95 * len(SCHEMAS)
