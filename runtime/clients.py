"""Clients, and the names each of them gives to requests and jobs.

    HTTP, Engine                       TokenizerManager, ControlClient          worker, detokenizer
    client alice, rid "step-1"   ──▶   qualified here, stripped here   ──▶      "alice/step-1"
    client bob, rid "step-1"     ──▶                                   ──▶      "bob/step-1"

Everything behind the manager knows only qualified names. It needs no check of a request's owner: no name that one
client can send is a name of another client. The name of a client holds no "/", so that a qualified name has one owner,
whatever a client calls its requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from ..scheduler.request_spec import RequestSpec

_SEPARATOR = "/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

ANONYMOUS_NAME = "anonymous"
ADMIN_NAME = "admin"


def is_client_name(name: str) -> bool:
    """True if an operator may give a client this name: 1 to 64 letters, digits and ``._@-``, and no name that is the
    server's own."""
    return _NAME.fullmatch(name) is not None and name not in (ANONYMOUS_NAME, ADMIN_NAME)


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a server. ``name`` is empty for the only client of a server without a key per client: its names
    are not qualified. isolated: it shares no KV with other clients."""

    name: str = ""
    isolated: bool = False

    @property
    def prefix(self) -> str:
        """All of its qualified names begin with it, and no others."""
        return f"{self.name}{_SEPARATOR}" if self.name else ""

    def qualified(self, name: str) -> str:
        """The name of one of its requests or jobs, as the worker has it."""
        return self.prefix + name

    def stripped(self, qualified: str) -> str:
        """A name of its own as it gave it."""
        return qualified.removeprefix(self.prefix)

    def owns(self, qualified: str) -> bool:
        return qualified.startswith(self.prefix)

    def scope(self, namespace: str) -> str:
        """The client and namespace of a recorded turn or stored response, as one string: only the same scope finds it
        again."""
        return self.prefix + namespace

    def kv_namespace(self, namespace: str) -> str:
        """The namespace of KV that its requests with this one share."""
        return self.prefix + namespace if self.isolated else namespace

    def qualified_spec(self, spec: RequestSpec) -> RequestSpec:
        """The spec of one of its requests as the worker gets it: every name in it is qualified, and the budget that it
        counts in is the client's."""
        if not self.name:
            return spec
        continuation, predecessor = spec.continuation, spec.predecessor
        if continuation is not None:
            continuation = msgspec.structs.replace(continuation, parent_rid=self.qualified(continuation.parent_rid))
        if predecessor is not None:
            predecessor = msgspec.structs.replace(predecessor, rid=self.qualified(predecessor.rid))
        return msgspec.structs.replace(
            spec,
            rid=self.qualified(spec.rid),
            namespace=self.kv_namespace(spec.namespace),
            continuation=continuation,
            predecessor=predecessor,
            client=self.name,
            job_id=None if spec.job_id is None else self.qualified(spec.job_id),
            parent_job_id=None if spec.parent_job_id is None else self.qualified(spec.parent_job_id),
        )

    def stripped_text(self, text: str, spec: RequestSpec) -> str:
        """A message of the worker about one of this client's requests, with the names as the client gave them."""
        if not self.name:
            return text
        named = [spec.rid, spec.job_id, None if spec.continuation is None else spec.continuation.parent_rid]
        for name in sorted(filter(None, named), key=len, reverse=True):
            text = text.replace(repr(name), repr(self.stripped(name)))
        return text


SOLE_CLIENT = Client()
"""The client of an Engine, and of a server with one key for all clients."""


def split_name(qualified: str) -> tuple[str, str]:
    """(the client's name, the name that it gave), on a server with a key per client. The server's own requests
    belong to no client: "" and the name."""
    client, separator, name = qualified.partition(_SEPARATOR)
    return (client, name) if separator else ("", qualified)
