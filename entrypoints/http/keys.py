"""API keys: where they come from, which client each belongs to, and what each opens.

keys set                     | clients                | serving endpoints take | admin endpoints take
none                         | one                    | any request            | any request
--api-key of one client      | one                    | its keys               | its keys
--api-key of several clients | each of them           | their keys             | none
--admin-api-key              | one                    | any request            | the admin key
both, one client             | one                    | any key                | the admin key
both, several clients        | each of them, admin    | any key                | the admin key

Where there is one client, the admin shares its names: the admin key opens more, but separates nothing.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from ...runtime.clients import ADMIN_NAME, ANONYMOUS_NAME, SOLE_CLIENT, Client, is_client_name
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import Properties, string
from ..server_config import ServerConfig, UsageError
from .route import Access

_NAMED_KEY = re.compile(r"([^\s:]+):\s+(\S+)")
"""A line of a file: the client's name, and a key of it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, and the name of its client. The key never appears in its repr."""

    client: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. sees_all: lists show it the things of all clients, each with its client's name."""

    client: Client
    is_admin: bool = False
    sees_all: bool = False


class Keys:
    """The keys of a server. Keys are compared by keyed digests: the time that takes tells nothing of them."""

    def __init__(self, api: Iterable[ApiKey] = (), admin: str = "", *, isolated: bool = False) -> None:
        """admin: the admin key; "" for none. isolated: clients share no KV. Raises UsageError for a key
        that is given twice, and for ``isolated`` with a single client."""
        self._secret = os.urandom(32)
        self._api, self._admin = tuple(api), admin
        names = dict.fromkeys(key.client for key in self._api)
        self.tells_clients_apart = len(names) > 1
        if isolated and not self.tells_clients_apart:
            raise UsageError(
                "--isolate-clients tells clients apart by their keys, and there is only one client; give several keys, "
                "with --api-key-file or --api-key"
            )
        self._clients: dict[str, Client] = {}
        """By name; empty where no clients are told apart."""
        if self.tells_clients_apart:
            all_names = [*names, *([ADMIN_NAME] if admin else [])]
            self._clients = {name: Client(name, isolated) for name in all_names}
        self._callers: dict[bytes, Caller] = {}
        """By the digest of their key."""
        for key in self._api:
            client = self._clients.get(key.client, SOLE_CLIENT)
            self._add(key.key, Caller(client, is_admin=not (self.tells_clients_apart or admin)))
        if admin:
            client = self._clients.get(ADMIN_NAME, SOLE_CLIENT)
            self._add(admin, Caller(client, is_admin=True, sees_all=self.tells_clients_apart))
        anonymous = Client(ANONYMOUS_NAME, isolated) if self.tells_clients_apart else SOLE_CLIENT
        self._unknown = Caller(anonymous, is_admin=not (self._api or admin))
        """The caller without a known key, where none is required."""

    def _add(self, key: str, caller: Caller) -> None:
        digest = self._digest(key.encode("utf-8", "surrogateescape"))
        if digest in self._callers:
            raise UsageError("the same API key is given twice; each client, and the admin, needs keys of its own")
        self._callers[digest] = caller

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()

    def __repr__(self) -> str:
        return f"Keys({len(self._api)} of clients, {'one' if self._admin else 'none'} of the admin)"

    @property
    def has_admin(self) -> bool:
        """There is an admin key."""
        return bool(self._admin)

    @property
    def guards_serving(self) -> bool:
        """A request for tokens needs a key."""
        return bool(self._api)

    @property
    def most_powerful(self) -> str:
        """A key that opens as much as any; "" where there is none."""
        return self._admin or (self._api[0].key if self._api else "")

    @property
    def client_names(self) -> list[str]:
        return list(self._clients)

    def is_asked_for(self, access: Access) -> bool:
        """True if a route of this access requires a key."""
        return bool(self._api or self._admin) if access == "admin" else access == "serving" and bool(self._api)

    def admit(self, access: Access, presented: bytes) -> Caller:
        """The caller with this key (from `presented_key`) on a route of this access. Raises RequestRefused:
        401 without a key that is known, 403 where it is the wrong one of two."""
        caller = self._callers.get(self._digest(presented))
        if self.is_asked_for(access):
            if caller is None:
                raise RequestRefused(
                    "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY",
                    code="invalid_api_key",
                )
            if access == "admin" and not caller.is_admin:
                raise admin_key_required("this shows or changes the server for all clients, and your key is a client's")
        return caller or self._unknown

    def on_behalf(self, caller: Caller, name: str) -> Caller:
        """The admin, speaking for the client of this name. Raises RequestRefused: 403 for others, 404 for a name that
        no client has."""
        if not caller.is_admin:
            raise admin_key_required("client=NAME speaks for a client, and your key is a client's")
        if name not in self._clients:
            known = f"there are {', '.join(self._clients)}" if self._clients else "this server tells no clients apart"
            raise RequestRefused(
                f"no client is called {name[:64]!r}; {known}",
                code="client_not_found",
                param="client",
            )
        return Caller(self._clients[name], is_admin=True)


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request brings, or b"": of ``Authorization: Bearer KEY``, else of ``x-api-key``, which Anthropic's
    clients send."""
    if authorization := headers.get(b"authorization", b""):
        return authorization.removeprefix(b"Bearer ") if authorization.startswith(b"Bearer ") else b""
    return headers.get(b"x-api-key", b"")


def admin_key_required(why: str) -> RequestRefused:
    return RequestRefused(
        f"{why}; send the admin key (--admin-api-key)",
        code="admin_key_required",
    )


def exposure_warning(host: str, keys: Keys) -> str:
    """The warning that a server should log which others can reach and which asks them for no key; else ""."""
    if keys.guards_serving or _is_loopback(host):
        return ""
    more = "" if keys.has_admin else ", read and abort the requests of others, and empty its cache"
    return (
        f"--host {host} lets other machines reach this server, and no --api-key guards it: whoever reaches it may use "
        f"it{more}. Set --api-key-file"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# -- where keys come from ----------------------------------------------------------------------------------------------


def read_keys(server: ServerConfig, environment: MutableMapping[str, str]) -> Keys:
    """The keys of the flags, else of the files, else of BATON_API_KEY and BATON_ADMIN_API_KEY, which are taken out of
    the environment: child processes have no use for them. Raises UsageError."""
    from_environment = environment.pop("BATON_API_KEY", "")
    admin_from_environment = environment.pop("BATON_ADMIN_API_KEY", "").strip()
    if server.api_key:
        api = _numbered(server.api_key)
    elif server.api_key_file:
        api = _keys_of(_content("api-key", server.api_key_file), f"--api-key-file {server.api_key_file}")
    else:
        api = _keys_of(from_environment, "BATON_API_KEY") if from_environment.strip() else []
    admin = server.admin_api_key
    if not admin and server.admin_api_key_file:
        admin = _content("admin-api-key", server.admin_api_key_file).strip()
        if not admin or "\n" in admin:
            raise UsageError(f"--admin-api-key-file {server.admin_api_key_file} must hold one line with the key")
    return Keys(api, admin or admin_from_environment, isolated=server.isolate_clients)


def _numbered(keys: Iterable[str]) -> list[ApiKey]:
    """Keys without a name: each is of a client of its own."""
    return [ApiKey(f"client-{number}", key) for number, key in enumerate(keys, 1)]


def _keys_of(text: str, source: str) -> list[ApiKey]:
    """One key, or a line ``name: key`` for each; lines that begin with "# " are comments. A client may have several
    keys, while one takes the place of another. Raises UsageError, without the text of any line."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("# ") and line != "#"]
    if not lines:
        raise UsageError(f"{source} must hold a key, or lines of the form 'name: key'")
    if len(lines) == 1 and _NAMED_KEY.fullmatch(lines[0][1]) is None:
        return _numbered([lines[0][1]])
    found: dict[str, ApiKey] = {}
    for number, line in lines:
        match = _NAMED_KEY.fullmatch(line)
        if match is None or not is_client_name(match[1]):
            raise UsageError(
                f"{source}: line {number} is not of the form 'name: key'; a name has 1 to 64 letters, "
                f"digits and . _ @ -, begins with a letter or digit, and is neither {ADMIN_NAME!r} "
                f"nor {ANONYMOUS_NAME!r}"
            )
        name, key = match[1], match[2]
        if key in found:
            raise UsageError(f"{source}: line {number} has a key that an earlier line has; give each key once")
        found[key] = ApiKey(name, key)
    return list(found.values())


def in_environment(keys: str | Sequence[str]) -> str:
    """The keys of BATON_API_KEY, in place of one or several --api-key."""
    if isinstance(keys, str) or len(keys) == 1:
        return keys if isinstance(keys, str) else keys[0]
    return "\n".join(f"{key.client}: {key.key}" for key in _numbered(keys))


def _content(flag: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"--{flag}-file {file} cannot be read: {reason}") from None


CLIENT: Properties = {"client": string("Its client; shown to the admin where keys tell clients apart.")}


def caller(request: Request) -> Client:
    """The client that this request is for: that of its key, or the one named by the admin."""
    return request.state.caller.client


def sees_all(request: Request) -> bool:
    """True if lists show the things of all clients: for the admin of a server with several clients."""
    return request.state.caller.sees_all
