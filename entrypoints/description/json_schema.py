"""Builds the JSON schemas by which ``/openapi.json`` describes bodies and answers.

The reader of a body decides which values it accepts. The table beside it (`PROPERTIES`) describes the same fields to
people and tools, and gives the reader their names. Tests compare the limits in the tables with those of the readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Schema = dict[str, Any]
"""JSON Schema 2020-12, as OpenAPI 3.1 takes it. One with a ``title`` is described once, under that name."""

Properties = dict[str, Schema]

MAX_INT = 2**63 - 1
"""Larger numbers do not fit the messages between the processes."""

_UNSET: Any = object()


# -- single values -----------------------------------------------------------------------------------------------------


def anything(about: str = "") -> Schema:
    return _described({}, about)


def string(about: str = "", *, least: int = 0, most: int | None = None, pattern: str | None = None) -> Schema:
    """least, most: characters."""
    schema: Schema = {"type": "string"}
    if least:
        schema["minLength"] = least
    if most is not None:
        schema["maxLength"] = most
    if pattern is not None:
        schema["pattern"] = pattern
    return _described(schema, about)


def flag(about: str = "", *, default: bool = _UNSET) -> Schema:
    return _described({"type": "boolean"}, about, default)


def whole(about: str = "", low: int = -MAX_INT, high: int = MAX_INT, *, default: int | None = _UNSET) -> Schema:
    """A whole number from ``low`` to ``high``."""
    return _described({"type": "integer", "minimum": low, "maximum": high}, about, default)


def number(
    about: str = "",
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    default: float | None = _UNSET,
) -> Schema:
    """A number from ``low``, or above ``above``, to ``high``."""
    limits = {"minimum": low, "exclusiveMinimum": above, "maximum": high}
    schema = {"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None}
    return _described(schema, about, default)


def enum(*values: Any, about: str = "", default: Any = _UNSET) -> Schema:
    return _described({"enum": list(values)}, about, default)


def either(*schemas: Schema, about: str = "") -> Schema:
    return _described({"anyOf": list(schemas)}, about)


def list_of(items: Schema, about: str = "", *, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return _described(schema, about)


def per_prompt(schema: Schema) -> Schema:
    """One value for all prompts, or a list with one for each."""
    about = schema.get("description", "")
    return _described(
        {"anyOf": [schema, {"type": "array", "items": nullable(schema)}]}, f"{about} One value, or one for each prompt."
    )


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    if not schema.keys() - {"description"}:
        return schema
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "type" in schema and "title" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    rest = {name: schema[name] for name in ("description", "default") if name in schema}
    return rest | {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


# -- objects -----------------------------------------------------------------------------------------------------------


def taken(
    properties: Properties,
    about: str = "",
    *,
    title: str | None = None,
    required: tuple[str, ...] = (),
    unsupported: Mapping[str, tuple] | None = None,
    without_effect: tuple[str, ...] = (),
    instead: Mapping[str, str] | None = None,
) -> Schema:
    """An object of a request: no other fields than these, and null is the default of all that are not required.
    unsupported, without_effect, instead: as `fields.reading.refuse_unserved` takes them."""
    listed = {name: schema if name in required else nullable(schema) for name, schema in properties.items()}
    for name, off in (unsupported or {}).items():
        use = f"; use {instead[name]}" if instead and name in instead else ""
        listed[name] = enum(None, *off, about=f"Not supported{use}; accepted with a value that has no effect.")
        if {} in off:  # also with a null for each of its fields, as some clients write it
            listed[name] = either(listed[name], {"type": "object", "additionalProperties": {"type": "null"}})
    for name in without_effect:
        listed[name] = anything("Accepted, no effect.")
    return _object(listed, about, title, required)


def opened(schema: Schema) -> Schema:
    """The object, with any other fields, which are ignored."""
    return {name: value for name, value in schema.items() if name != "additionalProperties"}


def answered(
    properties: Properties, about: str = "", *, title: str | None = None, optional: Properties | None = None
) -> Schema:
    """An object of an answer: all of these fields, perhaps the ``optional`` ones, and no others."""
    return _object({**properties, **(optional or {})}, about, title, tuple(properties))


def open_object(about: str = "", *, values: Schema | None = None, most: int | None = None) -> Schema:
    """An object with fields that others name."""
    schema: Schema = {"type": "object"}
    if values is not None:
        schema["additionalProperties"] = values
    if most is not None:
        schema["maxProperties"] = most
    return _described(schema, about)


def _object(properties: Properties, about: str, title: str | None, required: tuple[str, ...]) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if title is not None:
        schema["title"] = title
    if required:
        schema["required"] = list(required)
    return _described(schema, about)


def _described(schema: Schema, about: str, default: Any = _UNSET) -> Schema:
    if default is not _UNSET:
        schema["default"] = msgspec.to_builtins(default)
    return schema | {"description": about} if about else schema


SUCCESS = answered({"success": {"type": "boolean"}, "message": string()})
COUNT = whole("", 0)

TOKEN_ID = whole("", 0)
"""The highest id depends on the model."""

IDS = list_of(TOKEN_ID)


def picked(properties: Properties, names: tuple[str, ...]) -> Properties:
    """The properties with these names, in this order."""
    return {name: properties[name] for name in names}
