"""The event loop around a real scheduler and the KV-echo model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.constraints.item_tries import ItemTries
from baton.runtime.event_loop import EventLoop
from baton.runtime.kv_transfer.transfer import Ended
from baton.runtime.lora.adapter_weights import AdapterWeights
from baton.runtime.lora.adapters import Adapters
from baton.runtime.messages import (
    RequestError,
    TokenOutputs,
)
from baton.runtime.runner.step_profile import StepProfiler
from baton.runtime.step_runner import StepOutput
from baton.runtime.text.continuation_suffixes import ContinuationSuffixes
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids, unpack_ids
from tests.doubles.kv_echo import KVEchoModel
from tests.doubles.tier_rig import FakeTiers

ROWS, CONTEXT, TOKENS = 8, 128, 512


class Launched:
    def __init__(self, batch: ScheduleBatch, sampled: Any) -> None:
        self.batch = batch
        self.sampled = sampled


class EchoRunner:
    """``failing``: numbers of the launches, or of the waits for a result, that raise."""

    def __init__(self, model: KVEchoModel) -> None:
        self.model = model
        self.failing_launches: set[int] = set()
        self.failing_waits: set[int] = set()
        self.failing_samples: set[int] = set()
        """Numbers of the steps that are sampled late."""
        self.launches = self.waits = self.sampled_late = 0
        self.most_in_flight = 0
        self.open: set[int] = set()
        """Serials of the sequences that the real runner would keep something of: samplers, stop strings."""

    def launch(self, batch: ScheduleBatch, previous: Launched | None, prepared: Callable[[], None]) -> Launched:
        self.launches += 1
        if self.launches in self.failing_launches:
            raise RuntimeError("the device is on fire")
        self.open |= {info.serial for info in batch.opened}
        self.open -= set(batch.closed)
        self.most_in_flight = max(self.most_in_flight, 1 + (previous is not None))
        prepared()
        return Launched(batch, None if batch.lacks_masks else self.model.forward(batch))

    def sample(self, step: Launched) -> None:
        self.sampled_late += 1
        if self.sampled_late in self.failing_samples:
            raise RuntimeError("the device burns")
        step.sampled = self.model.forward(step.batch)

    def finish(self, step: Launched) -> StepOutput:
        self.waits += 1
        if self.waits in self.failing_waits:
            raise RuntimeError("the device was on fire")
        assert step.sampled is not None
        return StepOutput(step.sampled)


class SlowCopies:
    """Copies between the tiers; each ends when it has been polled ``turns`` times."""

    def __init__(self, tiers: FakeTiers) -> None:
        self.tiers = tiers
        self.turns = 3
        self.fails = False
        self._polls = 0

    def submit_orders(self, orders: list[Any]) -> None:
        self.tiers.order(orders)
        self.tiers.load_all()

    @property
    def under_way(self) -> int:
        return len(self.tiers)

    def poll(self) -> list[Ended]:
        self._polls += 1
        if self._polls % self.turns:
            return []
        return [Ended(end.fence, end.ok and not self.fails, 0.001) for end in self.tiers.take_ended()]


class Rig:
    """An inbox that hands out what was put there, an outbox that holds what is sent and keeps what is delivered; `run`
    ends when nothing is left to do."""

    def __init__(self, *, overlap: bool, host_tokens: int = 0, **limits: Any) -> None:
        """host_tokens: of a host tier; 0 for none. limits: other fields of SchedulerConfig; unless they name a policy,
        only what requests ask for is leased."""
        config = SchedulerConfig(
            context_length=CONTEXT,
            max_total_tokens=TOKENS,
            max_running_requests=ROWS,
            max_leased_requests=2,
            chunked_prefill_size=32,
            **{"schedule_policy": "fcfs", **limits},
        )
        pool, allocator = ReqToTokenPool(config.num_rows, CONTEXT), Allocator(TOKENS, 1, check=True)
        cache = RadixCache(pool, allocator, page_size=1)
        model = KVEchoModel(TOKENS + 1, config.num_rows, CONTEXT)
        self.tiers = FakeTiers(cache, model, host_tokens=host_tokens) if host_tokens else None
        self.tier_io: Any = SlowCopies(self.tiers) if self.tiers is not None else None
        host = self.tiers.host if self.tiers is not None else None
        self.scheduler = Scheduler(config, pool, allocator, cache, (), host)
        self.step_runner: Any = EchoRunner(model)
        self.timeouts: list[float] = []
        """Timeout of every look into the inbox while copies between tiers were in flight."""
        self.inbox: deque[list[Any]] = deque()
        self.held: list[Any] = []
        self.sent: list[Any] = []
        self.stop = threading.Event()
        inbox: Any = self
        suffixes = ContinuationSuffixes(lambda: None, 8)  # type: ignore[arg-type, return-value]
        self.profiler = StepProfiler(torch.device("cpu"))
        self.now = 0.0
        self.seconds_per_turn = 0.0
        self.watched: list[tuple[float, int, bool]] = []
        """Time, steps launched before, and whether idle work came before, whenever the processor was looked at."""
        self.loop = EventLoop(
            scheduler=self.scheduler,
            step_runner=self.step_runner,
            inbox=inbox,
            outbox=inbox,
            suffixes=suffixes,
            item_tries=ItemTries(1000),
            grammars=Grammars(cast(Any, None), 1000, ()),
            adapters=Adapters(AdapterWeights({}, dtype=torch.float32, device=torch.device("cpu"))),
            info={},
            profiler=self.profiler,
            overlap=overlap,
            clock=self.clock,
            tier_io=self.tier_io,
            watch_threads=lambda now, *, after_idle_work: self.watched.append(
                (now, self.step_runner.launches, after_idle_work)
            ),
        )

    def clock(self) -> float:
        return self.now

    def poll(self, timeout: float) -> list[Any]:
        self.now += self.seconds_per_turn
        if self.tier_io is not None and self.tier_io.under_way:
            self.timeouts.append(timeout)
        if self.inbox:
            return self.inbox.popleft()
        if self.scheduler.is_idle and not (self.tier_io is not None and self.tier_io.under_way):
            self.stop.set()
        return []

    def send(self, message: Any) -> None:
        self.held.append(message)

    def flush(self) -> None:
        self.sent += self.held
        self.held.clear()

    def run(self) -> None:
        self.stop.clear()
        self.loop.run(self.stop)

    def said(self, rid: str) -> list[int]:
        items = [item for message in self.sent if isinstance(message, TokenOutputs) for item in message.items]
        return [int(token) for item in items if item.rid == rid for token in unpack_ids(item.new_ids)]

    def errors(self) -> dict[str, RequestError]:
        return {message.rid: message for message in self.sent if isinstance(message, RequestError)}

    def finishes(self, rid: str) -> list[str]:
        items = [item for message in self.sent if isinstance(message, TokenOutputs) for item in message.items]
        return [item.finish.type for item in items if item.rid == rid and item.finish is not None]


def ask(rid: str, prompt: list[int], new: int = 6, **more: Any) -> RequestSpec:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new, **more)
    return RequestSpec(rid=rid, input_ids=pack_ids(np.array(prompt)), sampling=sampling)
