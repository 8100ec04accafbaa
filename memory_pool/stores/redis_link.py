"""One connection to a Redis server: commands out, replies in, each within a time-out.

It is redis-py's connection, which knows about URLs, TLS, logging in and the protocol, without its client: replies are
taken one by one, so that a reply can be looked at, and its memory given back, before the next has come. Payloads go to
the socket from where they lie.

A URL may hold a password. Nothing here puts one into a message, also not where the server repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

SOCKET_BYTES = 2**18
"""The most that goes to or comes from the socket in one call: a time-out is for one call, and so is the GIL."""

_MAX_TEXT = 200
"""Most characters of a server's or library's error text that get into the log."""

LinkFailure = Literal["unreachable", "timeout", "login", "answer", "refused", "late"]


class RemoteStoreError(RuntimeError):
    """The remote store cannot be used as it was asked for; the message says what to change."""


class LinkError(Exception):
    """The connection failed and is closed; the next command opens another."""

    def __init__(self, kind: LinkFailure, text: str) -> None:
        super().__init__(text)
        self.kind: LinkFailure = kind


class Refusal(NamedTuple):
    """The server's answer to a command that it did not carry out."""

    text: str


class RedisLink:
    """Connects by itself, with the first command and after a failure. For one thread. Raises RemoteStoreError.

    url: redis://, rediss:// (TLS) or unix://; user, password and database as redis-py reads them. Options after a "?"
        may be db and those that begin with ssl_.
    timeout_s: for each call of the socket, at most SOCKET_BYTES.
    """

    def __init__(self, url: str, connect_timeout_s: float, timeout_s: float) -> None:
        try:
            from redis import connection, exceptions
        except ImportError:
            raise RemoteStoreError(
                "a remote store needs the package redis, which is not installed: pip install 'baton-serve[remote]'"
            ) from None
        options = _options(url, connection.parse_url)
        kind = options.pop("connection_class", connection.Connection)
        scheme, place = url.partition("://")[0], options.get("path") or options.get("host", "localhost")
        port = "" if scheme == "unix" else f":{options.get('port', 6379)}"
        self.address = f"{scheme}://{place}{port}/{options.get('db', 0)}"
        """Without user and password."""
        self._secrets = [secret for secret in (options.get("password"), options.get("username")) if secret]
        self._errors = exceptions
        try:
            self._connection: AbstractConnection = kind(
                **options,
                protocol=2,
                socket_connect_timeout=connect_timeout_s,
                socket_timeout=timeout_s,
                socket_read_size=SOCKET_BYTES,
                driver_info=None,
            )
        except (TypeError, ValueError, exceptions.RedisError):
            given = ", ".join(sorted(name for name in options if name.startswith("ssl_")))
            raise RemoteStoreError(
                f"the URL of the remote store at {self.address} has options that redis-py does not take: {given}; they "
                "are for rediss:// alone, and their names and values are those of redis.connection.SSLConnection"
            ) from None
        self.pending = 0
        """Replies that have not been received."""
        self._unsent = bytearray()

    def send(self, *parts: bytes | int | Sequence[bytes | memoryview]) -> None:
        """Queue a command; it is sent at the latest with the next `receive`. Replies come in the order of the commands.
        Raises LinkError.

        parts: the command and its arguments. One that is a sequence goes as its pieces, end to end, and is sent at
            once: they may change when this returns.
        """
        self._unsent += b"*%d\r\n" % len(parts)
        self.pending += 1
        for part in parts:
            if isinstance(part, int):
                part = b"%d" % part
            if isinstance(part, bytes):
                self._unsent += b"$%d\r\n%b\r\n" % (len(part), part)
                continue
            self._unsent += b"$%d\r\n" % sum(len(piece) for piece in part)
            self._flush(*part)
            self._unsent += b"\r\n"

    def _flush(self, *pieces: bytes | memoryview) -> None:
        """Send what has gathered, then these pieces."""
        packets: list[bytes | bytearray | memoryview] = [self._unsent]
        self._unsent = bytearray()
        for piece in pieces:
            packets += [piece[at : at + SOCKET_BYTES] for at in range(0, len(piece), SOCKET_BYTES)]
        try:
            self._connection.send_packed_command(packets)
        except (self._errors.RedisError, OSError, ValueError) as error:
            raise self._failure(error) from None

    def receive(self) -> Any:
        """The reply to the first command that has none yet: bytes, int, list, None or Refusal. Raises LinkError."""
        if self._unsent:
            self._flush()
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except self._errors.ResponseError as error:
            reply = Refusal(self._clean(error))
        except (self._errors.RedisError, OSError, ValueError) as error:
            raise self._failure(error) from None
        self.pending -= 1
        return reply

    def ask(self, *parts: bytes | int) -> Any:
        """Send a command and wait for its reply. Raises LinkError, also if it is refused."""
        self.send(*parts)
        return self.must(self.receive())

    def must(self, reply: Any) -> Any:
        """The reply, unless it is a refusal. Raises LinkError."""
        if isinstance(reply, Refusal):
            raise LinkError("refused", reply.text)
        return reply

    def reset(self) -> None:
        """Close the connection. Replies that have not been received are lost."""
        self.pending, self._unsent = 0, bytearray()
        self._connection.disconnect()

    def _failure(self, error: Exception) -> LinkError:
        self.reset()
        errors = self._errors
        if isinstance(error, (errors.AuthenticationError, errors.ResponseError)):  # of the commands that log us in
            return LinkError("login", self._clean(error))
        if isinstance(error, (errors.TimeoutError, TimeoutError)):
            return LinkError("timeout", self._clean(error))
        if isinstance(error, (errors.InvalidResponse, ValueError)):
            return LinkError("answer", self._clean(error))
        return LinkError("unreachable", self._clean(error))

    def _clean(self, error: Exception) -> str:
        text = str(error)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_TEXT]) or type(error).__name__


def _options(url: str, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """redis-py's reading of a URL, if it is unambiguous. Raises RemoteStoreError."""
    try:
        options, parts = parse(url), urlsplit(url)
        query = parse_qs(parts.query)
        rest = (parts.path if parts.scheme != "unix" else "") + parts.query + parts.fragment
        if "@" in rest or parts.fragment or (parts.scheme != "unix" and parts.path.strip("/").strip("0123456789")):
            raise ValueError  # a password that is not quoted ends too early, and its end would be taken for a path
    except (ValueError, AttributeError):  # what they say may quote the password
        raise RemoteStoreError(
            "the URL of the remote store cannot be read: give it the form redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], "
            "rediss:// for TLS, unix://PATH for a socket; in user and password write / # ? @ : % as %2F %23 %3F %40 "
            "%3A %25"
        ) from None
    for name in query:
        if name != "db" and not name.startswith("ssl_"):
            raise RemoteStoreError(
                f"the URL of the remote store has an option {name!r}, which is not supported: only db is, and with "
                "rediss:// those that begin with ssl_"
            )
    return options
