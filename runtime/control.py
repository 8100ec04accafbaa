"""Answers control calls in the worker: information, the cache, item tries, profiles. One reply for each call."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from ..scheduler.cache_stats import CacheStats, describe
from ..scheduler.constraints.item_trie import ItemTrieError
from ..scheduler.scheduler import Scheduler
from ..scheduler.stats import SchedulerStats, TierStats
from .channels import Sender
from .constraints.item_tries import ItemTries, unpack_trie
from .messages import ControlReply, ControlRequest, DeleteItemTrie, LoadItemTrie
from .runner.step_profile import StepProfiler


class Control:
    """Handles control calls, between two steps of the event loop."""

    def __init__(
        self, scheduler: Scheduler, item_tries: ItemTries, profiler: StepProfiler, info: dict, outbox: Sender
    ) -> None:
        """info: the worker's description of itself."""
        self._scheduler = scheduler
        self._item_tries = item_tries
        self._profiler = profiler
        self._info = info
        self._outbox = outbox
        self.paused = False
        """True while no step may be launched."""

    def handle_call(self, message: ControlRequest | LoadItemTrie | DeleteItemTrie) -> None:
        match message:
            case LoadItemTrie():
                self._load_item_trie(message)
            case DeleteItemTrie():
                self.send_reply(message.call_id, self._item_tries.delete(message.name))
            case ControlRequest():
                self._control(message)

    def send_reply(self, call_id: int, payload: object, *, ok: bool = True) -> None:
        """payload: anything that JSON can express."""
        self._outbox.send(ControlReply(call_id=call_id, ok=ok, payload=msgspec.json.encode(payload)))

    def _load_item_trie(self, message: LoadItemTrie) -> None:
        try:
            self._item_tries.put(message.name, unpack_trie(message))
        except ItemTrieError as error:
            self.send_reply(message.call_id, str(error), ok=False)
            return
        self.send_reply(message.call_id, None)

    def _control(self, message: ControlRequest) -> None:
        match message.verb:
            case "flush_cache":
                flushed = self._scheduler.flush_cache()
                reason = None if flushed else "requests are running; the cache is flushed only when none is"
                self.send_reply(message.call_id, reason, ok=flushed)
            case "info":
                self.send_reply(message.call_id, {**self._info, "stats": self._stats()})
            case "tiers":
                self.send_reply(message.call_id, report_tiers(self._scheduler.stats(), self._info["tiers"]))
            case "statistics":
                self.send_reply(message.call_id, self._described(self._scheduler.cache_stats_since_reset()))
            case "reset_statistics":
                self._scheduler.reset_cache_statistics()
                self.send_reply(message.call_id, None)
            case "pause" | "resume":
                self.paused = message.verb == "pause"
                self.send_reply(message.call_id, None)
            case "item_tries":
                self.send_reply(message.call_id, self._item_tries.describe())
            case "start_profile":
                self._start_profile(message.call_id)
            case "stop_profile":
                self._stop_profile(message.call_id)
            case verb:
                known = "flush_cache, info, tiers, statistics, reset_statistics, pause, resume, item_tries, "
                known += "start_profile, stop_profile"
                self.send_reply(message.call_id, f"unknown control verb {verb!r}; known: {known}", ok=False)

    def _stats(self) -> dict:
        stats = self._scheduler.stats()
        return {**msgspec.structs.asdict(stats), "cache": self._described(stats.cache)}

    def _described(self, cache: CacheStats) -> dict:
        return describe(cache, self._scheduler.hit_rate_alert)

    def _start_profile(self, call_id: int) -> None:
        if self._profiler.recording:
            self.send_reply(call_id, "steps are being profiled already; stop_profile ends that", ok=False)
            return
        self._profiler.start()
        self.send_reply(call_id, None)

    def _stop_profile(self, call_id: int) -> None:
        if not self._profiler.recording:
            self.send_reply(call_id, "no steps are being profiled; start_profile begins that", ok=False)
            return
        self.send_reply(call_id, self._profiler.stop())


TIERS = ("host", "disk", "remote")
"""Tiers below the device."""


def report_tiers(stats: SchedulerStats, settings: dict[str, Any]) -> dict[str, Any]:
    """settings: the worker's ``info["tiers"]``. A tier that is not there is None."""
    size = stats.bytes_per_token
    tiers = {tier.tier: tier for tier in stats.tiers}
    hits = {name: getattr(stats.hits_by_tier, name) for name in ("device", *TIERS)}
    device = {
        "total_tokens": stats.total_tokens,
        "free_tokens": stats.free_tokens,
        "evictable_tokens": stats.evictable_tokens,
        "protected_tokens": stats.protected_tokens,
        "private_tokens": stats.private_tokens,
        "quarantined_tokens": stats.quarantined_tokens,
        "total_gib": _gib(stats.total_tokens * size),
        "evicted_tokens": stats.evicted_tokens,
        "hit_tokens": hits["device"],
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
    }
    below = {name: _tier(tiers[name], size, hits[name]) if name in tiers else None for name in TIERS}
    if (host := below["host"]) is not None:
        host["write_policy"], host["copied_by"] = settings["host_write_policy"], settings["host_copied_by"]
    return {"bytes_per_token": size, "open_fences": stats.open_fences, "device": device, **below}


def _tier(tier: TierStats, size: int, hits: int) -> dict[str, Any]:
    shown = asdict(tier)
    for name in ("tier", "total_bytes", "used_bytes"):
        del shown[name]
    shown |= {"total_gib": _room(tier.total_bytes, tier.total_tokens, size)}
    shown |= {"used_gib": _room(tier.used_bytes, tier.used_tokens, size)}
    for way in ("stores", "loads"):
        shown[way]["gib"] = _gib(shown[way]["tokens"] * size)
    return shown | {"hit_tokens": hits}


def _room(count: int | None, tokens: int | None, size: int) -> float | None:
    """Bytes, or else tokens of this size, in GiB."""
    if count is None and tokens is None:
        return None
    return _gib(tokens * size if count is None and tokens is not None else count or 0)


def _gib(count: int) -> float:
    return round(count / 2**30, 6)
