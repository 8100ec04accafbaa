"""The values that keywords of JSON Schema take. Others are refused before anything reads them.

Schemas inside of schemas are not looked at here: the rewriter checks each of them when it comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TYPES = ("null", "boolean", "number", "string", "array", "object")

COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
          "minContains", "maxContains")  # fmt: skip
"""Whole numbers, also where they are written as 2.0."""

LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class _Shape(NamedTuple):
    about: str
    fits: Callable[[Any], bool]


def shape_missed(keyword: str, value: Any) -> str | None:
    """The shape that a keyword takes, if this value has another."""
    shape = _SHAPES.get(keyword)
    return None if shape is None or shape.fits(value) else shape.about


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and (name in TYPES or name == "integer") for name in names)


def _named(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_SCHEMA = _Shape("a schema: an object, true or false", _is_schema)
_LIST = _Shape("a list of schemas", lambda value: isinstance(value, list) and all(map(_is_schema, value)))
_SCHEMAS_BY_NAME = _Shape("an object of schemas", _named(_is_schema))
_COUNT = _Shape("a whole number from 0", _is_count)
_NUMBER = _Shape("a number", is_number)
_TEXT = _Shape("a string", _is_text)

_SHAPES: Mapping[str, _Shape] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    # true and false are of draft 4.
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        _Shape("a number", lambda value: is_number(value) or isinstance(value, bool)),
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$id", "$schema", "$anchor"), _TEXT),
    **dict.fromkeys(
        ("additionalProperties", "additionalItems", "not", "if", "then", "else", "propertyNames", "contains",
         "unevaluatedProperties", "unevaluatedItems"),
        _SCHEMA,
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _SCHEMAS_BY_NAME
    ),
    "items": _Shape("a schema, or a list of schemas", lambda value: _is_schema(value) or _LIST.fits(value)),
    "dependentRequired": _Shape("an object of lists of names", _named(_are_texts)),
    "dependencies": _Shape(
        "an object of schemas or lists of names", _named(lambda value: _is_schema(value) or _are_texts(value))
    ),
    "type": _Shape(f"{', '.join(TYPES)}, integer or a list of them", _is_type),
    "enum": _Shape("a list of values", lambda value: isinstance(value, list)),
    "required": _Shape("a list of names", _are_texts),
    "uniqueItems": _Shape("true or false", lambda value: isinstance(value, bool)),
    "multipleOf": _Shape("a number above 0", lambda value: is_number(value) and value > 0),
}  # fmt: skip
