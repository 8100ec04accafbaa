"""The units of the comparison, their sizes, and the goal of each figure relative to the better peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.peers.engines import LARGE, QUANTIZED, SMALL, Engine, Room, family
from benchmarks.peers.http_load import Load
from benchmarks.peers.work import Ask, Decode, Found, Prefill, Prompts, Settle, Steps, Throughput, TwoStages


@dataclass(frozen=True)
class Metric:
    """A line of the table. goal: of ours over a peer's, at least where more is better, else at most; None: none."""

    name: str
    measure: str
    goal: float | None
    more_is_better: bool = False
    others: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Goals that differ, by dtype and peer."""

    def goal_of(self, dtype: str, peer: str) -> float | None:
        return self.others.get((dtype, family(peer)), self.goal)


@dataclass(frozen=True)
class Unit:
    """A unit of work that engines take turns at. run: on a driver; load: on a server, over HTTP."""

    name: str
    metrics: tuple[Metric, ...]
    run: Callable[[Ask, Prompts], Found] | None = None
    load: Load | None = None
    room: Room = LARGE
    memory: tuple[str, ...] = ()
    """Metrics of the memory of all processes of the engine after the work: now, and at its peak."""

    def suits(self, dtype: str) -> bool:
        """False where the weights have few bits and the unit is about something else."""
        return self.room is SMALL or dtype not in QUANTIZED


def takes_part(engine: Engine, unit: Unit, dtype: str) -> bool:
    """True if the engine could be measured at the unit."""
    if dtype not in engine.dtypes or (unit.load is not None and not engine.ready_path):
        return False
    return engine.searches or unit.room is SMALL


@dataclass(frozen=True)
class Sizes:
    """Sizes of all units, in requests and tokens."""

    throughput: tuple[tuple[int, int, int], ...] = ((32, 512, 64), (8, 2048, 32))
    """requests, prompt, output"""
    prefill: int = 2048
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    step_tokens: int = 40
    stage_prompt: int = 1000
    stage1: int = 100
    at_once: tuple[int, ...] = (1, 16)
    pairs: int = 6
    """Two-stage requests of a round, where one comes at a time."""
    width: int = 32
    clients: int = 32
    http: tuple[int, int, int] = (256, 64, 32)
    """requests, prompt, output"""
    streams: tuple[int, ...] = (1, 8, 32)
    decode: tuple[int, int] = (64, 64)
    """prompt, output of each stream"""
    short_prefill: int = 512
    memory_load: tuple[int, int, int] = (16, 64, 8)
    """requests, prompt, output"""


QUICK = Sizes(
    throughput=((4, 32, 8),),
    prefill=64,
    batches=(1, 2),
    contexts=(32,),
    step_tokens=12,
    stage_prompt=64,
    stage1=8,
    at_once=(1, 2),
    pairs=2,
    width=4,
    clients=2,
    http=(8, 16, 64),
    streams=(1, 2),
    decode=(16, 16),
    short_prefill=48,
    memory_load=(4, 16, 8),
)
"""For the smallest model: does it run?"""


def units(sizes: Sizes) -> dict[str, Unit]:
    found: list[Unit] = []
    for requests, prompt, tokens in sizes.throughput:
        metric = Metric(f"{requests} × ({prompt} + {tokens})", "tokens/s", 1.0, more_is_better=True)
        found.append(Unit(f"{requests}x{prompt}", (metric,), Throughput(metric.name, requests, prompt, tokens)))
    prefill = Metric(f"prefill 1 × {sizes.prefill}", "tokens/s", 0.95, more_is_better=True)
    found.append(Unit("prefill", (prefill,), Prefill(prefill.name, sizes.prefill, 4)))
    for context in sizes.contexts:
        steps = {batch: f"step, batch {batch}, context {context}" for batch in sizes.batches}
        metrics = tuple(Metric(name, "ms", 1.05) for name in steps.values())
        found.append(Unit(f"steps-{context}", metrics, Steps(steps, context, sizes.step_tokens)))
    for at_once in sizes.at_once:
        found += two_stages(sizes, at_once)
    found.append(http(sizes))
    found += of_weights(sizes)
    return {unit.name: unit for unit in found}


LLAMA_CPP, OPENVINO = "llama.cpp", "openvino"
FLOAT_STEP = round(1 / 1.05, 3)
"""A step that takes at most 1.05 times as long."""


def of_weights(sizes: Sizes) -> list[Unit]:
    """Units that say what weights of some dtype cost: they need little room for KV, so that memory is the weights'."""

    def decode(streams: int) -> Metric:
        alone = streams == 1
        others = {(dtype, OPENVINO): 1.0 for dtype in QUANTIZED}
        others |= {("int8", LLAMA_CPP): 0.95 if alone else 1.5, ("int4", LLAMA_CPP): 0.9 if alone else 1.5}
        name = f"decode, {streams} stream{'' if alone else 's'}"
        return Metric(name, "tokens/s", FLOAT_STEP, more_is_better=True, others=others)

    def memory(name: str) -> Metric:
        others = {(dtype, LLAMA_CPP): 1.15 for dtype in QUANTIZED}
        return Metric(name, "MB", None, others=others)

    metrics = {streams: decode(streams) for streams in sizes.streams}
    names = {streams: metric.name for streams, metric in metrics.items()}
    as_fast = {(dtype, peer): 1.0 for dtype in QUANTIZED for peer in (LLAMA_CPP, OPENVINO)}
    name = f"prefill 1 × {sizes.short_prefill}"
    prefill = Metric(name, "tokens/s", 0.95, more_is_better=True, others=as_fast)
    resident = memory("resident memory"), memory("resident memory, peak")
    served = memory("resident memory of the server"), memory("resident memory of the server, peak")
    requests, prompt, tokens = sizes.memory_load
    load = Load(rate="", times={}, clients=min(8, requests), requests=requests, prompt=prompt, tokens=tokens)
    return [
        Unit("decode", tuple(metrics.values()), Decode(names, *sizes.decode), room=SMALL),
        Unit(f"prefill-{sizes.short_prefill}", (prefill,), Prefill(name, sizes.short_prefill, 3), room=SMALL),
        Unit("memory", resident, Settle(8, sizes.short_prefill), room=SMALL, memory=names_of(resident)),
        Unit("server-memory", served, load=load, room=SMALL, memory=names_of(served)),
    ]


def names_of(metrics: tuple[Metric, ...]) -> tuple[str, ...]:
    return tuple(metric.name for metric in metrics)


def two_stages(sizes: Sizes, at_once: int) -> list[Unit]:
    def unit(name: str, metric: Metric, width: int = 0, evicted: bool = False) -> Unit:
        groups = sizes.pairs if at_once == 1 else 1
        work = TwoStages(metric.name, at_once, groups, sizes.stage_prompt, sizes.stage1, width, evicted)
        return Unit(f"{name}-{at_once}", (metric,), work)

    many = f"{at_once} at once"
    return [
        unit("ttft", Metric(f"stage 2, first token, {many}", "ms", 1.0)),
        unit("evicted", Metric(f"the same, {many}, evicted at the peers", "ms", 0.1), evicted=True),
        unit("beam", Metric(f"beam {sizes.width} × 3 as stage 2, {many}", "ms", 0.2), width=sizes.width),
    ]


def http(sizes: Sizes) -> Unit:
    requests, prompt, tokens = sizes.http
    who = f"HTTP, {sizes.clients} clients"
    rate = Metric(f"{who}, {prompt} in, {tokens} out", "req/s", 1.0, more_is_better=True)
    times = {key: Metric(f"{who}, {key}", "ms", 1.0) for key in ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")}
    load = Load(
        rate=rate.name,
        times={key: metric.name for key, metric in times.items()},
        clients=sizes.clients,
        requests=requests,
        prompt=prompt,
        tokens=tokens,
    )
    return Unit("http", (rate, *times.values()), load=load)
