"""The server inside one process: tokenizer manager, worker and detokenizer run as threads, without HTTP.

    with Engine(model_path="examples/toy_model") as engine:
        print(engine.generate("The capital", {"temperature": 0, "max_new_tokens": 8})["text"])

Keywords are the server's flags in snake_case. `generate` takes the fields of ``POST /generate`` and returns the same
answer. The parts and their messages are the server's own; they talk over in-process channels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..runtime.checkpoint.model_files import resolve_model_folder
from ..runtime.clients import SOLE_CLIENT
from ..runtime.text.tokenizer import Tokenizer
from ..scheduler.outcome import RequestRefused
from ..scheduler.sampling_params import SamplingParams
from .chat.setup import ChatSetup
from .engine_threads import EngineError, EngineThreads, WorkerFunction
from .fields.conversation_names import read_names
from .fields.ignored import IgnoredLog
from .fields.item_trie_source import build_item_trie
from .fields.namespaces import namespace_of
from .fields.prompts import PromptBatch
from .fields.reading import read_rid, typed
from .native.generate import parse_generate
from .native.generate_response import stream_events, whole_response
from .pooling.embeddings import parse_encode
from .pooling.prompts import PooledCall, PoolingTools, chat_renderer, run_call
from .pooling.scores import parse_classify, parse_rerank, parse_score
from .server_args import compose, with_seed
from .server_config import ServerArgs

logger = logging.getLogger(__name__)

_END = object()


class Engine:
    """Generates in this process. Safe to use from several threads and loops at once. Its threads end with `shutdown`,
    or soon after the last reference to it is gone. In a process that was forked from this one calls raise EngineError.

    Raises UsageError for a wrong setting, ModelLoadError or TokenizerError for a model that cannot be served,
    ItemTrieError for an item trie that cannot be loaded, RecordingError for a log that cannot be written. Calls raise
    RequestRefused where the server would answer with a 4xx or 5xx.
    """

    def __init__(self, *, worker: WorkerFunction | None = None, **settings: Any) -> None:
        """``settings``: flags in snake_case, at least ``model_path``. worker: replaces the worker; for tests only."""
        self.args: ServerArgs = with_seed(compose(settings))
        for note in self.args.notes:
            logger.info("flag of another server: %s", note)
        self.tokenizer = Tokenizer.load(resolve_model_folder(self.args.tokenizer_path))
        self._threads = EngineThreads(self.args, self.tokenizer, worker or _default_worker())
        self._manager = self._threads.manager
        self._ignored = IgnoredLog(self.args.server.unknown_fields)
        self._pooling_tools: PoolingTools | None = None
        self._threads.start()
        # Not at the exit of the process, when no thread can be started any more: EngineThreads sees to that.
        weakref.finalize(self, self._threads.end_unused).atexit = False

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
        """Continue a prompt, or each of a list. ``fields``: ``input_ids``, ``rid``, ``return_logprob``, …; to continue
        an earlier request, ``continuation_of`` with ``continuation_suffix`` or ``continuation_ids``.

        Returns a dict {text, output_ids, meta_info}, or a list of them for a batch or n > 1. With ``stream`` it returns
        an iterator of dicts that hold the output so far; for a batch or n > 1 each also carries its ``index``.
        """
        batch = self._parse(prompt, sampling_params, stream, fields)
        return self._iterate(self._stream(batch)) if stream else self._threads.run(self._answer(batch))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict | SamplingParams | Sequence[dict] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio; with ``stream`` it returns an async iterator."""
        batch = self._parse(prompt, sampling_params, stream, fields)
        if stream:
            return self._iterate_async(self._stream(batch))
        return await self._threads.await_on_loop(self._answer(batch))

    # -- vectors and scores ----------------------------------------------------------------------------------------

    def embed(self, prompt: str | Sequence[str] | None = None, **fields: Any) -> Any:
        """Embed a text, or each of a list. ``fields``: those of ``POST /encode``, such as ``input_ids``,
        ``dimensions``, ``normalize``. Returns its answer: a dict {embedding, meta_info}, or a list of them."""
        return self._threads.run(self._pooled(self._embedding_call(prompt, fields)))

    async def async_embed(self, prompt: str | Sequence[str] | None = None, **fields: Any) -> Any:
        """`embed` for asyncio."""
        return await self._threads.await_on_loop(self._pooled(self._embedding_call(prompt, fields)))

    def score(self, query: Any = None, items: Any = None, label_token_ids: Any = None, **fields: Any) -> dict:
        """Score labels as the token after query and item, or, with ``text_1`` and ``text_2``, pairs of texts.
        ``fields``: those of ``POST /v1/score``. Returns its answer."""
        return self._threads.run(self._pooled(_score_call(query, items, label_token_ids, fields)))

    async def async_score(
        self, query: Any = None, items: Any = None, label_token_ids: Any = None, **fields: Any
    ) -> dict:
        """`score` for asyncio."""
        return await self._threads.await_on_loop(self._pooled(_score_call(query, items, label_token_ids, fields)))

    def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> dict:
        """Rank documents for a query. ``fields``: those of ``POST /v1/rerank``. Returns its answer."""
        return self._threads.run(self._pooled(parse_rerank(_given(fields, query=query, documents=documents))))

    async def async_rerank(self, query: str, documents: Sequence[str], **fields: Any) -> dict:
        """`rerank` for asyncio."""
        call = parse_rerank(_given(fields, query=query, documents=documents))
        return await self._threads.await_on_loop(self._pooled(call))

    def classify(self, input: Any, **fields: Any) -> dict:
        """Classify a text, token ids, or a list of either. ``fields``: those of ``POST /classify``. Returns its
        answer."""
        return self._threads.run(self._pooled(parse_classify(_given(fields, input=input))))

    async def async_classify(self, input: Any, **fields: Any) -> dict:
        """`classify` for asyncio."""
        return await self._threads.await_on_loop(self._pooled(parse_classify(_given(fields, input=input))))

    def abort(self, rid: str | None = None) -> list[str]:
        """End request ``rid``, or all requests if None; returns the rids that were open."""
        return self._threads.run(self._abort(rid))

    def release(self, rid: str) -> bool:
        """Give up the leases (``retain_ttl``) of finished request ``rid``. False if it has none, or none any more."""
        return self._threads.run(self._manager.control.release_leases(SOLE_CLIENT, read_rid(rid, "rid")))

    async def async_release(self, rid: str) -> bool:
        """`release` for asyncio."""
        return await self._threads.await_on_loop(
            self._manager.control.release_leases(SOLE_CLIENT, read_rid(rid, "rid"))
        )

    # -- jobs ------------------------------------------------------------------------------------------------------

    def jobs(self, cache_salt: str = "", extra_key: str = "") -> list[dict]:
        """The jobs of a namespace, as GET /jobs; the one that was here last comes last."""
        return self._threads.run(self._manager.control.jobs(SOLE_CLIENT, namespace_of(cache_salt, extra_key)))

    def end_job(self, job_id: str, cache_salt: str = "", extra_key: str = "") -> dict | None:
        """Abort a job's open requests and give up what is kept for it, as DELETE /jobs/ID. None if it is not known."""
        job_id = typed(job_id, str, "job_id")
        return self._threads.run(
            self._manager.control.end_job(SOLE_CLIENT, namespace_of(cache_salt, extra_key), job_id)
        )

    # -- item tries ------------------------------------------------------------------------------------------------

    def load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        """Store items under a name, for ``sampling_params: {"item_trie": name}``. Running requests keep the trie that
        had the name before. items: int [items, longest], shorter ones padded with -1, or the path of such a .npy."""
        self._threads.run(self._load_item_trie(name, items))

    async def async_load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        """`load_item_trie` for asyncio."""
        await self._threads.await_on_loop(self._load_item_trie(name, items))

    def delete_item_trie(self, name: str) -> bool:
        """Forget a name; running requests keep the items. False if there is no such trie."""
        return self._threads.run(self._manager.control.delete_item_trie(typed(name, str, "name")))

    async def async_delete_item_trie(self, name: str) -> bool:
        """`delete_item_trie` for asyncio."""
        return await self._threads.await_on_loop(self._manager.control.delete_item_trie(typed(name, str, "name")))

    def list_item_tries(self) -> list[dict]:
        """The name, num_items, min_depth, max_depth and num_bytes of each trie."""
        return self._threads.run(self._manager.control.list_item_tries())

    async def async_list_item_tries(self) -> list[dict]:
        """`list_item_tries` for asyncio."""
        return await self._threads.await_on_loop(self._manager.control.list_item_tries())

    # -- adapters --------------------------------------------------------------------------------------------------

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Load the LoRA adapter in the folder ``lora_path``, for ``generate(…, lora_path=lora_name)``."""
        self._threads.run(self._load_adapter(lora_name, lora_path))

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """`load_lora_adapter` for asyncio."""
        await self._threads.await_on_loop(self._load_adapter(lora_name, lora_path))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter; open requests keep it."""
        self._threads.run(self._manager.control.unload_adapter(typed(lora_name, str, "lora_name")))

    async def async_unload_lora_adapter(self, lora_name: str) -> None:
        """`unload_lora_adapter` for asyncio."""
        await self._threads.await_on_loop(self._manager.control.unload_adapter(typed(lora_name, str, "lora_name")))

    def list_lora_adapters(self) -> list[dict]:
        """The name, path, rank, num_modules and num_bytes of each adapter."""
        return [dict(adapter) for adapter in self._manager.control.adapters.described]

    # -- the rest of the API ---------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises RequestRefused while requests run."""
        self._threads.run(self._manager.control.flush_cache())

    def get_server_info(self) -> dict:
        """The worker's current report: sizes, limits, statistics."""
        return self._threads.run(self._manager.control.info())

    def get_cache_tiers(self) -> dict:
        """Contents and activity of each tier of the KV cache, as GET /cache/tiers."""
        return self._threads.run(self._manager.control.tiers())

    def get_cache_leases(self, after: int = -1, limit: int = 100) -> dict:
        """A page of the live leases, as GET /cache/leases. limit: 1 to 1000."""
        after, limit = typed(after, int, "after"), typed(limit, int, "limit")
        if not 1 <= limit <= 1000:
            raise RequestRefused(f"limit is {limit}; use 1 to 1000", param="limit")
        return self._threads.run(self._manager.control.leases(SOLE_CLIENT, after, limit))

    def get_cache_statistics(self) -> dict:
        """Hits and evictions of the prefix cache, as GET /cache/statistics."""
        return self._threads.run(self._manager.control.cache_statistics())

    def reset_cache_statistics(self) -> None:
        """Have `get_cache_statistics` count anew."""
        self._threads.run(self._manager.control.reset_cache_statistics())

    def start_profile(self) -> None:
        """Record where steps spend their time, until `stop_profile`. Raises RequestRefused if already recording."""
        self._threads.run(self._manager.control.start_profile())

    async def async_start_profile(self) -> None:
        """`start_profile` for asyncio."""
        await self._threads.await_on_loop(self._manager.control.start_profile())

    def stop_profile(self) -> dict:
        """Describe the steps since `start_profile`: their number, their sizes, and the time of their phases on host and
        device, as ``POST /stop_profile`` does. Raises RequestRefused if nothing is being recorded."""
        return self._threads.run(self._manager.control.stop_profile())

    async def async_stop_profile(self) -> dict:
        """`stop_profile` for asyncio."""
        return await self._threads.await_on_loop(self._manager.control.stop_profile())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def shutdown(self) -> None:
        """Stop all threads; open calls fail. Safe to call twice."""
        self._threads.shutdown()

    # -- calls: made in any thread, run on the loop ----------------------------------------------------------------

    def _parse(self, prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]) -> PromptBatch:
        given = {"text": prompt, "sampling_params": sampling_params, "stream": stream}
        given = {name: value for name, value in given.items() if value is not None}
        if twice := given.keys() & fields.keys():
            raise RequestRefused(f"{twice.pop()} is given twice; give prompt or text, not both")
        ignored = self._ignored.begin_request()
        asked = {name: _plain(value) for name, value in (given | fields).items()}
        batch = parse_generate(asked, names=read_names(asked, {}), ignored=ignored)
        self._ignored.report(ignored)
        return batch

    def _embedding_call(self, prompt: Any, fields: dict[str, Any]) -> PooledCall:
        return parse_encode(_given(fields, text=prompt))

    async def _pooled(self, call: PooledCall) -> Any:
        if self._pooling_tools is None:
            renderer = ChatSetup(self.args.chat, self.tokenizer).renderer
            self._pooling_tools = PoolingTools(
                self._manager, lambda asked: self.args.served_model_name, chat_renderer(renderer)
            )
        tools = self._pooling_tools
        answer = call.build_answer(await run_call(self._manager, SOLE_CLIENT, call, tools), tools)
        if isinstance(answer, dict) and "data" in answer:
            answer["data"] = list(answer["data"])  # may be an iterator
        return answer

    async def _answer(self, batch: PromptBatch) -> dict | list[dict]:
        with await self._manager.open_answer(SOLE_CLIENT, batch.prompts, stream=False) as answer:
            return whole_response(await answer.outputs(), batch)

    async def _stream(self, batch: PromptBatch) -> AsyncGenerator[dict, None]:
        incremental = self.args.server.incremental_streaming_output
        with await self._manager.open_answer(SOLE_CLIENT, batch.prompts, stream=True) as answer:
            async for output in stream_events(answer, batch, incremental=incremental):
                yield output

    def _iterate(self, outputs: AsyncGenerator[dict, None]) -> Iterator[dict]:
        output = None
        try:
            while (output := self._threads.run(_next(outputs))) is not _END:
                yield output
        finally:
            if output is not _END:
                self._forget(outputs)

    async def _iterate_async(self, outputs: AsyncGenerator[dict, None]) -> AsyncIterator[dict]:
        output = None
        try:
            while (output := await self._threads.await_on_loop(_next(outputs))) is not _END:
                yield output
        finally:
            if output is not _END:
                self._forget(outputs)

    def _forget(self, outputs: AsyncGenerator[dict, None]) -> None:
        # Do not wait for it: the garbage collector may run this, on any thread.
        with contextlib.suppress(EngineError):
            self._threads.submit(outputs.aclose())

    async def _load_item_trie(self, name: str, items: str | Path | np.ndarray) -> None:
        await self._manager.control.load_item_trie(typed(name, str, "name"), await build_item_trie(items))

    async def _load_adapter(self, name: str, folder: str | Path) -> None:
        await self._manager.control.load_adapter(typed(name, str, "lora_name"), os.fspath(folder))

    async def _abort(self, rid: str | None) -> list[str]:
        return self._manager.abort_requests(SOLE_CLIENT, None if rid is None else read_rid(rid, "rid"))


async def _next(outputs: AsyncGenerator[dict, None]) -> Any:
    return await anext(outputs, _END)


def _given(fields: dict[str, Any], **named: Any) -> dict[str, Any]:
    """The fields of a body, from keywords and arguments. Raises RequestRefused for one that is given twice."""
    named = {name: value for name, value in named.items() if value is not None}
    if twice := named.keys() & fields.keys():
        raise RequestRefused(f"{twice.pop()} is given twice; give it once")
    return {name: _plain(value) for name, value in (named | fields).items()}


def _score_call(query: Any, items: Any, label_token_ids: Any, fields: dict[str, Any]) -> PooledCall:
    return parse_score(_given(fields, query=query, items=items, label_token_ids=label_token_ids))


def _plain(value: Any) -> Any:
    """The value as a JSON body would have carried it."""
    if isinstance(value, SamplingParams):
        return msgspec.to_builtins(value)
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if isinstance(value, list | tuple):
        return [item if isinstance(item, int | str) else _plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


def _default_worker() -> WorkerFunction:
    # Imported late: it pulls in torch, which callers that only want this module's types should not pay for.
    from ..runtime.worker import run_worker

    return run_worker
