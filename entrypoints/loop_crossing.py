"""Await, on one event loop, a coroutine that runs on another loop in another thread.

asyncio's own way, `wrap_future(run_coroutine_threadsafe(…))`, puts a lock-protected future in between and costs three
times as much. That matters because a streamed call crosses once per token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_on(
    call_soon: Callable[[Callable[[], object]], object], loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]
) -> T:
    """Run ``work`` on ``loop`` and return or raise its result. Cancelling this cancels ``work`` there.

    call_soon: queues a callback for the loop, in order, from any thread. A RuntimeError from it is passed on."""
    here = asyncio.get_running_loop()
    answer: asyncio.Future[T] = here.create_future()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(hand_over)

    def hand_over(task: asyncio.Task[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed in the meantime
            here.call_soon_threadsafe(take, task)

    def take(task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if answer.done():
            return  # the caller was cancelled
        if task.cancelled():
            answer.cancel()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def cancel() -> None:  # runs after `begin`: callbacks keep their order
        tasks[0].cancel()

    try:
        call_soon(begin)
    except RuntimeError:
        work.close()
        raise
    try:
        return await answer
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):
            call_soon(cancel)
        raise
