"""Values that a model writes as bare text -> JSON text, by the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_text import NUMBER, dumps, loads
from .pieces import ToolSpec
from .python_literals import literal_to_json


def parameter_types(tool: ToolSpec | None, name: str) -> frozenset[str]:
    """JSON types that the schema allows for this parameter; empty if it says nothing."""
    if tool is None:
        return frozenset()
    return frozenset(_types(tool.properties.get(name), tool.parameters))


def value_to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value. What is of none of the types, or of unknown type, is a string, to the letter."""
    bare = text.strip()
    lowered = bare.lower()
    if lowered in ("null", "none") and types and types != {"string"}:
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if types & {"integer", "number"} and NUMBER.fullmatch(bare):
        return bare
    kinds = {"object": "{", "array": "["}
    if any(kind in types and bare.startswith(first) for kind, first in kinds.items()):
        try:
            loads(bare)
            return bare
        except ValueError:
            literal = literal_to_json(bare)
            if literal is not None:
                return literal
    return dumps(text)


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema names, directly, by its alternatives, or by references into ``root``."""
    types: set[str] = set()
    seen: set[int] = set()  # of schemas: they may refer to each other in circles
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        given = schema.get("type")
        choices = schema.get("enum")
        if isinstance(given, str):
            types.add(given)
        elif isinstance(given, list):
            types.update(kind for kind in given if isinstance(kind, str))
        elif isinstance(choices, list):
            types.update(map(_type_of, choices))
        for name in ("anyOf", "oneOf", "allOf"):
            alternatives = schema.get(name)
            waiting.extend(alternatives if isinstance(alternatives, list) else ())
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            waiting.append(_follow(reference, root))
    return types


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string"
