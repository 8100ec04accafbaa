"""``/cache/tree``: the nodes of the radix tree, in pages of one snapshot."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from fastapi import Request
from starlette.responses import Response

from ....radix.snapshot import NO_ROW, Has
from ....runtime.live_reports.report_client import LiveReportClient
from ....runtime.live_reports.snapshot import Snapshot
from ....scheduler.outcome import RequestRefused
from ...description.json_schema import COUNT, MAX_INT, answered, enum, flag, list_of, nullable, number, string, whole
from ...description.openapi import Operation
from ...fields.reading import shown
from ..keys import caller
from ..route import GET, Route
from ..wire.answers import JSONAnswer
from ..wire.query import NAMESPACE_QUERY, read_namespace_query, whole_number
from .token_texts import TokenTexts

MAX_NODES = 1000
"""On a page."""

_NODE = answered(
    {
        "serial": COUNT,
        "parent": nullable(whole("The serial of the node above; null at the top.", 0)),
        "namespace": string("A digest; empty where a request named none."),
        "start": whole("Position of its first token.", 0),
        "tokens": COUNT,
        "subtree_tokens": whole("In it and below.", 0),
        "tiers": list_of(enum("device", "host"), "Where its KV is."),
        "locks": whole("Holders of this node, and children that are held.", 0),
        "leases": whole("Leases that end here, and children with leases.", 0),
        "is_loading": flag("A copy to the device is under way."),
        "is_storing": flag("A copy to the host is under way."),
        "is_retired": flag("It is no longer needed and is evicted first."),
        "has_state": flag("It carries a recurrent state, so that a model with such layers can continue there."),
        "idle_s": number("Since the last use of this node or one below it.", 0),
        "uses": whole("Requests that began with it.", 0),
    },
    title="Node",
    optional={"text": string("Of its first 16 tokens.")},
)
_TREE = Operation(
    summary="List the nodes of the radix tree",
    about="Of all namespaces, so it needs the admin key, if there is one. The first page takes a snapshot, which may "
    "take some seconds for a large tree; further pages come from that snapshot, as long as it is kept.",
    tag="Cache",
    query={
        "snapshot": string("The snapshot of the page before; without it, a new one is taken."),
        "after": whole("The ``next`` of the page before.", -1, default=-1),
        "limit": whole("Nodes on a page.", 1, MAX_NODES, default=100),
        "min_tokens": whole("Only nodes with at least this many tokens in and below them.", 1, default=1),
        "with_text": enum("true", "false", about="The text of first tokens; takes a server with an admin key."),
        **NAMESPACE_QUERY,
    },
    answer=answered(
        {
            "snapshot": string(),
            "nodes": list_of(_NODE, "A node before those below it."),
            "next": nullable(whole("The ``after`` of the next page; null on the last.", 0)),
            "total_nodes": COUNT,
            "total_tokens": COUNT,
            "took_s": number("From the first node that was looked at to the last.", 0),
            "is_complete": flag("False if the tree was too large for a snapshot, or was replaced meanwhile."),
        },
        title="Tree",
    ),
    refusals=(403, 410, 504),
)


class _Asked(NamedTuple):
    after: int
    limit: int
    min_tokens: int
    namespace: str | None
    with_text: bool


MAX_HELD = 2

UNREAD_S = 120.0
"""Seconds after which an unread snapshot is dropped."""


class HeldSnapshots:
    """Snapshots by id, least recently read first. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Snapshot, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def hold_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """Keep a snapshot; beyond `MAX_HELD` the least recently read one is dropped."""
        self._held[snapshot.id] = snapshot, now
        self._held.move_to_end(snapshot.id)
        self._drop_unread(now)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def find_snapshot(self, id: str, now: float) -> Snapshot | None:
        """The snapshot, or None if it is unknown or was dropped."""
        self._drop_unread(now)
        if id not in self._held:
            return None
        snapshot, _ = self._held[id]
        self.hold_snapshot(snapshot, now)
        return snapshot

    def _drop_unread(self, now: float) -> None:
        for id in [id for id, (_, read) in self._held.items() if now - read > UNREAD_S]:
            del self._held[id]


class TreeRoutes:
    def __init__(self, live_reports: LiveReportClient, texts: TokenTexts | None) -> None:
        """texts: of tokens; None where no admin key guards them."""
        self._live_reports = live_reports
        self._texts = texts
        self._held = HeldSnapshots()
        self.routes = [Route("/cache/tree", self.tree, GET, "admin", operation=_TREE)]

    async def tree(self, request: Request) -> Response:
        namespace, given = read_namespace_query(request, ("snapshot", "after", "limit", "min_tokens", "with_text"))
        asked = _Asked(
            whole_number(given, "after", -1, -1, MAX_INT),
            whole_number(given, "limit", 100, 1, MAX_NODES),
            whole_number(given, "min_tokens", 1, 1, MAX_INT),
            caller(request).kv_namespace(namespace) if {"cache_salt", "extra_key"} & given.keys() else None,
            self._with_text(given.get("with_text", "false")),
        )
        if (id := given.get("snapshot")) is None:
            snapshot = await self._live_reports.walk_tree(with_heads=self._texts is not None)
        elif (snapshot := self._held.find_snapshot(id, time.monotonic())) is None:
            raise RequestRefused(
                f"snapshot {shown(id)} is no longer kept, or never existed; leave out snapshot and after to start "
                "with a new one",
                code="snapshot_gone",
                param="snapshot",
            )
        page = await asyncio.to_thread(self._page, snapshot, asked)
        if page["next"] is not None:
            self._held.hold_snapshot(snapshot, time.monotonic())
        return JSONAnswer(page)

    def _with_text(self, given: str) -> bool:
        if given not in ("true", "false"):
            raise RequestRefused(f"with_text is {shown(given)}; it takes true or false", param="with_text")
        if given == "true" and self._texts is None:
            raise RequestRefused(
                "with_text shows users' text, and no admin key protects this server; set --admin-api-key, or leave "
                "with_text out",
                code="admin_key_required",
                param="with_text",
            )
        return given == "true"

    def _page(self, snapshot: Snapshot, asked: _Asked) -> dict[str, Any]:
        """Runs in a thread."""
        wanted = snapshot.subtree_tokens >= asked.min_tokens
        if asked.namespace is not None:
            numbers = [at for at, name in enumerate(snapshot.names) if name == asked.namespace]
            wanted &= np.isin(snapshot.rows["namespace"], numbers)
        wanted[: asked.after + 1] = False
        rows = np.flatnonzero(wanted)
        shown_rows = rows[: asked.limit].tolist()
        return {
            "snapshot": snapshot.id,
            "nodes": [self._node(snapshot, row, asked.with_text) for row in shown_rows],
            "next": shown_rows[-1] if len(rows) > asked.limit else None,
            "total_nodes": len(snapshot.rows),
            "total_tokens": snapshot.num_tokens,
            "took_s": snapshot.end.ended - snapshot.end.began,
            "is_complete": snapshot.end.complete,
        }

    def _node(self, snapshot: Snapshot, row: int, with_text: bool) -> dict[str, Any]:
        node = snapshot.rows[row]
        has, parent = Has(int(node["has"])), int(node["parent"])
        told = {
            "serial": int(node["serial"]),
            "parent": None if parent == NO_ROW else int(snapshot.rows["serial"][parent]),
            "namespace": snapshot.namespace(int(node["namespace"])),
            "start": int(node["start"]),
            "tokens": int(node["tokens"]),
            "subtree_tokens": int(snapshot.subtree_tokens[row]),
            "tiers": [name for bit, name in ((Has.DEVICE, "device"), (Has.HOST, "host")) if bit in has],
            "locks": int(node["locks"]),
            "leases": int(node["leases"]),
            "is_loading": Has.LOADING in has,
            "is_storing": Has.STORING in has,
            "is_retired": Has.RETIRED in has,
            "has_state": Has.STATE in has,
            "idle_s": float(snapshot.idle[row]),
            "uses": int(snapshot.uses[row]),
        }
        if with_text and self._texts is not None:
            told["text"] = self._texts(snapshot.head(row))
        return told
