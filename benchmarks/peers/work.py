"""The work of each unit: its requests to an engine, and the figures taken from the answers. Drivers take the times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.clients import random_ids
from benchmarks.peers.driver import EngineFailed

Ids = list[int]
Ask = Callable[..., Any]
"""`Driver.ask` with the limit filled in: a method's name and its keywords -> what it returns."""

SUFFIX, STAGE2 = 3, 3
"""Tokens that stage 2 adds, and that it generates."""


@dataclass
class Found:
    """figures: by the name of the metric. greedy: outputs to compare between engines. extra: goes to the JSON."""

    figures: dict[str, float]
    greedy: list[Ids] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompts:
    """Random prompts of one turn: the same for every engine, and never the same again."""

    seed: tuple[int, ...]
    vocab_size: int

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def make(self, rng: np.random.Generator, number: int, length: int) -> list[Ids]:
        return [random_ids(rng, length, self.vocab_size) for _ in range(number)]


def generate(ask: Ask, requests: list[dict[str, Any]], *, stream: bool = False) -> dict[str, Any]:
    """As asked; every request has as many tokens as it wanted."""
    done = ask("generate", requests=requests, stream=stream)
    counts = [each.get("tokens", len(each["ids"])) for each in done["requests"]]
    wanted = [each["tokens"] for each in requests]
    if counts != wanted:
        raise EngineFailed(f"generated {counts} tokens where {wanted} were wanted")
    return done


@dataclass(frozen=True)
class Throughput:
    """All at once: tokens of prompts and outputs per second of the whole."""

    metric: str
    requests: int
    prompt: int
    tokens: int

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        requests = [
            {"ids": ids, "tokens": self.tokens} for ids in prompts.make(prompts.rng(), self.requests, self.prompt)
        ]
        done = generate(ask, requests)
        tokens = self.requests * (self.prompt + self.tokens)
        return Found({self.metric: tokens / done["seconds"]}, [each["ids"] for each in done["requests"]])


@dataclass(frozen=True)
class Prefill:
    """One prompt after the other; the median of them."""

    metric: str
    prompt: int
    repeats: int

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        done = [
            generate(ask, [{"ids": ids, "tokens": 1}]) for ids in prompts.make(prompts.rng(), self.repeats, self.prompt)
        ]
        seconds = [each["seconds"] for each in done]
        greedy = [each["requests"][0]["ids"] for each in done]
        return Found({self.metric: self.prompt / median(seconds)}, greedy, {"seconds": seconds})


SMALL_PIECE = 256
"""Tokens of a prompt that an engine computes in a step, at least."""


@dataclass(frozen=True)
class Steps:
    """Milliseconds between the steps of the engine's own loop while a whole batch decodes: the 20th percentile, which
    says what a step takes where a machine is not quite quiet. The median goes to the JSON."""

    metrics: dict[int, str]
    """By batch size."""
    context: int
    tokens: int
    """Tokens of the request that begins last. Engines that compute prompts in pieces, and decode meanwhile, need more
    tokens of those that begin first."""

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        rng, found = prompts.rng(), Found({})
        for batch, metric in self.metrics.items():
            tokens = self.tokens + batch * self.context // SMALL_PIECE
            requests = [{"ids": ids, "tokens": tokens} for ids in prompts.make(rng, batch, self.context)]
            done = generate(ask, requests, stream=True)
            gaps = done["steps_s"]
            if len(gaps) < self.tokens // 4:  # those that began first may end while others begin
                raise EngineFailed(f"{len(gaps)} steps of the whole batch of {batch} in {tokens} tokens")
            found.figures[metric] = float(np.percentile(gaps, 20)) * 1e3
            found.extra[metric] = {"steps": len(gaps), "median_ms": median(gaps) * 1e3}
            found.greedy += [each["ids"] for each in done["requests"]]
        return found


@dataclass(frozen=True)
class Decode:
    """Tokens per second while streams of equal length all decode, prompts excluded: by the wall clock from the first
    step in which all do to the last."""

    metrics: dict[int, str]
    """By streams."""
    prompt: int
    tokens: int
    """Tokens of the stream that begins last, see `Steps`."""

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        rng, found = prompts.rng(), Found({})
        for streams, metric in self.metrics.items():
            tokens = self.tokens + streams * self.prompt // SMALL_PIECE
            requests = [{"ids": ids, "tokens": tokens} for ids in prompts.make(rng, streams, self.prompt)]
            done = generate(ask, requests, stream=True)
            gaps = done["steps_s"]
            if len(gaps) < self.tokens // 4:
                raise EngineFailed(f"{len(gaps)} steps of all {streams} streams in {tokens} tokens")
            found.figures[metric] = streams * len(gaps) / sum(gaps)
            found.extra[metric] = {"steps": len(gaps), "median_ms": median(gaps) * 1e3, "least_ms": min(gaps) * 1e3}
            found.greedy += [each["ids"] for each in done["requests"]]
        return found


@dataclass(frozen=True)
class Settle:
    """Work of all kinds, and a rest: then memory is read."""

    streams: int
    prompt: int
    rest_s: float = 1.0

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        rng = prompts.rng()
        generate(ask, [{"ids": ids, "tokens": 8} for ids in prompts.make(rng, 1, self.prompt)])
        generate(ask, [{"ids": ids, "tokens": 8} for ids in prompts.make(rng, self.streams, 32)])
        time.sleep(self.rest_s)
        return Found({})


@dataclass(frozen=True)
class TwoStages:
    """Stage 1 samples, and stage 2 follows with a few more ids: time to its first token, or the time of its search.

    evicted: other prompts take the cache between the stages. That is really done where a lease holds what is needed
    (ours); where nothing can hold it, stage 2 is sent with a prompt that was never there, which costs the same.
    """

    metric: str
    at_once: int
    groups: int
    prompt: int
    stage1: int
    width: int = 0
    """Width of the beam search; 0: stage 2 generates."""
    evicted: bool = False

    def __call__(self, ask: Ask, prompts: Prompts) -> Found:
        rng = prompts.rng()
        wholes = [self._stage1(ask, prompts, rng) for _ in range(self.groups)] if self.evicted else []
        if self.evicted and not ask("press")["tokens"]:
            length = len(wholes[0][0]["ids"])
            for request in (request for group in wholes for request in group):
                request["ids"] = random_ids(rng, length, prompts.vocab_size)
        times: list[float] = []
        extra: dict[str, Any] = {}
        for number in range(self.groups):
            second = wholes[number] if self.evicted else self._stage1(ask, prompts, rng)
            times += self._search(ask, second) if self.width else self._stage2(ask, second, extra)
        return Found({self.metric: median(times) * 1e3}, extra={"ms": [1e3 * time for time in times], **extra})

    def _stage1(self, ask: Ask, prompts: Prompts, rng: np.random.Generator) -> list[dict[str, Any]]:
        """-> the requests of stage 2"""
        begun = prompts.make(rng, self.at_once, self.prompt)
        (suffix,) = prompts.make(rng, 1, SUFFIX)
        firsts = [{"ids": ids, "tokens": self.stage1, "seed": seed, "keep": True} for seed, ids in enumerate(begun)]
        done = generate(ask, firsts)["requests"]
        return [
            {"ids": ids + first["ids"] + suffix, "tokens": STAGE2, "parent": first["name"], "suffix": suffix}
            for ids, first in zip(begun, done, strict=True)
        ]

    def _stage2(self, ask: Ask, requests: list[dict[str, Any]], extra: dict[str, Any]) -> list[float]:
        found = generate(ask, requests, stream=True)["requests"]
        check_paths([each["path"] for each in found if "path" in each])
        extra["cached"] = extra.get("cached", []) + [each.get("cached") for each in found]
        return [each["first_s"] for each in found]

    def _search(self, ask: Ask, requests: list[dict[str, Any]]) -> list[float]:
        done = ask("beam", requests=requests, width=self.width, steps=STAGE2)
        check_paths(done.get("paths", []))
        for beams in done["sequences"]:
            distinct, lengths = len(set(map(tuple, beams))), {len(ids) for ids in beams}
            if distinct != self.width or lengths != {STAGE2}:
                raise EngineFailed(f"a search of width {self.width} found {distinct} sequences of lengths {lengths}")
        return done["seconds"]


def check_paths(paths: list[str | None]) -> None:
    """Check continuations: the second stage must have taken over the first one's KV."""
    if any(path != "handoff" for path in paths):
        raise EngineFailed(f"stage 2 was not handed off: {paths}")
