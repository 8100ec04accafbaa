"""The query of a request for something that belongs to a namespace."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from ...description.json_schema import Properties, string
from ...fields.namespaces import MAX_KEY_CHARS, read_namespaces
from ...fields.reading import PerPrompt, refuse_unserved

_WHOSE = ("cache_salt", "extra_key")

WHOSE_QUERY: Properties = dict.fromkeys(
    _WHOSE, string("Whose cache it was made with, where that was said.", most=MAX_KEY_CHARS)
)


def whose(
    request: Request, served: tuple[str, ...] = (), unsupported: dict[str, tuple] | None = None
) -> tuple[str, dict[str, Any]]:
    """(the namespace that ``cache_salt`` and ``extra_key`` name, all parameters). Raises RequestRefused."""
    given: dict[str, Any] = dict(request.query_params)
    refuse_unserved(given, (*_WHOSE, *served), unsupported or {}, (), where="")
    named = {name: given[name] for name in _WHOSE if name in given}
    return read_namespaces(PerPrompt(named, 1, is_batch=False))[0], given
