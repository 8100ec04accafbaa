"""Checks that handoffs work under memory pressure. Run by `benchmarks.serving.two_stage --handoff-check PAIRS`.

Pairs of random lengths keep the KV pool filled: pairs are admitted while their demand (prompt, outputs and suffix, in
whole pages) and that of other traffic is at most a given share of the pool, live and leased. Between its stages each
pair waits until other traffic has computed three times as many tokens as the pool holds, which evicts everything
evictable.

    at 90 % of the pool    continuation: no pair may compute more than suffix + 1 tokens in stage 2; no lease breaks
                           radix, for comparison: the same pairs send everything again
    at 130 %               continuation: leases are refused or break, the path says so, and every pair ends in time

A tiny model, so that a step costs a millisecond or two. Columns: pairs that computed more than suffix + 1 tokens in
stage 2, and the most that one computed beyond its suffix; leases refused and broken; requests retracted; the largest
share of the pool that was leased, and that was leased or live; the slowest request. Writes
handoff_check.json.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clients import SAMPLED, Call, EngineClient
from benchmarks.common.models import LLAMA_TINY, write_dummy_model

POOL_TOKENS = 16_384
NOISE_TOKENS = 256
NOISE_BETWEEN_STAGES = 3 * POOL_TOKENS
NOISE_WORKERS = 4
PROMPT, STAGE1, SUFFIX, STAGE2 = (40, 300), (4, 32), (0, 5), (1, 4)
"""Shortest and longest, in tokens."""

STALL_S = 120.0
"""No request of this tiny model takes a tenth of it unless it hangs."""


@dataclass
class Outcome:
    """The outcome of the pairs of one run."""

    page_size: int
    mode: str
    load: float
    pairs: int = 0
    recomputed_more: int = 0
    """Pairs in which stage 2 computed more than suffix + 1 tokens."""
    most_recomputed: int = 0
    """Beyond the suffix."""
    handoffs_recomputed_more: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Leases that were not granted, as stage 1's meta_info said."""
    leases_broken: int = 0
    evicted_tokens: int = 0
    retractions: int = 0
    peak_leased: float = 0.0
    """Share of the pool, like peak_demand: live and leased together."""
    peak_demand: float = 0.0
    slowest_s: float = 0.0
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """Promises that were not kept."""
        found = []
        if self.mode == "continuation":
            if self.handoffs_recomputed_more:
                found.append(f"{self.handoffs_recomputed_more} handoffs computed more than suffix + 1 tokens")
            if self.load <= 0.9 and self.paths["handoff"] < self.pairs:
                found.append(f"{self.pairs - self.paths['handoff']} pairs were not handed off")
            if self.load <= 0.9 and self.recomputed_more:
                found.append(f"{self.recomputed_more} pairs computed more than suffix + 1 tokens")
            if self.load > 1.0 and not self.refused + self.leases_broken:
                found.append("no lease was refused or broken: the load was no overload")
            without_a_lease = self.paths["match"] + self.paths["fallback"]
            if self.load > 1.0 and without_a_lease != self.refused + self.leases_broken:
                # Only the other traffic is told nothing of its leases, and it has none.
                found.append(
                    f"{self.refused} leases refused, {self.leases_broken} broken, {without_a_lease} pairs without"
                )
        elif self.recomputed_more < self.pairs // 2:
            found.append(f"only {self.recomputed_more} pairs lost their cache: the traffic evicted too little")
        return found


class Gate:
    """Lets callers in while the tokens they need fit; first come, first served."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, num_tokens: int):
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._free >= num_tokens)
            self._free -= num_tokens
        try:
            yield
        finally:
            async with self._changed:
                self._free += num_tokens
                self._changed.notify_all()


class Run:
    """One engine, one mode, one load."""

    def __init__(self, client: EngineClient, outcome: Outcome, num_pairs: int, seed: int) -> None:
        self._client = client
        self._outcome = outcome
        self._num_pairs = num_pairs
        self._rng = np.random.default_rng(seed)
        self._noise_tokens = 0
        self._noise_came = asyncio.Condition()
        noise_demand = NOISE_WORKERS * self._pages(NOISE_TOKENS + 1)
        self._gate = Gate(int(outcome.load * POOL_TOKENS) - noise_demand)

    def _pages(self, num_tokens: int) -> int:
        page = self._outcome.page_size
        return -(-num_tokens // page) * page

    def _length(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(bounds[0], bounds[1] + 1))

    async def run(self) -> None:
        began = time.perf_counter()
        background = [asyncio.create_task(self._make_noise()) for _ in range(NOISE_WORKERS)]
        background.append(asyncio.create_task(self._watch()))
        pairs = asyncio.gather(*(self._pair(number) for number in range(self._num_pairs)))
        try:
            # A background task never ends by itself: if one does, it has failed.
            done, _ = await asyncio.wait([pairs, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (pairs, *background):
                task.cancel()
            await asyncio.gather(pairs, *background, return_exceptions=True)
        stats = await self._client.stats()
        self._outcome.leases_broken = stats["leases_broken"]
        self._outcome.evicted_tokens = stats["evicted_tokens"]
        self._outcome.retractions = stats["retractions"]
        self._outcome.seconds = time.perf_counter() - began

    async def _pair(self, number: int) -> None:
        prompt = self._client.make_prompt(self._rng, self._length(PROMPT))
        suffix = self._client.make_prompt(self._rng, self._length(SUFFIX))
        stage1, stage2 = self._length(STAGE1), self._length(STAGE2)
        continues = self._outcome.mode == "continuation"
        sampling = SAMPLED | {"seed": number}
        async with self._gate.hold(self._pages(len(prompt) + stage1 + len(suffix) + stage2)):
            retain_ttl = 3600.0 if continues else None
            first = await self._generate(
                Call(prompt=prompt, max_tokens=stage1, sampling=sampling, retain_ttl=retain_ttl)
            )
            await self._wait_for_noise(NOISE_BETWEEN_STAGES)
            again = Call(prompt=prompt + first.output + suffix, max_tokens=stage2)
            child = Call(prompt=suffix, max_tokens=stage2, parent=first.name)
            second = await self._generate(child if continues else again)
        self._count(first.refused, second.path, second.prompt_tokens, second.cached_tokens or 0, len(suffix))

    def _count(self, refused: str | None, path: str | None, prompt_len: int, cached: int, suffix_len: int) -> None:
        outcome, beyond = self._outcome, prompt_len - cached - suffix_len
        outcome.pairs += 1
        outcome.refused += refused is not None
        outcome.paths[path or "-"] += 1
        outcome.recomputed_more += beyond > 1
        outcome.handoffs_recomputed_more += path == "handoff" and beyond > 1
        outcome.most_recomputed = max(outcome.most_recomputed, beyond)

    async def _generate(self, call: Call) -> Any:
        async with asyncio.timeout(STALL_S):
            reply = await self._client.send_call(call)
        self._outcome.slowest_s = max(self._outcome.slowest_s, reply.total)
        return reply

    async def _make_noise(self) -> None:
        while True:
            prompt = self._client.make_prompt(self._rng, NOISE_TOKENS)
            await self._generate(Call(prompt=prompt, max_tokens=1))
            async with self._noise_came:
                self._noise_tokens += NOISE_TOKENS
                self._noise_came.notify_all()

    async def _wait_for_noise(self, num_tokens: int) -> None:
        until = self._noise_tokens + num_tokens
        async with self._noise_came:
            await self._noise_came.wait_for(lambda: self._noise_tokens >= until)

    async def _watch(self) -> None:
        """Sample how full the pool is of what cannot be evicted."""
        outcome = self._outcome
        for _ in itertools.count():
            stats = await self._client.stats()
            held = stats["total_tokens"] - stats["free_tokens"] - stats["evictable_tokens"]
            outcome.peak_leased = max(outcome.peak_leased, stats["leased_tokens"] / POOL_TOKENS)
            outcome.peak_demand = max(outcome.peak_demand, held / POOL_TOKENS)
            await asyncio.sleep(0.02)


async def run_handoff_check(num_pairs: int, page_sizes: list[int], seed: int, out: Path) -> int:
    """Run and print everything; returns the process's exit status."""
    outcomes: list[Outcome] = []
    print(f"{'page':>4}  {'mode':<13}{'load':>5}{'pairs':>7}{'> suffix+1':>12}{'most':>6}{'refused':>9}{'broken':>8}"
          f"{'retracted':>11}{'leased':>8}{'held':>7}{'slowest':>9}{'run s':>7}  paths")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_dummy_model(Path(folder), LLAMA_TINY)
        for page_size in page_sizes:
            for mode, load in (("continuation", 0.9), ("radix", 0.9), ("continuation", 1.3)):
                outcome = Outcome(page_size, mode, load)
                await _run_one(folder, outcome, num_pairs, seed)
                _print(outcome)
                outcomes.append(outcome)
    out.mkdir(exist_ok=True)
    cells = [vars(outcome) | {"failures": outcome.failures()} for outcome in outcomes]
    report = {"pairs": num_pairs, "seed": seed, "pool": POOL_TOKENS, "runs": cells}
    (out / "handoff_check.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(any(outcome.failures() for outcome in outcomes))


async def _run_one(folder: str, outcome: Outcome, num_pairs: int, seed: int) -> None:
    rows = int(2 * outcome.load * POOL_TOKENS) // sum(bounds[0] for bounds in (PROMPT, STAGE1, SUFFIX, STAGE2))
    client = EngineClient(
        {
            "model_path": folder,
            "load_format": "dummy",
            "max_total_tokens": POOL_TOKENS,
            "page_size": outcome.page_size,
            "context_length": 512,
            "max_running_requests": rows,
            "max_leased_requests": rows,
            "max_leased_ratio": 0.9,
        }
    )
    try:
        await client.open_session()
        await Run(client, outcome, num_pairs, seed).run()
    finally:
        await client.close()


def _print(outcome: Outcome) -> None:
    paths = ", ".join(f"{count} {path}" for path, count in outcome.paths.items() if path != "-")
    print(f"{outcome.page_size:>4}  {outcome.mode:<13}{outcome.load:>5.0%}{outcome.pairs:>7}"
          f"{outcome.recomputed_more:>12}{outcome.most_recomputed:>6}{outcome.refused:>9}{outcome.leases_broken:>8}"
          f"{outcome.retractions:>11}{outcome.peak_leased:>8.0%}{outcome.peak_demand:>7.0%}{outcome.slowest_s:>8.1f}s"
          f"{outcome.seconds:>7.0f}  {paths}", flush=True)  # fmt: skip
    for failure in outcome.failures():
        print(f"      FAILED: {failure}", flush=True)
