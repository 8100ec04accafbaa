"""The compared engines, all in this process: one without tiers, one with a host tier, one with host and disk tiers.
Same weights, same pool on the device."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import dataclasses
import json
import os
import pstats
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from baton.runtime.channels import Endpoints
from baton.runtime.config import TierConfig, WorkerConfig
from baton.runtime.stop_signal import StopSignal
from baton.runtime.worker import Worker, build_worker, run_worker
from benchmarks.common.clients import EngineClient

HAS_DISK = "disk_cache_path" in {field.name for field in dataclasses.fields(TierConfig)}
NO_DISK = "skipped: this server has no --disk-cache-path"

SETTLE_S = 0.25
"""After the last answer, for copies that are still under way."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Sizes of an engine, in tokens."""

    device: int
    context: int
    host: int
    """The whole of what is kept, where there is no disk."""
    max_running: int = 16
    max_leased: int = 16

    @property
    def host_before_disk(self) -> int:
        """Where there is a disk, the host keeps a fraction."""
        return self.host // 4


class TierEngine(EngineClient):
    """The CPU time of its scheduler's thread can be read while it runs.

    cprofile: print what that thread did, once it has ended.
    """

    def __init__(self, name: str, settings: dict[str, Any], *, cprofile: bool = False) -> None:
        self.name = name
        self._disk = settings.get("disk_cache_path")
        self._profile = cProfile.Profile() if cprofile else None
        self._cpu_clock = 0
        super().__init__(settings | {"worker": self._run_worker})

    def _run_worker(self, config: WorkerConfig, endpoints: Endpoints, stop: StopSignal) -> None:
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        if self._profile is None:
            run_worker(config, endpoints, stop)
        else:
            self._profile.runcall(run_worker, config, endpoints, stop)

    def drop_page_cache(self) -> None:
        """Drop the system's page cache, so that the next read is from disk."""
        if self._disk:
            drop_page_cache(Path(self._disk))

    def cpu_s(self) -> float:
        """CPU seconds of the scheduler's thread so far; the threads that help it compute do not count."""
        return time.clock_gettime(self._cpu_clock)

    async def close(self) -> None:
        await super().close()
        if self._profile is not None:
            print(f"\n{self.name}: the scheduler's thread")
            pstats.Stats(self._profile).sort_stats("tottime").print_stats(30)


def build_with_cpu_clock(config: WorkerConfig, **options: Any) -> Worker:
    worker = build_worker(config, **options)
    worker.profiler._clock = time.thread_time
    return worker


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Settings that all engines of a run share."""

    folder: Path
    """The model's folder."""
    page_size: int
    linear_backend: str
    write_policy: str
    cprofile: str
    """Name of the engine to profile, if any."""

    @property
    def vocab_size(self) -> int:
        return json.loads((self.folder / "config.json").read_text())["vocab_size"]

    def settings(self, name: str, pools: Pools, disk: Path | None = None) -> dict[str, Any]:
        page = self.page_size
        device = -(-pools.device // page) * page
        chosen: dict[str, Any] = {
            "model_path": str(self.folder),
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "float32",
            "linear_backend": self.linear_backend,
            "page_size": page,
            "context_length": pools.context,
            "max_total_tokens": device,
            "max_running_requests": pools.max_running,
            "max_leased_requests": pools.max_leased,
            "max_leases_per_client": pools.max_leased,
            "max_leased_ratio": 1.0,
            "max_client_leased_ratio": 1.0,
            "lease_protection": 1e-3,
        }
        if name == "host":
            chosen |= {"host_cache_ratio": pools.host / device, "host_write_policy": self.write_policy}
        if name == "disk":
            chosen |= {"host_cache_ratio": pools.host_before_disk / device, "host_write_policy": self.write_policy}
            chosen |= {"disk_cache_path": str(disk), "disk_cache_gb": 8.0}
        return chosen

    def make(self, name: str, pools: Pools, *, kind: str | None = None, disk: Path | None = None) -> TierEngine:
        """kind: device, host or disk; the name, where it is one of them."""
        settings = self.settings(kind or name, pools, disk)
        return TierEngine(name, settings, cprofile=name == self.cprofile)

    @contextlib.asynccontextmanager
    async def running(self, names: Sequence[str], pools: Pools) -> AsyncIterator[dict[str, TierEngine]]:
        """Engines by name, all open at once. A name that ends in " again" is a second one of its kind. Profiles of
        their steps are of CPU time: what other processes do on the cores is not in them."""
        engines: dict[str, TierEngine] = {}
        timed = mock.patch("baton.runtime.worker.build_worker", build_with_cpu_clock)
        with tempfile.TemporaryDirectory() as disk, timed:
            try:
                for name in names:
                    kind = name.removesuffix(" again")
                    engines[name] = self.make(name, pools, kind=kind, disk=Path(disk))
                    await engines[name].open_session()
                yield engines
            finally:
                for engine in engines.values():
                    await engine.close()


def drop_page_cache(folder: Path) -> None:
    """Write what is still to be written of the files in a folder, and have the system forget them."""
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed or renamed meanwhile
            if file.is_file():
                number = os.open(file, os.O_RDONLY)
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)


async def written(folder: Path, quiet_s: float = 1.0) -> int:
    """Wait until the files in a folder have stopped growing; their bytes."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix != ".tmp" and file.is_file())
        if size != seen:
            seen, since = size, time.monotonic()
        await asyncio.sleep(0.05)
    return seen


def tiers_to_compare() -> list[str]:
    return ["device", "host", "disk"] if HAS_DISK else ["device", "host"]


def turns(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, name): in order, in reverse order every other round."""
    return [(number, name) for number in range(rounds) for name in (names if number % 2 == 0 else names[::-1])]


def goal(what: str, value: float, limit: float, *, at_least: bool, half_width: float = 0.0) -> dict[str, Any]:
    """JSON: a figure and whether it is where it should be. half_width: of its confidence interval, where it has one."""
    met = value >= limit if at_least else value <= limit
    verdict = "undecided" if abs(value - limit) < half_width else "met" if met else "missed"
    return {
        "what": what,
        "value": value,
        "half_width": half_width,
        "goal": limit,
        "at_least": at_least,
        "verdict": verdict,
    }
