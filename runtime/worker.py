"""The scheduler worker: loads a model, builds pools, tree and scheduler around it, and runs the event loop.

This is the only place that puts the parts of a worker together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ..memory_pool.allocator import Allocator
from ..memory_pool.kv_pool import WindowedKVPool
from ..memory_pool.req_to_token import ReqToTokenPool
from ..memory_pool.state_slots import StateSlots
from ..memory_pool.stores.host_pool import HostPool
from ..memory_pool.stores.host_state_pool import HostStatePool
from ..memory_pool.stores.remote_store import RemoteStore
from ..memory_pool.window_pages import WindowedAllocator, WindowPages
from ..radix.cache import RadixCache
from ..radix.eviction.registry import ORDERS
from ..radix.node_states import NodeStates
from ..radix.node_windows import NodeWindows
from ..radix.tiers.block_tier import BlockNames, BlockTier
from ..radix.tiers.host_tier import HostPolicy, HostTier
from ..scheduler.config import SchedulerConfig
from ..scheduler.request_spec import LogprobOptions, PoolingSpec, RequestSpec
from ..scheduler.sampling_params import SamplingParams
from ..scheduler.scheduler import Scheduler
from ..scheduler.token_buffer import pack_ids
from .channels import Endpoints, Receiver, Sender, Waker
from .checkpoint.model_files import resolve_model_folder
from .config import WorkerConfig
from .constraints.grammars import Grammars
from .constraints.item_tries import ItemTries, load_item_trie
from .event_loop import EventLoop
from .job_records import JobRecords, JobTraceFile, ToolHistoryFile
from .kv_events.publisher import KVEventPublisher, open_kv_events
from .kv_transfer.block_io import BlockIO, Kept
from .kv_transfer.tier_io import TierIO, is_finite, is_finite_snapshot, make_transfers
from .launcher.child_process import WorkerProcess, run_child
from .lora.adapters import Adapters, load_adapters
from .messages import StartPhase, ToWorker, WorkerReady
from .model_config import ServedConfig
from .pool_sizes import PoolSizes
from .runner.cpu_threads import short_spins_if_crowded, watch_cpu_threads
from .runner.device_backends import DeviceBackends
from .runner.model_runner import ModelRunner
from .runner.step_profile import StepProfiler
from .sampling.op_providers import select_sampling_ops
from .sampling.sampler import Sampler
from .settled_memory import settle_memory
from .step_runner import StepRunner
from .stop_signal import StopSignal
from .text.continuation_suffixes import ContinuationSuffixes
from .text.tokenizer import Tokenizer
from .tier_setup import (
    HOST_POLICIES,
    Stores,
    block_pages,
    make_host_pool,
    make_host_states,
    model_fingerprint,
    open_stores,
    snapshot_pages,
)

logger = logging.getLogger(__name__)

MAX_QUEUED_BLOCKS = 128
"""Most blocks that may wait to be written; their pages on the host are not free meanwhile."""

CLOSE_S = 5.0
"""Most seconds that a worker's shutdown waits for a copy between the tiers."""


def build_scheduler(
    config: SchedulerConfig,
    eos_token_ids: tuple[int, ...],
    host_tokens: int = 0,
    host_policy: HostPolicy | None = None,
    stores: Stores | None = None,
    bytes_per_token: int = 0,
    window: int = 0,
    window_tokens: int = 0,
    watch: Callable[[RadixCache, HostTier | None], None] | None = None,
    host_states: int = 0,
) -> Scheduler:
    """A scheduler with its pools and tree. ``config`` must be resolved: no zeros that stand for "from the model".

    host_tokens: size of the host tier; 0 for none. stores: those behind it. bytes_per_token: KV size, for the stats.
    window, window_tokens: tokens that layers with a sliding window see, and slots of their pool; 0 if they have none.
    watch: called with the cache and its host tier while they are still empty. host_states: recurrent states that the
    host tier keeps.
    """
    req_to_token = ReqToTokenPool(config.num_rows, config.context_length)
    windows = None
    if window:
        windows = WindowPages(window_tokens, config.max_total_tokens, config.page_size, window)
        allocator = WindowedAllocator(windows, config.max_total_tokens)
    else:
        allocator = Allocator(config.max_total_tokens, config.page_size)
    slots = StateSlots(config.max_states, fences=allocator.fences) if config.max_states else None
    cache = RadixCache(
        req_to_token,
        allocator,
        page_size=config.page_size,
        disabled=config.disable_radix_cache,
        lanes=ORDERS[config.radix_eviction_policy](config.max_total_tokens),
        states=NodeStates(slots, config.page_size) if slots is not None else None,
        windows=NodeWindows(windows) if windows is not None else None,
    )
    tier = None
    if host_tokens:
        host_slots = StateSlots(host_states, fences=allocator.fences) if host_states else None
        host_allocator = Allocator(host_tokens, config.page_size, fences=allocator.fences)
        tier = HostTier(cache, host_allocator, host_policy, host_slots)
        cache.residency = tier
    if watch is not None:
        watch(cache, tier)
    behind: list[BlockTier] = []
    if tier is not None and stores is not None:
        names = BlockNames(cache, stores.fingerprint, stores.block_tokens)
        for name, store in stores.by_name.items():
            snapshots = stores.snapshots.get(name)
            behind.append(BlockTier(cache, tier, store, names, name=name, asks=name == "remote", snapshots=snapshots))
    return Scheduler(config, req_to_token, allocator, cache, eos_token_ids, tier, behind, bytes_per_token)


class Worker(NamedTuple):
    """The parts of a worker."""

    scheduler: Scheduler
    step_runner: StepRunner
    profiler: StepProfiler
    info: dict
    """The worker's description, for /server_info."""
    runner: ModelRunner
    host_pool: HostPool | None
    """Set where there is a host tier; `connect_tiers` executes the transfers that the tiers order."""
    stores: Stores | None
    host_states: HostStatePool | None
    """Set where there is a host tier and the model has recurrent states."""


def build_worker(
    config: WorkerConfig,
    backends: DeviceBackends | None = None,
    kv_events: KVEventPublisher | None = None,
    report_phase: Callable[[str], None] = lambda phase: None,
) -> Worker:
    """Load the model, and build the scheduler and the step runner on it.

    backends: None chooses those that fit the device. kv_events: publishes changes of the cache; None for nothing.
    report_phase: see ModelRunner.
    """
    asked, window_ratio = config.scheduler, _window_ratio(config)
    runner = ModelRunner(
        config.model,
        context_length=asked.context_length,
        num_rows=asked.num_rows,
        page_size=asked.page_size,
        max_total_tokens=asked.max_total_tokens,
        max_states=asked.max_states,
        max_running_requests=asked.max_running_requests,
        chunked_prefill_size=asked.chunked_prefill_size,
        max_sampled_tokens=asked.max_sampled_tokens,
        window_ratio=window_ratio,
        backends=backends,
        report_phase=report_phase,
    )
    if window_ratio is None and runner.shares_windows:
        logger.info("layers with a sliding window share the KV pool, because of the host tier or sparse attention")
    resolved = dataclasses.replace(
        asked,
        context_length=runner.config.context_length,
        max_total_tokens=runner.max_total_tokens,
        max_states=runner.max_states,
        chunked_prefill_size=runner.chunked_prefill_size,
        # Small steps come often: requests that have begun to answer should not wait for all of them.
        enable_mixed_chunk=asked.enable_mixed_chunk or runner.chunked_prefill_size < asked.step_tokens,
    )
    eos_token_ids = runner.config.eos_token_ids
    host_pool = make_host_pool(config.tiers, runner.kv_pool, runner.transfer_kv, runner.state_pool)
    host_tokens = host_pool.num_tokens if host_pool is not None else 0
    host_states = make_host_states(config.tiers, runner.kv_pool, runner.state_pool) if host_pool is not None else None
    stores = None
    if host_pool is not None and (config.tiers.disk_cache_path or config.tiers.remote_cache_url):
        dummy = runner.device.type if config.model.load_format == "dummy" else ""
        folder = resolve_model_folder(config.model.model_path)
        model = model_fingerprint(
            folder, runner.config, dummy_device=dummy, sparsity=runner.sparsity, few_bits=runner.few_bits
        )
        stores = open_stores(config.tiers, host_pool, model, host_states)
    policy = HOST_POLICIES[config.tiers.host_write_policy]
    scheduler = build_scheduler(
        resolved,
        eos_token_ids,
        host_tokens,
        policy,
        stores,
        runner.kv_pool.bytes_per_token,
        runner.window,
        runner.window_tokens,
        watch=kv_events.watch_cache if kv_events is not None else None,
        host_states=host_states.num_states if host_states is not None else 0,
    )
    vocab_size = runner.config.vocab_size
    sampler = Sampler(vocab_size, eos_token_ids, runner.device, select_sampling_ops(runner.device, vocab_size))
    tokenizer = load_tokenizer(config)
    step_runner = StepRunner(runner, sampler, lambda: tokenizer().token_bytes, runner.profiler)
    info = _describe(config, resolved, runner, host_pool, stores)
    info["kv_events"] = kv_events.describe() if kv_events is not None else None
    return Worker(scheduler, step_runner, runner.profiler, info, runner, host_pool, stores, host_states)


def _window_ratio(config: WorkerConfig) -> float | None:
    """See ModelRunner. None where the windows cannot have a pool of their own."""
    tiers = config.tiers
    if tiers.host_cache_gb or tiers.host_cache_ratio or config.model.enable_double_sparsity:
        return None
    return config.scheduler.swa_full_tokens_ratio


def _describe(
    config: WorkerConfig,
    resolved: SchedulerConfig,
    runner: ModelRunner,
    host_pool: HostPool | None,
    stores: Stores | None,
) -> dict:
    """The worker's part of /server_info."""
    return {
        "model_path": config.model.model_path,
        "vocab_size": runner.config.vocab_size,
        "eos_token_ids": list(runner.config.eos_token_ids),
        "model_impl": runner.model_impl,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(runner.kv_pool.dtype).removeprefix("torch."),
        "kv_bytes_per_token": runner.kv_pool.bytes_per_token,
        "device": str(runner.device),
        "attention_backend": runner.attention_name,
        "cuda_graphs": runner.has_graphs,
        "pooling": _describe_pooling(runner.config, config.model.pooling),
        "overlap": _overlaps(resolved.overlap_schedule, runner.device.type),
        "scheduler": dataclasses.asdict(resolved),
        "tiers": {
            **dataclasses.asdict(config.tiers),
            "host_tokens": host_pool.num_tokens if host_pool is not None else 0,
            "host_copied_by": host_pool.copied_by if host_pool is not None else None,
            "remote_cache_url": _shown(stores),
        },
        **{name: getattr(resolved, name) for name in ("context_length", "max_total_tokens", "max_running_requests")},
    }


def pool_sizes(worker: Worker) -> PoolSizes:
    """The sizes of a worker's pools."""
    pool, states, window = worker.runner.kv_pool, worker.runner.state_pool, worker.runner.window
    windows = pool.windows if isinstance(pool, WindowedKVPool) else None
    return PoolSizes(
        tokens=pool.num_tokens,
        page_size=pool.page_size,
        bytes_per_token=pool.bytes_per_token,
        states=states.num_states if states is not None else 0,
        bytes_per_state=states.bytes_per_state if states is not None else 0,
        window=window,
        window_tokens=windows.num_tokens if windows is not None else 0,
        bytes_per_window_token=windows.bytes_per_token if windows is not None else 0,
        host_tokens=worker.host_pool.num_tokens if worker.host_pool is not None else 0,
        host_states=worker.host_states.num_states if worker.host_states is not None else 0,
    )


def _describe_pooling(config: ServedConfig, asked: str) -> dict:
    """How prompts become embeddings, and what stands on the decoder. asked: --pooling."""
    embedding = config.embedding
    is_asked = asked != "auto"
    return {
        "kind": asked if is_asked else embedding.pooling,
        "normalizes": embedding.normalizes,
        "is_embedder": is_asked or embedding.is_embedder,
        "refusal": "" if is_asked else embedding.refusal,
        "hidden_size": config.hidden_size,
        "head": config.head,
        "labels": list(config.labels),
        "label_activation": config.label_activation,
    }


def _shown(stores: Stores | None) -> str:
    """The remote store's URL without its secrets; empty without one."""
    remote = stores.by_name.get("remote") if stores is not None else None
    return remote.address if isinstance(remote, RemoteStore) else ""


def _overlaps(choice: str, device_type: str) -> bool:
    """On a CPU the model runs in the host's own time: overlap hides nothing and delays each token by a step."""
    return choice == "on" or (choice == "auto" and device_type == "cuda")


def load_tokenizer(config: WorkerConfig) -> Callable[[], Tokenizer]:
    """The returned function loads it at its first call: most workers need no text, and tests run models without one."""
    folder = config.model.tokenizer_path or config.model.model_path
    return functools.cache(lambda: Tokenizer.load(resolve_model_folder(folder)))


def connect_tiers(worker: Worker, wake: Callable[[], None]) -> TierIO | None:
    """Start the threads that execute the tiers' orders; None without tiers. wake: ends the event loop's sleep; called
    from other threads."""
    pool, threads = worker.host_pool, dict[str, BlockIO]()
    if pool is None:
        return None
    transfers = worker.runner.transfers = make_transfers(pool, worker.runner.device, wake, worker.host_states)
    dtype = str(pool.dtype).removeprefix("torch.") if pool.bytes_per_token else None
    of_pages = {"scales": pool.scales, "page_nbytes": pool.page_nbytes}
    is_sound = functools.partial(is_finite, dtype=dtype, **of_pages) if dtype is not None else None
    for name, store in worker.stores.by_name.items() if worker.stores is not None else ():
        queued, snapshots = MAX_QUEUED_BLOCKS * store.block_bytes, None
        if worker.stores is not None and worker.host_states is not None:
            states, of_states = worker.host_states, worker.stores.snapshots[name]
            sound = functools.partial(is_finite_snapshot, tensors=states.tensors, tail_dtype=dtype, **of_pages)
            snapshots = Kept(of_states, snapshot_pages(pool, states, worker.stores.block_tokens), sound)
            queued += MAX_QUEUED_BLOCKS * of_states.block_bytes
        pages = block_pages(pool)
        threads[name] = BlockIO(store, pages, queued, wake=wake, name=name, is_sound=is_sound, snapshots=snapshots)
    return TierIO(transfers, pool.page_size, threads)


def warm_up(scheduler: Scheduler, step_runner: StepRunner, *, generates: bool = True) -> None:
    """Run a prefill and a few decodes, so that the first client does not pay for lazy initialisation. generates: False
    for a model without a language head, which embeds instead. Nothing is looked up on a tier, as every token of the
    prompt is computed, and nothing is left there. Raises RuntimeError if the scheduler does not run the request."""
    sampling = SamplingParams(max_new_tokens=3 if generates else 0, temperature=0.0, ignore_eos=True)
    now = time.monotonic()
    spec = RequestSpec(
        rid="warm-up",
        input_ids=pack_ids([0, 0]),
        sampling=sampling,
        no_reuse_from=0,  # begins no job
        logprobs=LogprobOptions(start_len=0) if generates else None,
        pooling=None if generates else PoolingSpec(kind="mean"),
    )
    scheduler.add_request(spec, now)
    while (batch := scheduler.next_batch(now)) is not None:
        scheduler.process_result(step_runner.run(batch).result, now)
    scheduler.forget_record("warm-up")
    if not scheduler.flush_cache():
        raise RuntimeError(f"the warm-up did not end: {scheduler.live_requests}")


def run_worker(config: WorkerConfig, endpoints: Endpoints, stop: StopSignal) -> None:
    """Serve until ``stop`` is set. Raises ModelLoadError if the model cannot be served as asked, ItemTrieError for a
    trie that cannot be loaded, AdapterError for such an adapter."""
    inbox: Receiver[ToWorker] = Receiver(endpoints.to_worker, ToWorker)
    outbox = Sender(endpoints.to_detokenizer)
    waker = Waker(endpoints.to_worker)
    stop.on_set(waker.wake)

    def report_phase(phase: str) -> None:
        logger.info("starting: %s", phase)
        outbox.send(StartPhase(phase=phase))

    starting = contextlib.ExitStack()
    worker: Worker | None = None
    tier_io: TierIO | None = None
    grammars: Grammars | None = None
    job_records: JobRecords | None = None
    kv_events: KVEventPublisher | None = None
    try:
        tries = {
            name: load_item_trie(path) for name, path in config.item_tries.items()
        }  # fails before a model is loaded
        trace = JobTraceFile(config.jobs.scheduler_trace, time.monotonic()) if config.jobs.scheduler_trace else None
        report_phase("loading the model")
        kv_events = open_kv_events(config.kv_events, config.scheduler.page_size)
        if config.model.device != "cuda":
            starting.enter_context(short_spins_if_crowded())
        worker = build_worker(config, kv_events=kv_events, report_phase=report_phase)
        scheduler, step_runner, profiler, info = worker[:4]
        item_tries = ItemTries(
            info["vocab_size"], max_tries=config.max_item_tries, max_bytes=config.max_item_trie_bytes
        )
        for name, trie in tries.items():
            item_tries.put(name, trie)
        adapters = Adapters(worker.runner.adapters, config.max_adapters, waker.wake)
        load_adapters(adapters, config.adapters)
        info["adapters"] = adapters.describe()
        tier_io = connect_tiers(worker, waker.wake)
        report_phase("warming up")
        warm_up(scheduler, step_runner, generates=info["pooling"]["head"] == "language")
        starting.close()
        if trace is not None:
            trace.write_pools(pool_sizes(worker), time.monotonic())
            scheduler.trace_jobs()
        history = None
        if config.jobs.tool_history:
            history = ToolHistoryFile(config.jobs.tool_history, scheduler.load_tool_times, scheduler.save_tool_times)
        job_records = JobRecords(scheduler.take_job_events, trace, history)
        settle_memory()
        outbox.send(WorkerReady(info=msgspec.json.encode(info)))
        tokenizer = load_tokenizer(config)
        suffixes = ContinuationSuffixes(tokenizer, config.scheduler.max_finished_requests)
        grammars = Grammars(tokenizer, info["vocab_size"], info["eos_token_ids"], waker.wake)
        outbox.holds = endpoints.are_of_threads and info["device"] == "cpu"
        loop = EventLoop(
            scheduler=scheduler,
            step_runner=step_runner,
            inbox=inbox,
            outbox=outbox,
            suffixes=suffixes,
            item_tries=item_tries,
            grammars=grammars,
            adapters=adapters,
            info=info,
            profiler=profiler,
            overlap=info["overlap"],
            watch_threads=watch_cpu_threads(info["device"]),
            idle_work=worker.runner.run_late_work if worker.runner.has_late_work else None,
            tier_io=tier_io,
            job_records=job_records,
            kv_events=kv_events,
        )
        loop.run(stop)
    finally:
        starting.close()
        if grammars is not None:
            grammars.close()
        if job_records is not None:
            job_records.close(time.monotonic())
        if tier_io is not None and tier_io.close(CLOSE_S) and worker is not None and worker.stores is not None:
            worker.stores.close()  # a store with a hanging call stays open
        for part in (kv_events, waker, inbox, outbox):
            if part is not None:
                part.close()


if __name__ == "__main__":
    sys.exit(run_child("worker", WorkerProcess, lambda child, stop: run_worker(child.config, child.endpoints, stop)))
