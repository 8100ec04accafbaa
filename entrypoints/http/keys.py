"""The two API keys: where they come from, and what they open.

keys set     | serving endpoints take | admin endpoints take
none         | anybody                | anybody
api          | the key                | the key
admin        | anybody                | the admin key
both         | either key             | the admin key
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from ...scheduler.outcome import RequestRefused
from ..server_config import ServerConfig, UsageError
from .route import Access


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server; empty for none. They never appear in its repr."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    def is_asked_for(self, access: Access) -> bool:
        """Whether a route of this access needs a key at all."""
        return bool(self.api or self.admin) if access == "admin" else access == "serving" and bool(self.api)

    def is_admin(self, presented: bytes) -> bool:
        """Whether the bearer of this key may do everything."""
        if not self.admin:
            return not self.api or _equal(presented, self.api)
        return _equal(presented, self.admin)

    def check(self, access: Access, presented: bytes) -> None:
        """presented: as of `presented_key`. Raises RequestRefused: 401 without a key that is known, 403 where it is the
        wrong one of two."""
        if not self.is_asked_for(access) or self.is_admin(presented):
            return
        if self.api and _equal(presented, self.api):
            if access == "serving":
                return
            raise admin_key_required()
        raise RequestRefused(
            "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY",
            status=401,
            code="invalid_api_key",
        )


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request brings, or b"": of ``Authorization: Bearer KEY``, else of ``x-api-key``, which Anthropic's
    clients send."""
    if authorization := headers.get(b"authorization", b""):
        return authorization.removeprefix(b"Bearer ") if authorization.startswith(b"Bearer ") else b""
    return headers.get(b"x-api-key", b"")


def admin_key_required() -> RequestRefused:
    return RequestRefused(
        "this changes the server for everybody, and your key is for serving; send the admin key (--admin-api-key)",
        status=403,
        code="admin_key_required",
    )


def read_keys(server: ServerConfig, environment: MutableMapping[str, str]) -> Keys:
    """The keys of the flags, else of the files, else of BATON_API_KEY and BATON_ADMIN_API_KEY, which are taken out of
    the environment: child processes have no use for them. Raises UsageError."""
    return Keys(
        api=_read("api-key", server.api_key, server.api_key_file, environment.pop("BATON_API_KEY", "")),
        admin=_read(
            "admin-api-key",
            server.admin_api_key,
            server.admin_api_key_file,
            environment.pop("BATON_ADMIN_API_KEY", ""),
        ),
    )


def _read(flag: str, given: str, file: str, from_environment: str) -> str:
    if given:
        return given
    if not file:
        return from_environment.strip()
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"--{flag}-file {file} cannot be read: {reason}") from None
    if not key or "\n" in key:
        raise UsageError(f"--{flag}-file {file} must hold one line with the key")
    return key


def _equal(presented: bytes, key: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(presented, key.encode())
