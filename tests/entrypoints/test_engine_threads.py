from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from baton.entrypoints.engine_threads import run_on


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs in a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), made).result(60)  # what was cancelled ends
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_results_and_errors_cross_event_loops(loop: asyncio.AbstractEventLoop) -> None:
    async def where() -> threading.Thread:
        await asyncio.sleep(0)
        return threading.current_thread()

    async def fail() -> None:
        raise KeyError("lost")

    async def give_up() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        assert await run_on(loop.call_soon_threadsafe, loop, where()) is not threading.current_thread()
        assert (
            len(set(await asyncio.gather(*(run_on(loop.call_soon_threadsafe, loop, where()) for _ in range(50))))) == 1
        )
        with pytest.raises(KeyError, match="lost"):
            await run_on(loop.call_soon_threadsafe, loop, fail())
        with pytest.raises(asyncio.CancelledError):
            await run_on(loop.call_soon_threadsafe, loop, give_up())

    asyncio.run(main())


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "when it runs"])
def test_cancelling_the_caller_cancels_the_work(loop: asyncio.AbstractEventLoop, wait: bool) -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.create_task(run_on(loop.call_soon_threadsafe, loop, work()))
        await asyncio.sleep(0)
        if wait:
            await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not wait or ended.wait(60)


def test_error_after_cancellation_is_not_logged(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("while it was cancelled") from None

    async def main() -> None:
        task = asyncio.create_task(run_on(loop.call_soon_threadsafe, loop, stubborn()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.02)

    asyncio.run(main())
    assert "never retrieved" not in caplog.text


def test_running_on_a_closed_loop_raises() -> None:
    closed = asyncio.new_event_loop()
    closed.close()

    async def work() -> None: ...

    async def main() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await run_on(closed.call_soon_threadsafe, closed, work())

    asyncio.run(main())
