"""The event stream of all open pages: each event is made once for all of them, and only while at least one reads.

    worker ──reports──▶ Overview ──▶ one ``update``  ─┐
           ──rows─────▶ Snapshot ──▶ one ``tree``    ─┴─▶ every reader takes the newest when it has read the last

A reader holds version numbers, no queue: after a delay it gets the newest event, with all lives changed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec

from ....runtime.live_reports.report_client import RENEW_S, LiveReportClient
from ....runtime.live_reports.snapshot import Snapshot
from ....scheduler.outcome import RequestRefused
from .icicle import icicle
from .token_texts import TokenTexts

logger = logging.getLogger(__name__)

MAX_READERS = 64

PING_S = 15.0
"""Seconds of silence before a comment that keeps the stream alive."""

TREE_S = 2.0
"""Least seconds from one snapshot to the next; `STILL_S` while the tree seems unchanged."""

STILL_S = 10.0

TREE_SHARE = 0.01
"""Most of a core that making pictures takes in this process."""


class Broadcaster:
    """One per server. hello: makes the first event of a stream."""

    def __init__(
        self, live_reports: LiveReportClient, hello: Callable[[], dict[str, Any]], texts: TokenTexts | None
    ) -> None:
        """texts: None if clients may not read texts."""
        self._live_reports = live_reports
        self._hello = hello
        self._texts = texts
        self._readers: set[_Reader] = set()
        self._tasks: list[asyncio.Task] = []
        self._tree = b""
        self._tree_number = 0
        self._first_version = 0
        """Version of the overview when reports were last started: a newer one is up to date."""
        self._updates: dict[int, bytes] = {}
        """The newest update, by the version that a reader has."""
        self._updates_of = 0

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def check_room(self) -> None:
        """Raises RequestRefused if `MAX_READERS` streams are open."""
        if len(self._readers) >= MAX_READERS:
            raise RequestRefused(
                f"{MAX_READERS} streams of the dashboard are open, which is the limit; close some",
                code="too_many_streams",
            )

    async def stream(self) -> AsyncGenerator[bytes]:
        """Events for one reader, until the server ends. Raises RequestRefused before the first."""
        self.check_room()
        self._live_reports.request_reports()
        reader = self._join()
        try:
            yield event("hello", msgspec.json.encode(self._hello()))
            while not reader.is_closed:
                if (news := self._news(reader)) is not None:
                    yield news
                    continue
                try:
                    await asyncio.wait_for(reader.woken.wait(), PING_S)
                except TimeoutError:
                    yield b": ping\n\n"
        finally:
            self._leave(reader)

    def _news(self, reader: _Reader) -> bytes | None:
        """The next event that a reader lacks; None if it has all."""
        reader.woken.clear()
        version = self._live_reports.overview.version
        if reader.version < version and version > self._first_version:
            since, reader.version = reader.version, version
            return self._update(since)
        if reader.tree < self._tree_number:
            reader.tree = self._tree_number
            return self._tree
        return None

    def _update(self, since: int) -> bytes:
        """The newest update, with the lives that changed since version ``since``."""
        overview = self._live_reports.overview
        if self._updates_of != overview.version:
            self._updates, self._updates_of = {}, overview.version
        if since not in self._updates:
            told = {
                "t": overview.t,
                "stats": overview.load,
                **{name: getattr(overview, name) for name in ("running", "waiting", "leases", "num_leases")},
                **{name: getattr(overview, name) for name in ("jobs", "num_jobs")},
                "lives": overview.lives_since(since),
            }
            self._updates[since] = event("update", msgspec.json.encode(told))
        return self._updates[since]

    # -- while pages read --------------------------------------------------------------------------------------

    def _join(self) -> _Reader:
        reader = _Reader(tree=self._tree_number - bool(self._tree))
        self._readers.add(reader)
        if not self._tasks:
            self._first_version = self._live_reports.overview.version
            work = (self._renew(), self._wake_for_updates(), self._make_trees(), self._end_with_server())
            self._tasks = [asyncio.create_task(self._run(each)) for each in work]
        return reader

    def _leave(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._tree, self._updates = b"", {}

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one of the tasks. A fault ends all streams; pages then reconnect."""
        try:
            await work
        except RequestRefused as error:
            logger.debug("closing the dashboard's streams: %s", error.message)
        except Exception:
            logger.exception("closing the dashboard's streams after an unexpected error")
        for reader in self._readers:
            reader.is_closed = True
            reader.woken.set()
        self._stop()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.woken.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._live_reports.request_reports()

    async def _wake_for_updates(self) -> None:
        while True:
            await self._live_reports.wait_report()
            self._wake()

    async def _end_with_server(self) -> None:
        await self._live_reports.wait_closed()

    async def _make_trees(self) -> None:
        while True:
            before = self._tree_state()
            try:
                snapshot = await self._live_reports.walk_tree(with_heads=self._texts is not None)
            except RequestRefused as error:
                if error.code != "timeout":
                    raise
                continue  # a very large tree or a very slow machine: the walk is still under way
            self._tree, busy = await asyncio.to_thread(self._picture, snapshot)
            self._tree_number += 1
            self._wake()
            waited = max(TREE_S, busy / TREE_SHARE)
            await asyncio.sleep(waited)
            while waited < STILL_S and self._tree_state() == before:
                await asyncio.sleep(TREE_S)
                waited += TREE_S

    def _picture(self, snapshot: Snapshot) -> tuple[bytes, float]:
        """(the event, its CPU seconds). Runs in a thread, as it may take tens of milliseconds."""
        began = time.thread_time()
        told = {
            "t": snapshot.end.ended,
            "took": snapshot.end.ended - snapshot.end.began,
            "nodes": len(snapshot.rows),
            "tokens": snapshot.num_tokens,
            "complete": snapshot.end.complete,
            "spans": icicle(snapshot, self._texts),
        }
        return event("tree", msgspec.json.encode(told)), time.thread_time() - began

    def _tree_state(self) -> object:
        """A value that differs if the tree may have changed."""
        load = self._live_reports.overview.load
        if load is None:
            return None
        return load.queries, load.evicted, load.evictable, load.protected, load.leased, load.host_used, load.total


class _Reader:
    """State of one reader. tree: number of the last tree sent."""

    def __init__(self, tree: int) -> None:
        self.version = -1
        """Version of the overview in the last update sent."""
        self.tree = tree
        self.woken = asyncio.Event()
        self.is_closed = False


def event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
