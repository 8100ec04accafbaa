"""Everything that open pages get: made once, however many they are, and only while somebody reads.

    worker ──reports──▶ Overview ──▶ one ``update``  ─┐
           ──rows─────▶ Snapshot ──▶ one ``tree``    ─┴─▶ every reader takes the newest when it has read the last

A reader holds numbers, no queue: of what it has missed it gets the newest, and all lives that have changed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec

from ...runtime.watching.snapshot import Snapshot
from ...runtime.watching.watch_client import RENEW_S, WatchClient
from ...scheduler.outcome import RequestRefused
from .icicle import icicle
from .texts import Texts

logger = logging.getLogger(__name__)

MAX_READERS = 64

PING_S = 15.0
"""Of silence; then a comment says that the stream lives."""

TREE_S = 2.0
"""At least, from one snapshot to the next; `STILL_S` while nothing in the tree seems to have changed."""

STILL_S = 10.0

TREE_SHARE = 0.01
"""Of a core, at most, that making pictures takes in this process."""


class Broadcaster:
    """One per server. hello: makes what a stream begins with."""

    def __init__(self, watch: WatchClient, hello: Callable[[], dict[str, Any]], texts: Texts | None) -> None:
        """texts: of tokens; None where nobody may read them."""
        self._watch = watch
        self._hello = hello
        self._texts = texts
        self._readers: set[_Reader] = set()
        self._tasks: list[asyncio.Task] = []
        self._tree = b""
        self._tree_number = 0
        self._first_version = 0
        """Of the overview, when the worker was last asked to report: it is old until then."""
        self._updates: dict[int, bytes] = {}
        """The newest update for readers that have an older version."""
        self._updates_of = 0

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def check_room(self) -> None:
        """Raises RequestRefused where there is no room for one more reader."""
        if len(self._readers) >= MAX_READERS:
            raise RequestRefused(
                f"{MAX_READERS} streams of the dashboard are open, and no more are served; close some",
                status=503,
                code="too_many_streams",
            )

    async def stream(self) -> AsyncGenerator[bytes]:
        """Events for one reader, until the server ends. Raises RequestRefused before the first."""
        self.check_room()
        self._watch.watch()
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
        """The next event that a reader has not got."""
        reader.woken.clear()
        version = self._watch.overview.version
        if reader.version < version and version > self._first_version:
            since, reader.version = reader.version, version
            return self._update(since)
        if reader.tree < self._tree_number:
            reader.tree = self._tree_number
            return self._tree
        return None

    def _update(self, since: int) -> bytes:
        """The newest update, with the lives that have changed since a version."""
        overview = self._watch.overview
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

    # -- while somebody reads --------------------------------------------------------------------------------------

    def _join(self) -> _Reader:
        reader = _Reader(tree=self._tree_number - bool(self._tree))
        self._readers.add(reader)
        if not self._tasks:
            self._first_version = self._watch.overview.version
            work = (self._renew(), self._tell_updates(), self._tell_trees(), self._end_with_server())
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
        """A fault ends all streams: pages see that, and try again."""
        try:
            await work
        except RequestRefused as error:
            logger.debug("the dashboard's streams end: %s", error.message)
        except Exception:
            logger.exception("the dashboard's streams end")
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
            self._watch.watch()

    async def _tell_updates(self) -> None:
        while True:
            await self._watch.reported()
            self._wake()

    async def _end_with_server(self) -> None:
        await self._watch.wait_closed()

    async def _tell_trees(self) -> None:
        while True:
            before = self._tree_state()
            try:
                snapshot = await self._watch.walk(with_heads=self._texts is not None)
            except RequestRefused as error:
                if error.status != 504:
                    raise
                continue  # a very large tree, or a very slow machine: the walk goes on
            self._tree, busy = await asyncio.to_thread(self._picture, snapshot)
            self._tree_number += 1
            self._wake()
            waited = max(TREE_S, busy / TREE_SHARE)
            await asyncio.sleep(waited)
            while waited < STILL_S and self._tree_state() == before:
                await asyncio.sleep(TREE_S)
                waited += TREE_S

    def _picture(self, snapshot: Snapshot) -> tuple[bytes, float]:
        """(the event, the seconds of a core that it took). Runs in a thread, as it may take tens of milliseconds."""
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
        """Differs where the tree may have changed."""
        load = self._watch.overview.load
        if load is None:
            return None
        return load.queries, load.evicted, load.evictable, load.protected, load.leased, load.host_used, load.total


class _Reader:
    """What one reader has got. tree: number of the last tree."""

    def __init__(self, tree: int) -> None:
        self.version = -1
        """Of the overview, in the last update."""
        self.tree = tree
        self.woken = asyncio.Event()
        self.is_closed = False


def event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
