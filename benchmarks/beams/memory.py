"""Counts the pages that the beams of a search hold beyond their prefix. No model: candidates are made up.

    python -m benchmarks.beams.memory [--width 32] [--steps 3 32] [--page-sizes 1 16 64]

A two-stage search: a continuation of 500 + 200 tokens with 3 more. "forks": in every step all beams continue from the
best one; from random ones, as searches do; or each from itself. The figures are taken when a step is formed, when most
is held:

    group   pages that the beams name behind the whole pages of the prefix, each counted once (BeamRows.pages)
    pool    pages that are neither free nor evictable, less those of the prefix: is anything held that no beam names?
    limit   width × ceil((tokens of the prefix in its last page + steps) / page)
    copies  what the same beams take as requests without a shared prefix: width × ceil((prefix + steps) / page)

Exits with 1 if a search exceeds its limit, or leaves a page behind. Writes beam_memory.json to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.scheduler.batch import BeamCandidates, BeamStep, StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request import Request
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS

PROMPT, STAGE1, SUFFIX = 500, 200, 3
PREFIX = PROMPT + STAGE1 + SUFFIX
VOCAB = 32000
FORKS = ("best", "random", "each")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table; pages."""

    page_size: int
    steps: int
    forks: str
    group: int
    pool: int
    limit: int
    copies: int
    left: int
    """Still in use after the end."""

    @property
    def failure(self) -> str | None:
        if max(self.group, self.pool) > self.limit:
            return f"{max(self.group, self.pool)} pages are more than {self.limit}"
        return f"{self.left} pages were left behind" if self.left else None


def make_scheduler(width: int, steps: int, page_size: int) -> tuple[Scheduler, RadixCache]:
    context = PREFIX + steps + 1
    tokens = -(-width * (context + page_size) // page_size) * page_size
    config = SchedulerConfig(
        context_length=context,
        max_total_tokens=tokens,
        max_running_requests=width,
        max_beam_width=width,
        max_leased_requests=1,
        max_leased_ratio=1.0,
        page_size=page_size,
    )
    pool, allocator = ReqToTokenPool(config.num_rows, context), Allocator(tokens, page_size)
    cache = RadixCache(pool, allocator, page_size=page_size)
    return Scheduler(config, pool, allocator, cache, ()), cache


def candidates(step: BeamStep, forks: str, rng: np.random.Generator) -> BeamCandidates:
    """Continuations by other tokens each; scores fall by a little, so that the first ones are kept."""
    count, live = step.num_candidates, step.stop - step.start
    parents = {
        "best": np.zeros(count, dtype=np.int32),
        "random": rng.integers(0, live, count, dtype=np.int32),
        "each": (np.arange(count) % live).astype(np.int32),
    }[forks]
    logprobs = np.linspace(-2.0, -3.0, count, dtype=np.float32)
    return BeamCandidates(
        parents=parents,
        tokens=rng.choice(VOCAB, count, replace=False).astype(np.int32),
        scores=step.scores[0] + logprobs,
        logprobs=logprobs,
    )


def in_use(cache: RadixCache) -> int:
    """Pages that are neither free nor evictable."""
    allocator = cache.allocator
    return (allocator.total_tokens - allocator.free_tokens - cache.evictable_tokens) // cache.page_size


def measure(width: int, steps: int, page_size: int, forks: str, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    scheduler, cache = make_scheduler(width, steps, page_size)
    prompt = rng.integers(0, VOCAB, PROMPT).astype(np.int32)
    first = SamplingParams(max_new_tokens=STAGE1, temperature=0.0)
    parent = RequestSpec(rid="stage-1", input_ids=pack_ids(prompt), sampling=first, retain_ttl=1e9)
    scheduler.add_request(parent, 0.0)
    while (batch := scheduler.next_batch(0.0)) is not None:
        tokens = rng.integers(0, VOCAB, (len(batch), 1), dtype=np.int32)
        scheduler.process_result(StepResult.of_rows(tokens.tolist()), 0.0)
    suffix = rng.integers(0, VOCAB, SUFFIX).astype(np.int32)
    second = SamplingParams(max_new_tokens=steps, beam_width=width, n=width)
    child = RequestSpec(
        rid="stage-2", input_ids=pack_ids(suffix), sampling=second, continuation=ContinuationSpec(parent.rid)
    )
    (search,) = scheduler.add_request(child, 0.0)
    whole_pages = PREFIX // page_size
    group = pool = 0
    while (batch := scheduler.next_batch(0.0)) is not None:
        if search.beam_kv is not None:
            group = max(group, len(pages_of(scheduler, search)))
            pool = max(pool, in_use(cache) - whole_pages)
        (step,) = batch.beams
        made_up = candidates(step, forks, rng)
        scheduler.process_result(StepResult.of_rows([[]] * len(batch), [made_up]), 0.0)
    assert search.beams is not None and len(search.beams.results) == width
    return Case(
        page_size=page_size,
        steps=steps,
        forks=forks,
        group=group,
        pool=pool,
        limit=width * -(-(PREFIX % page_size + steps) // page_size),
        copies=width * -(-(PREFIX + steps) // page_size),
        left=in_use(cache),
    )


def pages_of(scheduler: Scheduler, search: Request) -> np.ndarray:
    return scheduler._beams.pages(search)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 32])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    print(f"width {args.width}, prefix {PREFIX}; pages")
    print(f"{'page':>4}{'steps':>7}  {'forks':<8}{'group':>8}{'pool':>8}{'limit':>8}{'copies':>9}")
    cases = [
        measure(args.width, steps, page_size, forks, args.seed)
        for page_size in args.page_sizes
        for steps in args.steps
        for forks in FORKS
    ]
    for case in cases:
        print(
            f"{case.page_size:>4}{case.steps:>7}  {case.forks:<8}{case.group:>8}{case.pool:>8}{case.limit:>8}"
            f"{case.copies:>9}" + (f"  FAILED: {case.failure}" if case.failure else "")
        )
    args.out.mkdir(exist_ok=True)
    report = {"width": args.width, "prefix": PREFIX, "seed": args.seed, "cases": [vars(case) for case in cases]}
    (args.out / "beam_memory.json").write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(any(case.failure for case in cases))


if __name__ == "__main__":
    main()
