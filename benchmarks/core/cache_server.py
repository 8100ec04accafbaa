"""A radix cache with its pools, driven without scheduler and model, and the agent trace for its benchmarks."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.radix.eviction.registry import ORDERS
from baton.radix.kv_sequence import KVSequence
from baton.runtime.config import KVEventConfig
from baton.runtime.kv_events.publisher import KVEventPublisher

VOCABULARY = 32_000


class CacheServer:
    """The three parts a scheduler would hold, and the calls it would make."""

    def __init__(
        self,
        num_tokens: int,
        num_rows: int = 64,
        max_context: int = 131_072 + 64,
        page_size: int = 1,
        eviction: str = "lru",
    ) -> None:
        self.rows = ReqToTokenPool(num_rows, max_context)
        self.allocator = Allocator(num_tokens // page_size * page_size, page_size)
        self.cache = RadixCache(self.rows, self.allocator, page_size=page_size, lanes=ORDERS[eviction](num_tokens))
        self.events: KVEventPublisher | None = None

    def publish_events(self) -> None:
        """Begin to tell followers what is cached, on free ports."""
        here = "tcp://127.0.0.1:0"
        config = KVEventConfig(kv_events_endpoint=here, kv_events_replay_endpoint=here)
        self.events = KVEventPublisher(config, self.cache.page_size)
        self.events.watch_cache(self.cache, None)

    def end_step(self) -> None:
        """The work of a worker in each step."""
        self.rows.take_updates()
        if self.events is not None:
            self.events.publish_events()

    def start(self, ids: np.ndarray, length: int, namespace: str = "") -> KVSequence:
        """Match ids[:-1], lock, evict if needed, allocate slots up to ``length``, write the row."""
        match = self.cache.match_prefix(namespace, ids[:-1])
        row = self.rows.alloc()
        assert row is not None
        seq = self.cache.open_sequence(namespace, match, row)
        self.extend(seq, length)
        return seq

    def extend(self, seq: KVSequence, length: int) -> None:
        old = np.array([seq.length], dtype=np.int32)
        new = np.array([length], dtype=np.int32)
        short = self.allocator.tokens_needed(old, new) - self.allocator.free_tokens
        if short > 0:
            self.make_room(short)
        last = max(seq.length - 1, 0)
        slots = self.allocator.alloc_extend(old, new, self.rows.rows[seq.row, last : last + 1])
        assert slots is not None
        self.rows.write(seq.row, seq.length, slots)
        seq.length = length

    def make_room(self, tokens: int) -> None:
        self.cache.evict(tokens)

    def insert(self, ids: np.ndarray, namespace: str = "") -> None:
        self.cache.cache_finished_req(self.start(ids, len(ids), namespace), ids)


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


@dataclass
class Trace:
    """1000 jobs × 8 turns, 20 shared system prompts of 500 tokens, 75–225 tokens in and out per turn."""

    active_jobs: int
    page_size: int = 1
    seed: int = 0
    num_jobs: int = 1000
    turns: int = 8
    in_flight: int = 16
    pool: int = 500_000
    kv_events: bool = False
    hit_rate: float = 0.0
    prompt_tokens: float = 0.0

    def measure(self) -> float:
        """Replays the trace; µs per turn. Only calls into the runtime are timed, not the making of token ids."""
        rng, choose = np.random.default_rng(self.seed), random.Random(self.seed)
        prompts = [random_ids(rng, 500) for _ in range(20)]
        server = CacheServer(self.pool, self.in_flight, 8192, self.page_size)
        if self.kv_events:
            server.publish_events()
        ids_of: dict[int, np.ndarray] = {}
        turn_of: dict[int, int] = {}
        next_job = 0
        idle: list[int] = []
        running: deque[tuple[int, KVSequence, np.ndarray]] = deque()
        queried = hit = done = 0
        elapsed = 0.0
        while True:
            while next_job < self.num_jobs and len(idle) + len(running) < self.active_jobs:
                ids_of[next_job], turn_of[next_job] = prompts[choose.randrange(20)], 0
                idle.append(next_job)
                next_job += 1
            if running and (len(running) == self.in_flight or not idle):
                job, seq, ids = running.popleft()
                begin = time.perf_counter()
                server.cache.cache_finished_req(seq, ids)
                elapsed += time.perf_counter() - begin
                done += 1
                if turn_of[job] < self.turns:
                    idle.append(job)
                continue
            if not idle:
                break
            at = choose.randrange(len(idle))
            idle[at], idle[-1] = idle[-1], idle[at]
            job = idle.pop()
            new_in, new_out = choose.randint(75, 225), choose.randint(75, 225)
            ids = np.concatenate([ids_of[job], random_ids(rng, new_in + new_out)])
            prompt_len = len(ids) - new_out
            begin = time.perf_counter()
            seq = server.start(ids[:prompt_len], prompt_len)
            hit += seq.tree_len
            server.cache.cache_unfinished_req(seq, ids[:prompt_len])
            server.extend(seq, len(ids))
            server.end_step()
            elapsed += time.perf_counter() - begin
            queried += prompt_len
            ids_of[job] = ids
            turn_of[job] += 1
            running.append((job, seq, ids))
        if server.events is not None:
            server.events.close()
        self.hit_rate = hit / queried
        self.prompt_tokens = queried / done
        return elapsed / done * 1e6


@dataclass(frozen=True)
class TreeMemory:
    """MB of host memory that a tree takes; the pools not counted."""

    traced: float
    """Memory allocated by Python and numpy."""
    resident: float
    """By how much the process has grown."""


def tree_memory(tokens: int = 1_000_000, node_tokens: int = 64) -> TreeMemory:
    """Figures of a randomly branching tree of so many tokens, with nodes of this length on average. Each figure is from
    its own process."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        return TreeMemory(*(processes.apply(measure, (tokens, node_tokens)) for measure in (_traced_mb, _resident_mb)))


def _traced_mb(tokens: int, node_tokens: int) -> float:
    server = CacheServer(tokens + 2 * node_tokens, max_context=16_384)
    tracemalloc.start()
    _grow(server, tokens, node_tokens)
    return tracemalloc.get_traced_memory()[0] / 1e6


def _resident_mb(tokens: int, node_tokens: int) -> float:
    small = CacheServer(100 * node_tokens, max_context=16_384)
    _grow(small, 50 * node_tokens, node_tokens)  # what is imported and made once
    server = CacheServer(tokens + 2 * node_tokens, max_context=16_384)
    server.rows.rows.fill(1)  # numpy's zeros take no memory until they are written to
    before = _resident_bytes()
    _grow(server, tokens, node_tokens)
    return (_resident_bytes() - before) / 1e6


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _grow(server: CacheServer, tokens: int, node_tokens: int) -> None:
    rng, choose = np.random.default_rng(0), random.Random(0)
    paths: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    while server.cache.evictable_tokens < tokens - 2 * node_tokens:
        above = choose.choice(paths)
        ids = np.concatenate([above[:4096], random_ids(rng, choose.randint(1, 2 * node_tokens))])
        server.insert(ids)
        server.rows.take_updates()
        if len(paths) < 500:
            paths.append(ids)
        else:
            paths[choose.randrange(1, 500)] = ids
