"""The HTTP process asks for walks and reports, and gets them, or hears why not."""

from __future__ import annotations

import asyncio

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime.messages import WatchReport, WatchRequests
from baton.scheduler.outcome import RequestRefused
from tests.doubles.on_a_loop import on_a_loop
from tests.doubles.watched_worker import WatchedWorker

CLOSING = RequestRefused("the server is shutting down", code="shutting_down")


async def begun(*coroutines) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    await asyncio.sleep(0)
    return tasks


@on_a_loop
async def test_all_waiting_calls_share_a_walk() -> None:
    worker = WatchedWorker()
    tasks = await begun(*(worker.client.walk_tree(with_heads=True) for _ in range(3)))
    worker.walked(5)
    first, *others = [await task for task in tasks]
    assert len(first.rows) == 5 and all(other is first for other in others)
    (task,) = await begun(worker.client.walk_tree(with_heads=True))
    worker.walked(7)
    assert len((await task).rows) == 7, "a later call gets a walk of its own"
    worker.walked(9)  # no call waits for it any more


@on_a_loop
async def test_a_cancelled_call_does_not_cancel_the_walk_of_others() -> None:
    worker = WatchedWorker()
    leaves, stays = await begun(worker.client.walk_tree(with_heads=False), worker.client.walk_tree(with_heads=False))
    leaves.cancel()
    await asyncio.sleep(0)
    worker.walked(2)
    assert len((await stays).rows) == 2


@on_a_loop
async def test_slow_walk_times_out_with_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.live_reports.report_client.WALK_S", 0.01)
    worker = WatchedWorker()
    with pytest.raises(RequestRefused, match="did not walk its whole cache") as refused:
        await worker.client.walk_tree(with_heads=False)
    assert status_of(refused.value) == 504
    (task,) = await begun(worker.client.walk_tree(with_heads=False))
    worker.walked(3)
    assert len((await task).rows) == 3, "it is the same walk"


@on_a_loop
async def test_shutdown_fails_walks_and_watches() -> None:
    worker = WatchedWorker()
    (task,) = await begun(worker.client.walk_tree(with_heads=False))
    closed = asyncio.create_task(worker.client.wait_closed())
    worker.availability.close(CLOSING)
    worker.client.fail_all(CLOSING)
    with pytest.raises(RequestRefused, match="shutting down"):
        await task
    await closed
    for ask in (worker.client.request_reports, worker.client.walk_tree(with_heads=False).__await__().__next__):
        with pytest.raises(RequestRefused, match="shutting down"):
            ask()
    worker.client.fail_all(CLOSING)


@on_a_loop
async def test_reported_waits_for_a_complete_report() -> None:
    worker = WatchedWorker()
    worker.client.request_reports()
    assert isinstance(worker.sent[0], WatchRequests) and worker.sent[0].seconds > 1
    (task,) = await begun(worker.client.wait_report())
    worker.client.take_message(WatchReport(t=7.0))
    await asyncio.sleep(0)
    assert not task.done(), "it is not whole"
    worker.client.take_message(WatchReport(t=8.0, is_last=True))
    await task
    assert 8.0 <= worker.client.t < 9.0
    worker.client.take_message(WatchReport(t=9.0, is_last=True))
    await worker.client.wait_report()  # it came while no task waited
