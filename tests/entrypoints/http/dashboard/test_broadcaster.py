"""One broadcaster for all pages: each event is made once, each page gets the newest, and without pages there is no
work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.entrypoints.http.dashboard import broadcaster as module
from baton.entrypoints.http.dashboard.broadcaster import MAX_READERS, Broadcaster
from baton.entrypoints.http_statuses import status_of
from baton.runtime.live_reports.report_client import RENEW_S
from baton.scheduler.outcome import RequestRefused
from tests.doubles.on_a_loop import on_a_loop
from tests.doubles.watched_worker import WatchedWorker, life

CLOSING = RequestRefused("the server is shutting down", code="shutting_down")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are hundredths."""
    for name in ("PING_S", "TREE_S", "STILL_S", "RENEW_S"):
        monkeypatch.setattr(module, name, getattr(module, name) / 100)


class Page:
    """One reader."""

    def __init__(self, broadcaster: Broadcaster) -> None:
        self.stream: AsyncGenerator[bytes] = broadcaster.stream()

    async def next(self) -> tuple[str, Any]:
        """Name and data of the next event; pings count."""
        data = await asyncio.wait_for(anext(self.stream), 20)
        if data.startswith(b":"):
            assert data == b": ping\n\n"
            return "ping", None
        name, body, *rest = data.decode().split("\n")
        assert rest == ["", ""] and name.startswith("event: ") and body.startswith("data: ")
        return name[7:], json.loads(body[6:])

    async def event(self, name: str) -> Any:
        """The data of the next event of this name."""
        while (got := await self.next())[0] != name:
            pass
        return got[1]

    async def leave(self) -> None:
        await self.stream.aclose()


def broadcaster_of(worker: WatchedWorker, texts: Any = None) -> Broadcaster:
    return Broadcaster(worker.client, lambda: {"instance": "i"}, texts)


async def opened(broadcaster: Broadcaster) -> Page:
    page = Page(broadcaster)
    assert await page.next() == ("hello", {"instance": "i"})
    return page


@on_a_loop
async def test_page_receives_updates_and_trees() -> None:
    worker = WatchedWorker()
    page = await opened(broadcaster_of(worker))
    worker.report(1.5, life("a", 3), queries=7)
    update = await page.event("update")
    assert update["t"] == 1.5 and set(update["stats"].values()) == {7} and set(update["stats"]) >= {"free", "hits"}
    told = {"rid": "a", "index": 0, "arrival": 0.0, "prompt": 5, "cached": 0, "output": 3}
    assert update["lives"] == [{**told, "phases": [["queued", 0.0, None, 5]]}]
    assert [update[name] for name in ("running", "waiting", "leases", "jobs")] == [[]] * 4
    assert update["num_leases"] == update["num_jobs"] == 0
    worker.walked(3)
    tree = await page.event("tree")
    assert (tree["nodes"], tree["tokens"], tree["complete"], tree["t"], tree["took"]) == (3, 3, True, 1000, 1)
    assert tree["spans"][0] == [10, -1, 0, 1, 1, 1, "device", "", 1000.0, 0, "", None]
    await page.leave()


@on_a_loop
async def test_idle_stream_sends_pings() -> None:
    page = await opened(broadcaster_of(WatchedWorker()))
    assert (await page.next())[0] == (await page.next())[0] == "ping"
    await page.leave()


@on_a_loop
async def test_worker_is_polled_only_while_pages_read() -> None:
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    assert worker.sent == []
    pages = [await opened(broadcaster) for _ in range(20)]
    for _ in range(5):
        await pages[0].event("ping")
    asked = worker.watches_asked
    assert asked >= 20 and worker.walks_asked == 1, "one walk for all, that is under way"
    for page in pages:
        await page.leave()
    assert broadcaster.num_readers == 0
    asked = len(worker.sent)
    await asyncio.sleep(5 * RENEW_S / 100)
    assert len(worker.sent) == asked, "nobody reads"
    page = await opened(broadcaster)
    await page.event("ping")
    assert len(worker.sent) > asked
    await page.leave()


@on_a_loop
async def test_slow_page_gets_latest_update_with_all_lives() -> None:
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    quick, slow = await opened(broadcaster), await opened(broadcaster)
    for number in range(5):
        worker.report(float(number), life(f"r{number}"), life("all", number))
        update = await quick.event("update")
        assert [each["rid"] for each in update["lives"]] == [f"r{number}", "all"] and update["t"] == number
    update = await slow.event("update")
    assert update["t"] == 4 and [each["rid"] for each in update["lives"]] == ["r0", "r1", "r2", "r3", "r4", "all"]
    assert update["lives"][-1]["output"] == 4
    late = await opened(broadcaster)
    assert len((await late.event("update"))["lives"]) == 6, "who comes late gets what is kept, at once"
    for page in (quick, slow, late):
        await page.leave()


@on_a_loop
async def test_pages_share_encoded_events() -> None:
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    pages = [await opened(broadcaster) for _ in range(20)]
    for number in range(3):
        worker.report(float(number), life(f"r{number}"))
        got = [await anext(page.stream) for page in pages]
        assert all(each is got[0] for each in got)
    worker.walked(4)
    got = [await anext(page.stream) for page in pages]
    assert got[0].startswith(b"event: tree") and all(each is got[0] for each in got)
    for page in pages:
        await page.leave()


@on_a_loop
async def test_unread_page_buffers_no_updates() -> None:
    """Whatever happens meanwhile, it holds two numbers."""
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    quick, slow = await opened(broadcaster), await opened(broadcaster)
    for number in range(300):
        worker.report(float(number), life(f"r{number}", end="stop"))
        await quick.event("update")
    assert len(broadcaster._updates) == 1
    assert len((await slow.event("update"))["lives"]) == 200
    await quick.leave()
    await slow.leave()


@on_a_loop
async def test_changed_trees_are_sent_sooner_than_unchanged_ones() -> None:
    worker = WatchedWorker()
    page = await opened(broadcaster_of(worker))
    worker.report(0.0, queries=1)
    for number in range(3):
        while worker.walks_asked == number:
            await asyncio.sleep(0.001)
        worker.walked(number + 1)
        assert (await page.event("tree"))["nodes"] == number + 1
        worker.report(float(number), queries=number + 2)
    while worker.walks_asked == 3:
        await asyncio.sleep(0.001)
    loop = asyncio.get_running_loop()
    worker.walked(9)
    began = loop.time()
    while worker.walks_asked == 4:
        await asyncio.sleep(0.001)
    assert loop.time() - began >= module.STILL_S - module.TREE_S, "nothing has changed since"
    await page.leave()


@on_a_loop
async def test_new_reader_does_not_get_a_stale_tree() -> None:
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    page = await opened(broadcaster)
    worker.report(1.0, life("old"))
    worker.walked(3)
    await page.event("tree")
    await page.leave()
    page = await opened(broadcaster)
    assert (await page.next())[0] == "ping", "neither that tree nor that update"
    worker.walked(4)
    assert (await page.event("tree"))["nodes"] == 4
    second = await opened(broadcaster)
    assert (await second.event("tree"))["nodes"] == 4, "who comes while others read gets theirs at once"
    worker.report(2.0)
    assert [each["rid"] for each in (await page.event("update"))["lives"]] == ["old"]
    await page.leave()
    await second.leave()


@on_a_loop
async def test_excess_streams_are_refused() -> None:
    broadcaster = broadcaster_of(WatchedWorker())
    pages = [await opened(broadcaster) for _ in range(MAX_READERS)]
    with pytest.raises(RequestRefused, match="close some") as refused:
        await Page(broadcaster).next()
    assert (status_of(refused.value), refused.value.code) == (503, "too_many_streams")
    await pages.pop().leave()
    pages.append(await opened(broadcaster))
    for page in pages:
        await page.leave()


@on_a_loop
async def test_streams_end_at_shutdown() -> None:
    worker = WatchedWorker()
    broadcaster = broadcaster_of(worker)
    pages = [await opened(broadcaster) for _ in range(3)]
    worker.availability.close(CLOSING)
    worker.client.fail_all(CLOSING)
    for page in pages:
        with pytest.raises(StopAsyncIteration):
            await page.event("never")
    with pytest.raises(RequestRefused, match="shutting down"):
        await Page(broadcaster).next()
    assert broadcaster.num_readers == 0


@on_a_loop
async def test_broadcaster_fault_ends_streams_and_next_reader_starts_fresh(caplog: pytest.LogCaptureFixture) -> None:
    worker, faults = WatchedWorker(), [True]

    def text(ids: Any) -> str:
        if faults:
            raise ValueError("no text")
        return "text"

    broadcaster = broadcaster_of(worker, text)
    page = await opened(broadcaster)
    worker.walked(3)
    with pytest.raises(StopAsyncIteration):
        await page.event("never")
    assert "no text" in caplog.text
    faults.clear()
    page = await opened(broadcaster)
    worker.walked(3)
    assert (await page.event("tree"))["spans"][0][-1] == "text"
    await page.leave()


@on_a_loop
async def test_slow_tree_walk_is_awaited() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.runtime.live_reports.report_client.WALK_S", 0.01)
        worker = WatchedWorker()
        page = await opened(broadcaster_of(worker))
        while worker.walks_asked < 5:
            await asyncio.sleep(0.001)
        worker.walked(3)
        assert (await page.event("tree"))["nodes"] == 3
        await page.leave()
