"""The cache namespace of a request, from ``cache_salt`` and ``extra_key``, and the client that it counts for."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from ...scheduler.outcome import RequestRefused
from .reading import PerPrompt, typed

MAX_KEY_CHARS = 1024

_PROCESS_KEY = os.urandom(32)
"""A namespace says nothing of its salt to whoever sees it in a dump, not even whether a guess is right."""


def read_namespaces(per_prompt: PerPrompt) -> list[str]:
    """One namespace per prompt. Raises RequestRefused."""
    salts = per_prompt.read_values("cache_salt", _key, "")
    extra_keys = per_prompt.read_values("extra_key", _key, "")
    return [namespace_of(salt, extra_key) for salt, extra_key in zip(salts, extra_keys, strict=True)]


def read_client(fields: dict[str, Any]) -> str:
    """The client for the budgets per client: a digest of ``user``, or "". Raises RequestRefused."""
    user = _key(fields.get("user", ""), "user")
    return namespace_of("user", user) if user else ""


def namespace_of(*parts: str) -> str:
    """The digest of a structured key: 32 hex digits, or "" if all parts are empty. Equal only where each part is."""
    if not any(parts):
        return ""
    digest = hashlib.blake2b(digest_size=16, key=_PROCESS_KEY)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _key(value: object, name: str) -> str:
    key = typed(value, str, name)
    if len(key) > MAX_KEY_CHARS:
        raise RequestRefused(f"{name} has {len(key)} characters; use at most {MAX_KEY_CHARS}", param=name)
    return key
