"""The threads of an `Engine`: the manager's event loop, the detokenizer and the worker.

Any thread and any event loop may put work on the manager's loop (`run`, `await_on_loop`, `submit`). If a thread ends by
itself, all open and later calls fail. A process that was forked has none of the threads: all calls raise there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from ..runtime.channels import Endpoints
from ..runtime.config import WorkerConfig
from ..runtime.detokenizer import run_detokenizer
from ..runtime.metrics import ServerMetrics
from ..runtime.recording.recorder import open_recorder
from ..runtime.stop_signal import StopSignal
from ..runtime.text.tokenizer import Tokenizer
from ..runtime.tokenizer_manager import TokenizerManager
from ..scheduler.outcome import RequestRefused
from .chat.answer_parsers import AUTO, NONE
from .server_config import ChatConfig, ServerArgs
from .step_calls.call_reader import CallReader

logger = logging.getLogger(__name__)

T = TypeVar("T")
WorkerFunction = Callable[[WorkerConfig, Endpoints, StopSignal], None]

_LATE_S = 1.0
"""Seconds a shutdown waits for calls that arrived during it; they are refused at once."""

_SHUT_DOWN = "the engine has been shut down; make a new one"

_FORKED = (
    "this engine belongs to process {} and has no threads in process {}, which was forked from it; make a new Engine "
    "in each process, and start processes that use one by the method 'spawn'"
)


class EngineError(RuntimeError):
    """The engine cannot start, has stopped, or is another process's; the message says why."""


class EngineThreads:
    """Started by `start`, ended by `shutdown` or with the process."""

    def __init__(self, args: ServerArgs, tokenizer: Tokenizer, run_worker: WorkerFunction) -> None:
        """Raises RecordingError."""
        metrics = ServerMetrics(args.served_model_name)
        recorder = open_recorder(args.recording, metrics)
        self._ready_timeout = args.server.ready_timeout
        self._endpoints = Endpoints.for_threads()
        self._stop = StopSignal()
        self._pid = os.getpid()
        self._shutting_down = threading.Lock()
        # Held while work is queued for the loop, so that whatever was queued before the end is answered. Reentrant,
        # because a garbage collection in between may queue work too.
        self._crossing = threading.RLock()
        self._ended = False
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._refusal: RequestRefused | None = None
        self._loop = uvloop.new_event_loop()
        read_calls = _call_reader(args.chat).read_calls
        self.manager = TokenizerManager(
            tokenizer=tokenizer,
            endpoints=self._endpoints,
            metrics=metrics,
            read_calls=read_calls,
            recorder=recorder,
        )
        self._threads: list[threading.Thread] = []
        self._parts: dict[str, Callable[[], None]] = {
            "detokenizer": lambda: run_detokenizer(tokenizer, self._endpoints, self._stop),
            "worker": lambda: run_worker(args.worker_config, self._endpoints, self._stop),
        }

    def start(self) -> None:
        """Return once the worker can serve. Raises the error of a thread that failed, or EngineError after too long."""
        self._threads = [_start("loop", self._loop.run_forever)]
        self.run(self._receive())
        self._threads += [_start(name, self._guarded(name, run)) for name, run in self._parts.items()]
        atexit.register(self.shutdown)
        try:
            self.run(self._wait_ready())
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop all threads; open calls fail. Safe to call twice. Does nothing in a forked process."""
        atexit.unregister(self.shutdown)
        if os.getpid() != self._pid:
            return  # the lock below may have been held when the process was forked
        with self._shutting_down:
            if self._loop.is_closed():
                return
            self._stop.set()
            for thread in self._threads[1:]:
                thread.join()
            error = RequestRefused("the engine has been shut down", code="shutting_down")
            self.run(self._wind_up(self._refusal or error))
            self.run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._threads[0].join()
            self._loop.close()

    def end_unused(self) -> None:
        """Shut down without waiting: the last reference to an engine may go in any thread, its own included."""
        if os.getpid() == self._pid and not self._loop.is_closed():
            threading.Thread(target=self.shutdown, name="baton-shutdown").start()

    # -- work for the loop, from any thread ------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and return or raise its result. Blocks."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted: what it asked for is aborted
            raise

    async def await_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """`run` for asyncio: await, from another loop, ``work`` that runs on the engine's."""
        return await run_on(self._call_soon, self._loop, work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`run` without waiting. Raises EngineError after the shutdown, and in a forked process."""
        try:
            self._check_process()
            with self._crossing:
                self._check_running()
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineError:
            work.close()
            raise

    def _call_soon(self, callback: Callable[[], object]) -> None:
        self._check_process()
        with self._crossing:
            self._check_running()
            self._loop.call_soon_threadsafe(callback)

    def _check_process(self) -> None:
        """To be called before any lock is taken: a thread that a forked process lacks may have held it."""
        if (pid := os.getpid()) != self._pid:
            raise EngineError(_FORKED.format(self._pid, pid))

    def _check_running(self) -> None:
        if self._ended:
            raise EngineError(_SHUT_DOWN)

    # -- the life of the threads -----------------------------------------------------------------------------------

    def _guarded(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """Wrap a thread's function: if it ends by itself, it ends the engine; else callers would wait for ever."""

        def guarded() -> None:
            try:
                run()
                if not self._stop.is_set():
                    raise EngineError("it ended by itself")
            except BaseException as error:
                if self._stop.is_set():
                    logger.debug("the %s failed while stopping", name, exc_info=True)
                    return
                self._failure = error
                message = f"the engine's {name} failed: {type(error).__name__}: {error}"
                self._refusal = RequestRefused(message, code="engine_failed")
                self._refusal.__cause__ = error
                self._loop.call_soon_threadsafe(self.manager.fail_all, self._refusal)
                self._loop.call_soon_threadsafe(self._failed.set)
                self._stop.set()

        return guarded

    async def _receive(self) -> None:
        self._receiving = asyncio.ensure_future(self.manager.run())

    async def _wait_ready(self) -> None:
        """Wait until the worker can serve. Raises the error of a thread that failed."""
        ready = asyncio.ensure_future(self.manager.wait_ready())
        failed = asyncio.ensure_future(self._failed.wait())
        timeout = self._ready_timeout
        try:
            done, _ = await asyncio.wait((ready, failed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            failed.cancel()
        if self._failure is not None:
            raise self._failure
        if not done:
            raise EngineError(f"the worker was not ready within {timeout:g} s; see ready_timeout")

    async def _end(self) -> None:
        """Take no more work, and wait for calls that came late."""
        with self._crossing:
            self._ended = True
        await asyncio.sleep(0)  # let queued work start
        late = asyncio.all_tasks() - {asyncio.current_task()}
        if late:
            await asyncio.wait(late, timeout=_LATE_S)

    async def _wind_up(self, error: RequestRefused) -> None:
        self.manager.fail_all(error)
        self._receiving.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=1.0)  # failed calls pass their errors on to their callers
        self.manager.close()


def _start(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"baton-{name}", daemon=True)
    thread.start()
    return thread


def _call_reader(config: ChatConfig) -> CallReader:
    """For the steps of jobs. No chat is rendered here, so no template says which form calls have: their text does."""
    names = (config.tool_call_parser, config.reasoning_parser)
    tools, reasoning = (None if name in (AUTO, NONE) else name for name in names)
    return CallReader(tools, reasoning)


async def run_on(
    call_soon: Callable[[Callable[[], object]], object], loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]
) -> T:
    """Run ``work`` on ``loop``, which another thread runs, and return or raise its result. Cancelling this cancels
    ``work`` there.

    asyncio's own way, `wrap_future(run_coroutine_threadsafe(…))`, puts a lock-protected future in between and costs
    three times as much, which matters because a streamed call crosses once per token.

    call_soon: queues a callback for the loop, in order, from any thread. A RuntimeError from it is passed on.
    """
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
