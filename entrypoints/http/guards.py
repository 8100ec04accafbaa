"""Checks that every request passes before its route: Host, Origin, key, Content-Type. No page of the web gets through
that the operator did not name.

A browser lets any page send requests to servers on its reader's machine or network. It names the page in ``Origin``
where the request may change something, and sends JSON to another site only after that site has said yes. DNS rebinding,
where a page takes its own name for this machine, shows in ``Host``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.outcome import RequestRefused
from ..http_statuses import status_of
from ..server_config import ServerConfig
from .keys import Caller, Keys, presented_key
from .route import ANY_MEDIA, PROBE, Route, RouteTable
from .wire.answers import CLIENT_CLOSED_REQUEST, answer_error

_CLIENT = "client"
"""The parameter of a query that names the client for which the admin speaks."""

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Guards:
    """ASGI middleware: refuses what the checks refuse. ``request.state.caller`` is the client that sent the
    request, ``request.state.error_body`` the shape of its route's errors."""

    def __init__(self, app: ASGIApp, routes: RouteTable, server: ServerConfig, keys: Keys) -> None:
        self._app = app
        self._routes = routes
        self._keys = keys
        self._hosts = KnownHosts(server.host, server.allowed_hosts)
        self._friend = server.cors_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._routes.find_route(scope["path"], scope["method"])
        body = self._routes.error_body_of(scope["path"]) if route is None else route.error_body
        scope.setdefault("state", {})["error_body"] = body
        try:
            self._check(scope, route)
        except RequestRefused as refused:
            extra = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": self._allowed(scope)}}
            headers = extra.get(status_of(refused))
            await answer_error(refused, headers, body=body)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, route: Route | None) -> None:
        """Raises RequestRefused."""
        method, headers = scope["method"], dict(scope["headers"])
        host = _host(scope)
        # A page that knows the key may use the server, whatever its name.
        if not self._keys.guards_serving and host is not None:
            self._hosts.check(host)
        if method not in (*PROBE, "OPTIONS") or (route is not None and route.changes_state(method)):
            check_origin(headers.get(b"origin"), host, self._friend)
        key = presented_key(headers)
        access = "serving" if route is None else route.access
        by_old_client = route is not None and method == "GET" and route.changes_state(method)
        if by_old_client and not self._keys.is_asked_for(access):
            raise RequestRefused(
                f"GET {scope['path']} changes the server, and any page can send it; use POST, or an API key",
                code="method_not_allowed",
            )
        caller = self._keys.admit(access, key)
        if self._keys.tells_clients_apart and access != "open":
            caller = self._speaking_for(scope, caller)
        scope["state"]["caller"] = caller
        if route is None and (allowed := self._allowed(scope)):
            raise RequestRefused(
                f"{scope['path'][:200]} does not take {method[:20]}; use {allowed}",
                code="method_not_allowed",
            )
        if route is not None:
            check_content_type(route, headers)

    def _allowed(self, scope: Scope) -> str:
        """The methods of a path that changes the server by POST are those that may change it."""
        methods = self._routes.methods_of(scope["path"])
        return "POST" if "POST" in methods and "GET" in methods and scope["method"] == "GET" else ", ".join(methods)

    def _speaking_for(self, scope: Scope, caller: Caller) -> Caller:
        """The caller, or the client that the query names: ``client=NAME``, which is taken out, as no route knows it.
        Raises RequestRefused."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        named = [value for name, value in query if name == _CLIENT]
        if not named:
            return caller
        caller = self._keys.on_behalf(caller, named[0])
        if len(named) > 1:
            raise RequestRefused("client is given several times; name one client", param=_CLIENT)
        rest = [(name, value) for name, value in query if name != _CLIENT]
        scope["query_string"] = urlencode(rest).encode("latin-1")
        return caller


class KnownHosts:
    """The names this server goes by. Every address counts as known: only a name can be rebound."""

    def __init__(self, bound: str, allowed: str) -> None:
        """bound: what --host says. allowed: names, separated by commas; ``*`` is any, ``*.x.org`` all below x.org."""
        names = [name.strip().lower().rstrip(".") for name in allowed.split(",")]
        self._all = "*" in names
        self._names = {"localhost", bound.lower(), *names} - {""}
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def check(self, host: str) -> None:
        """host: the header. Raises RequestRefused (421)."""
        name = host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.rsplit(":", 1)[0]
        name = name.lower().rstrip(".")
        if self._all or name in self._names or name.endswith(self._suffixes) or _is_address(name):
            return
        raise RequestRefused(
            f"this server does not accept the host name {name!r}; use its address, or have the operator set "
            f"--allowed-hosts {name}",
            code="unknown_host",
        )


def check_origin(origin: bytes | None, host: str | None, friend: str) -> None:
    """Refuse a page of another host or port, unless it is the ``friend`` of --cors-origin. Whoever is no browser sends
    no Origin. Raises RequestRefused (403)."""
    if origin is None or friend == "*":
        return
    given = origin.decode("latin-1").lower()
    if friend and given == friend.lower().rstrip("/"):
        return
    scheme, place = _origin_parts(given)
    port = _DEFAULT_PORTS.get(scheme, "")
    if host is not None and place and place.removesuffix(port) == host.lower().removesuffix(port):
        return
    raise RequestRefused(
        f"requests from pages of {given!r} are not taken; the operator can allow one origin with --cors-origin",
        code="foreign_origin",
    )


def check_content_type(route: Route, headers: dict[bytes, bytes]) -> None:
    """A body needs the content type of its route: a page may send forms and plain text without asking first. Raises
    RequestRefused (415)."""
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    if not has_body or route.media == ANY_MEDIA:
        return
    given = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
    if given == route.media or (route.media.endswith("/json") and given.endswith("+json")):
        return
    raise RequestRefused(
        f"Content-Type is {given or 'missing'!r}; send the body with Content-Type: {route.media}",
        code="unsupported_media_type",
    )


class ErrorCount:
    """ASGI middleware: counts every refusal and failure by its status, those of probes left out."""

    def __init__(self, app: ASGIApp, count: Callable[[int], None], probes: Iterable[str]) -> None:
        self._app = app
        self._count = count
        self._probes = frozenset(probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._probes:
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 0
            if status >= 400 and status != CLIENT_CLOSED_REQUEST:
                self._count(status)
            await send(message)

        await self._app(scope, receive, counting)


def _host(scope: Scope) -> str | None:
    """The Host header; None for HTTP/1.0, which has none. Raises RequestRefused (400)."""
    found = [value for name, value in scope["headers"] if name == b"host"]
    if len(found) > 1 or (not found and scope["http_version"] != "1.0"):
        raise RequestRefused(f"there are {len(found)} Host headers; send one", code="invalid_request")
    return found[0].decode("latin-1") if found else None


def _origin_parts(origin: str) -> tuple[str, str]:
    """Its scheme, and its host with port; both empty where it is no URL."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return "", ""
    return parts.scheme, parts.netloc


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
