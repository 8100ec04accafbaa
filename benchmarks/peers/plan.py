"""The units of the comparison, their sizes, and the goal of each figure relative to the better peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers.http_load import Load
from benchmarks.peers.work import Ask, Found, Prefill, Prompts, Steps, Throughput, TwoStages


@dataclass(frozen=True)
class Metric:
    """A line of the table. goal: of ours over the better peer's, at least where more is better, else at most."""

    name: str
    measure: str
    goal: float
    more_is_better: bool = False


@dataclass(frozen=True)
class Unit:
    """A unit of work that engines take turns at. run: on a driver; load: on a server, over HTTP."""

    name: str
    metrics: tuple[Metric, ...]
    run: Callable[[Ask, Prompts], Found] | None = None
    load: Load | None = None


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
    return {unit.name: unit for unit in found}


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
