"""Query parameters that several routes share: namespace, whole numbers."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from ....scheduler.outcome import RequestRefused
from ...description.json_schema import Properties, string
from ...fields.namespaces import MAX_KEY_CHARS, read_namespaces
from ...fields.reading import PerPrompt, refuse_unserved, shown

_WHOLE = re.compile(r"-?[0-9]{1,19}")

_NAMESPACE_FIELDS = ("cache_salt", "extra_key")

NAMESPACE_QUERY: Properties = dict.fromkeys(
    _NAMESPACE_FIELDS, string("As in the request that made it.", most=MAX_KEY_CHARS)
)


def read_namespace_query(
    request: Request, served: tuple[str, ...] = (), unsupported: dict[str, tuple] | None = None
) -> tuple[str, dict[str, Any]]:
    """(the namespace that ``cache_salt`` and ``extra_key`` name, all parameters). Raises RequestRefused."""
    given: dict[str, Any] = dict(request.query_params)
    refuse_unserved(given, (*_NAMESPACE_FIELDS, *served), unsupported or {})
    named = {name: given[name] for name in _NAMESPACE_FIELDS if name in given}
    return read_namespaces(PerPrompt(named, 1, is_batch=False))[0], given


def whole_number(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """A parameter of a query. Raises RequestRefused."""
    text = given.get(name, str(default))
    if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
        raise RequestRefused(f"{name} is {shown(text)}; it takes a whole number from {least} to {most}", param=name)
    return int(text)
