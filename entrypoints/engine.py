"""The server without its processes: tokenizer manager, worker and detokenizer as threads of this one, no HTTP.

    with Engine(model_path="examples/toy_model") as engine:
        print(engine.generate("The capital", {"temperature": 0, "max_new_tokens": 8})["text"])

Keywords are the server's flags in snake_case; `generate` takes the fields of ``POST /generate`` and returns what it
answers. The parts and their messages are the server's own, over in-process channels.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop

from ..runtime.channels import Endpoints, Sender
from ..runtime.checkpoint.model_files import resolve_model_folder
from ..runtime.config import WorkerConfig
from ..runtime.detokenizer import run_detokenizer
from ..runtime.metrics import ServerMetrics
from ..runtime.text.tokenizer import Tokenizer
from ..runtime.tokenizer_manager import TokenizerManager
from ..scheduler.refusal import RequestRefused
from ..scheduler.sampling_params import SamplingParams
from .fields.item_trie_source import build_item_trie
from .fields.reading import read_rid
from .loop_crossing import run_on
from .native.generate import GenerateCall, parse_generate, stream_events
from .server_args import ServerArgs, compose

logger = logging.getLogger(__name__)

T = TypeVar("T")
WorkerFunction = Callable[[WorkerConfig, Endpoints, threading.Event], None]

_END = object()
_LATE_S = 1.0
"""How long a shutdown waits for calls that came in the middle of it; they are refused at once."""

_SHUT_DOWN = "the engine has been shut down; make a new one"


class EngineError(RuntimeError):
    """The engine cannot start, or has stopped; the message says why."""


class Engine:
    """Generates in this process. Safe to use from several threads and loops at once.

    Raises UsageError for a wrong setting, ModelLoadError or TokenizerError for a model that cannot be served,
    ItemTrieError for an item trie that cannot be loaded. Calls raise RequestRefused where the server would answer with
    a 4xx or 5xx.
    """

    def __init__(self, *, worker: WorkerFunction | None = None, **settings: Any) -> None:
        """``settings``: flags in snake_case, ``model_path`` at least. worker: what runs as the worker; tests only."""
        self.args: ServerArgs = compose(settings)
        self.tokenizer = Tokenizer.load(resolve_model_folder(self.args.tokenizer_path))
        self._endpoints = Endpoints.for_threads()
        self._stop = threading.Event()
        self._shutting_down = threading.Lock()
        # Whoever queues work for the loop holds it: what was queued before the end is answered. Reentrant, because a
        # garbage collection in between may queue too.
        self._crossing = threading.RLock()
        self._ended = False
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._refusal: RequestRefused | None = None
        self._loop = uvloop.new_event_loop()
        self._manager = TokenizerManager(
            tokenizer=self.tokenizer, endpoints=self._endpoints, metrics=ServerMetrics(self.args.served_model_name)
        )
        run_worker = worker or _default_worker()
        self._threads = [self._start("loop", self._loop.run_forever)]
        self._run(self._receive())
        parts: dict[str, Callable[[], None]] = {
            "detokenizer": lambda: run_detokenizer(self.tokenizer, self._endpoints, self._stop),
            "worker": lambda: run_worker(self.args.worker_config, self._endpoints, self._stop),
        }
        self._threads += [self._start(name, self._guarded(name, run)) for name, run in parts.items()]
        atexit.register(self.shutdown)
        try:
            self._run(self._wait_ready())
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict | SamplingParams | Sequence[dict] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Continue a prompt, or a list of them. ``fields``: ``input_ids``, ``rid``, ``return_logprob``, …; and
        ``continuation_of``, with ``continuation_suffix`` or ``continuation_ids``, to go on from an earlier request.

        Returns a dict {text, output_ids, meta_info}; a list of them for a batch or n > 1; with ``stream`` an iterator
        of dicts with the output so far, which carry their ``index`` for a batch or n > 1.
        """
        call = self._parse(prompt, sampling_params, stream, fields)
        return self._iterate(self._stream(call)) if stream else self._run(self._answer(call))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict | SamplingParams | Sequence[dict] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio; with ``stream`` it returns an async iterator."""
        call = self._parse(prompt, sampling_params, stream, fields)
        if stream:
            return self._iterate_async(self._stream(call))
        return await self._there(self._answer(call))

    def abort(self, rid: str | None = None) -> list[str]:
        """End request ``rid`` (all of them: None); returns the rids that were open."""
        return self._run(self._abort(rid))

    def release(self, rid: str) -> bool:
        """Give up what finished request ``rid`` keeps leased (``retain_ttl``). False if it keeps nothing (any more)."""
        return self._run(self._manager.release(read_rid(rid, "rid")))

    async def async_release(self, rid: str) -> bool:
        """`release` for asyncio."""
        return await self._there(self._manager.release(read_rid(rid, "rid")))

    # -- item tries ------------------------------------------------------------------------------------------------

    def load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        """Make items known under a name, for ``sampling_params: {"item_trie": name}``; requests that run keep what the
        name stood for. items: int [items, longest], shorter ones padded with -1, or the path of a .npy file of it."""
        self._run(self._load_item_trie(name, items))

    async def async_load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        """`load_item_trie` for asyncio."""
        await self._there(self._load_item_trie(name, items))

    def delete_item_trie(self, name: str) -> bool:
        """Forget a name; requests that run keep the items. False if there is no such trie."""
        return self._run(self._manager.delete_item_trie(name))

    async def async_delete_item_trie(self, name: str) -> bool:
        """`delete_item_trie` for asyncio."""
        return await self._there(self._manager.delete_item_trie(name))

    def list_item_tries(self) -> list[dict]:
        """name, num_items, min_depth, max_depth and num_bytes of each."""
        return self._run(self._manager.list_item_tries())

    async def async_list_item_tries(self) -> list[dict]:
        """`list_item_tries` for asyncio."""
        return await self._there(self._manager.list_item_tries())

    # -- the rest of the API ---------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises RequestRefused while requests run."""
        self._run(self._manager.flush_cache())

    def get_server_info(self) -> dict:
        """What the worker says of itself now: sizes, limits, statistics."""
        return self._run(self._manager.info())

    def start_profile(self) -> None:
        """Record where the time of steps goes, until `stop_profile`. Raises RequestRefused if that is done already."""
        self._run(self._manager.start_profile())

    async def async_start_profile(self) -> None:
        """`start_profile` for asyncio."""
        await self._there(self._manager.start_profile())

    def stop_profile(self) -> dict:
        """Steps since `start_profile`: how many, how large, and the time of their phases on the host and the device, as
        ``POST /stop_profile`` answers. Raises RequestRefused if nothing was begun."""
        return self._run(self._manager.stop_profile())

    async def async_stop_profile(self) -> dict:
        """`stop_profile` for asyncio."""
        return await self._there(self._manager.stop_profile())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def shutdown(self) -> None:
        """Stop all threads; open calls fail. Safe to call twice."""
        atexit.unregister(self.shutdown)
        with self._shutting_down:
            if self._loop.is_closed():
                return
            self._stop_threads()
            for thread in self._threads[1:]:
                thread.join()
            error = RequestRefused("the engine has been shut down", status=503, code="shutting_down")
            self._run(self._wind_up(self._refusal or error))
            self._run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._threads[0].join()
            self._loop.close()

    # -- calls, from any thread, on the loop's ---------------------------------------------------------------------

    def _parse(self, prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]) -> GenerateCall:
        given = {"text": prompt, "sampling_params": sampling_params, "stream": stream}
        given = {name: value for name, value in given.items() if value is not None}
        if twice := given.keys() & fields.keys():
            raise RequestRefused(f"{twice.pop()} is given twice; give prompt or text, not both")
        return parse_generate({name: _plain(value) for name, value in (given | fields).items()})

    async def _answer(self, parsed: GenerateCall) -> Any:
        with await self._manager.open(parsed.prompts, stream=False) as call:
            outputs = await call.results()
        return outputs if parsed.is_list else outputs[0]

    async def _stream(self, parsed: GenerateCall) -> AsyncGenerator[dict, None]:
        incremental = self.args.server.incremental_streaming_output
        with await self._manager.open(parsed.prompts, stream=True) as call:
            async for output in stream_events(call, parsed, incremental=incremental):
                yield output

    def _iterate(self, outputs: AsyncGenerator[dict, None]) -> Iterator[dict]:
        output = None
        try:
            while (output := self._run(_next(outputs))) is not _END:
                yield output
        finally:
            if output is not _END:
                self._forget(outputs)

    async def _iterate_async(self, outputs: AsyncGenerator[dict, None]) -> AsyncIterator[dict]:
        output = None
        try:
            while (output := await self._there(_next(outputs))) is not _END:
                yield output
        finally:
            if output is not _END:
                self._forget(outputs)

    def _forget(self, outputs: AsyncGenerator[dict, None]) -> None:
        # Not waited for: this may run in a garbage collection, on any thread.
        with contextlib.suppress(EngineError):
            self._submit(outputs.aclose())

    async def _load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        await self._manager.load_item_trie(name, await build_item_trie(items))

    async def _abort(self, rid: str | None) -> list[str]:
        return self._manager.abort(None if rid is None else read_rid(rid, "rid"))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._crossing:
            if self._ended:
                work.close()
                raise EngineError(_SHUT_DOWN)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the engine's loop, from another."""
        return await run_on(self._call_soon, self._loop, work)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        with self._crossing:
            if self._ended:
                raise EngineError(_SHUT_DOWN)
            self._loop.call_soon_threadsafe(callback)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted: what it asked for is aborted
            raise

    # -- threads ---------------------------------------------------------------------------------------------------

    def _start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"baton-{name}", daemon=True)
        thread.start()
        return thread

    def _guarded(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """A thread that ends by itself ends the engine: whoever waits for it would wait for ever."""

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
                self._refusal = RequestRefused(message, status=503, code="engine_failed")
                self._refusal.__cause__ = error
                self._loop.call_soon_threadsafe(self._manager.fail_all, self._refusal)
                self._loop.call_soon_threadsafe(self._failed.set)
                self._stop_threads()

        return guarded

    def _stop_threads(self) -> None:
        self._stop.set()
        for address in (self._endpoints.to_worker, self._endpoints.to_detokenizer):
            sender = Sender(address)
            sender.wake()
            sender.close()

    async def _receive(self) -> None:
        self._receiving = asyncio.ensure_future(self._manager.run())

    async def _wait_ready(self) -> None:
        """Until the worker can serve; raises what kept a thread from it."""
        ready = asyncio.ensure_future(self._manager.wait_ready())
        failed = asyncio.ensure_future(self._failed.wait())
        timeout = self.args.server.ready_timeout
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
        """Take no more work, and see what came late to its end."""
        with self._crossing:
            self._ended = True
        await asyncio.sleep(0)  # what is queued begins
        late = asyncio.all_tasks() - {asyncio.current_task()}
        if late:
            await asyncio.wait(late, timeout=_LATE_S)

    async def _wind_up(self, error: RequestRefused) -> None:
        self._manager.fail_all(error)
        self._receiving.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=1.0)  # the failed calls hand their error to their callers
        self._manager.close()


async def _next(outputs: AsyncGenerator[dict, None]) -> Any:
    return await anext(outputs, _END)


def _plain(value: Any) -> Any:
    """A field as JSON would have brought it."""
    if isinstance(value, SamplingParams):
        return msgspec.to_builtins(value)
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if isinstance(value, list | tuple):
        return [item if isinstance(item, int | str) else _plain(item) for item in value]
    return value


def _default_worker() -> WorkerFunction:
    # Imported late: it brings torch, which whoever only wants the types of this module need not pay for.
    from ..runtime.worker import run_worker

    return run_worker
