"""Numbers of a schema that llguidance holds exactly. It reads them as doubles, and writes whole ones as int64.

{"type": "integer", "exclusiveMinimum": 2 ** 53}    would let 2 ** 53 pass, which is 2 ** 53 + 1 as a double
{"const": 1733333333333333333}                      would be 1733333333333333248
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from .schema_shapes import LIMITS, is_number

EXACT = 2**53
"""Up to here a double holds every whole number."""

_MOST = 2**63 - 1
_LEAST = -(2**63) + 1024
"""llguidance has no -2 ** 63; this is the next double."""

_LONGEST = 10**18
"""Limits without one on the other side: those up to the next power of ten must be int64, too."""

_MOST_MULTIPLE = 2**32
"""Divisors, and what is computed of several, are uint32."""

_LOWER = {"minimum", "exclusiveMinimum"}


def exact_limits(schema: dict[str, Any]) -> None:
    """Write the limits of a schema in a form that is held exactly. Raises ValueError, with the keyword first, for one
    that cannot be."""
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        is_exclusive = schema.get(exclusive)
        if isinstance(is_exclusive, bool):  # as draft 4 has it
            del schema[exclusive]
            if is_exclusive and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds is not None and {"integer", "number"}.isdisjoint(kinds):
        return
    for keyword in LIMITS:
        value = schema.get(keyword)
        if value is None or abs(value) < EXACT:
            continue
        if kinds is None or "number" in kinds:
            if abs(value) > _LONGEST or Decimal(repr(float(value))) != value:
                raise ValueError(f"{keyword}: {_shown(value)} has too many digits for a double")
        else:
            _limit_whole_numbers(schema, keyword, int(value))
    for keyword, is_lower, other in (
        ("minimum", True, ("maximum", "exclusiveMaximum")),
        ("exclusiveMinimum", True, ("maximum", "exclusiveMaximum")),
        ("maximum", False, ("minimum", "exclusiveMinimum")),
        ("exclusiveMaximum", False, ("minimum", "exclusiveMinimum")),
    ):
        value = schema.get(keyword, 0)
        if (value if is_lower else -value) >= _LONGEST and not any(each in schema for each in other):
            raise ValueError(f"{keyword}: {_shown(value)} has more than 18 digits, without a limit on the other side")


def _limit_whole_numbers(schema: dict[str, Any], keyword: str, value: int) -> None:
    del schema[keyword]
    is_lower = keyword in _LOWER
    held = value
    if keyword.startswith("exclusive"):
        held = value + 1 if is_lower else value - 1
    if is_lower and held < _LEAST:
        held = _LEAST
    elif not is_lower and held > _MOST:
        held = _MOST
    elif abs(held) > _MOST or (held != _MOST and int(float(held)) != held):
        raise ValueError(f"{keyword}: {_shown(value)} has too many digits for a double")
    inclusive = "minimum" if is_lower else "maximum"
    known = schema.get(inclusive, held)
    schema[inclusive] = max(known, held) if is_lower else min(known, held)


def inexact_value(values: Iterable[Any]) -> int | float | None:
    """A number in these values, also inside of lists and objects, that would be written as another one."""
    left = [*values]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif is_number(value) and abs(value) > EXACT:
            if isinstance(value, float):
                if Decimal(repr(value)) != Decimal(value):
                    return value
            elif abs(value) > _MOST or int(float(value)) != value:
                return value
    return None


class Multiples:
    """All multipleOf of a schema. llguidance computes the least common multiple of those that hold together, in uint32
    and without noticing when it overflows."""

    def __init__(self) -> None:
        self._found: list[Decimal] = []

    def add(self, value: int | float) -> None:
        """Raises ValueError for one that cannot be held."""
        found = Decimal(repr(value)).normalize()
        if _scaled(found, _places(found)) >= _MOST_MULTIPLE:
            raise ValueError(f"{_shown(value)} has too many digits")
        self._found.append(found)

    def overflow(self, is_shared: bool) -> bool:
        """Could a least common multiple overflow? is_shared: parts of the schema may hold more than once."""
        if len(self._found) < 2 and not is_shared:
            return False
        places = max(map(_places, self._found), default=0)
        scaled = {_scaled(each, places) for each in self._found}
        common = 1
        for each in scaled:
            common = math.lcm(common, each)
            if common * max(scaled) >= _MOST_MULTIPLE:
                return True
        return False


def _shown(value: int | float) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _places(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _scaled(value: Decimal, places: int) -> int:
    return int(value.scaleb(places))
