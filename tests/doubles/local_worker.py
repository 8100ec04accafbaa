"""A real worker without processes: model, scheduler and step runner, driven to the end by one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from baton.runtime.config import ModelArgs, TierConfig, WorkerConfig
from baton.runtime.kv_transfer.tier_io import BlocksEnded
from baton.runtime.lora.adapters import Adapters
from baton.runtime.runner.device_backends import DeviceBackends
from baton.runtime.sampling.logprobs import TokenLogprobs
from baton.runtime.step_runner import StepInFlight
from baton.runtime.worker import build_worker, connect_tiers
from baton.scheduler.beam.search import BeamGroup
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.constraints.allowed_ids import AllowedIds
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.outcome import FinishReason
from baton.scheduler.request import FoundTokens, Inheritance
from baton.scheduler.request_spec import LogprobOptions, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.forced_options import FORCED
from tests.doubles.specs import make_spec


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    """Empty for a beam search: see ``beams``."""
    beams: BeamGroup | None = None
    finish: FinishReason | None = None
    found: FoundTokens = field(default_factory=FoundTokens)
    inheritance: Inheritance | None = None
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: np.ndarray | None = None
    """Vector of a pooled prompt, float32."""

    @property
    def cached_tokens(self) -> int:
        return self.found.total


class LocalWorker:
    """``overlap``: with a step in flight, as in the event loop. ``backends``: None for those of a CPU. ``options``:
    fields of SchedulerConfig; ``model_options``: of ModelArgs."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        overlap: bool = False,
        backends: DeviceBackends | None = None,
        model_options: dict[str, Any] | None = None,
        tiers: TierConfig | None = None,
        **options: Any,
    ) -> None:
        options = {"max_total_tokens": 4096, **options}
        defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", **FORCED}
        model = ModelArgs(model_path=str(model_path), **(defaults | (model_options or {})))
        config = WorkerConfig(model=model, scheduler=SchedulerConfig(**options), tiers=tiers or TierConfig())
        worker = build_worker(config, backends)
        self.scheduler, self.step_runner, self.info = worker.scheduler, worker.step_runner, worker.info
        self.adapters = Adapters(worker.runner.adapters)
        self.tier_io = connect_tiers(worker, lambda: None)
        self._stores = worker.stores
        self.overlap = overlap
        self._count = 0

    def close(self) -> None:
        """End the threads of the tiers, and give their folder up."""
        if self.tier_io is not None:
            self.tier_io.close(10.0)
        if self._stores is not None:
            self._stores.close()

    def end_copies(self) -> None:
        """Wait for all that the tiers have ordered."""
        assert self.tier_io is not None
        while True:
            self.tier_io.submit_orders(self.scheduler.take_transfer_orders(0.0))
            if not self.tier_io.under_way:
                return
            self._end_orders()

    def _end_orders(self) -> None:
        """Tell the scheduler what is over by now."""
        for ended in self.tier_io.poll() if self.tier_io is not None else ():
            if isinstance(ended, BlocksEnded):
                self.scheduler.finish_block_order(ended.fence, ended.blocks, 0.0)
            else:
                self.scheduler.finish_copy(ended.fence, ended.ok, 0.0)

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        logprobs: LogprobOptions | None = None,
    ) -> list[Answer]:
        """One answer per prompt (n = 1), all prompts added at once."""
        every = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        specs = []
        for prompt, params in zip(prompts, every, strict=True):
            specs.append(make_spec(f"r{self._count}", prompt, params, logprobs=logprobs))
            self._count += 1
        return self.run(specs)

    def run(
        self,
        specs: list[RequestSpec],
        after_step: Callable[[], None] = lambda: None,
        items: ItemTrie | None = None,
        grammar: Constraint | None = None,
    ) -> list[Answer]:
        """One answer per spec (n = 1), all added at once, in order. items, grammar: what sampling.item_trie and
        sampling.grammar stand for."""
        answers = {spec.rid: Answer() for spec in specs}
        rids: dict[int, str] = {}
        for spec in specs:
            constraint: Constraint | None = None
            if items is not None and spec.sampling.item_trie:
                constraint = ItemConstraint(items, "items")
            if spec.sampling.allowed_token_ids:
                constraint = AllowedIds(spec.sampling.allowed_token_ids)
            if spec.sampling.grammar is not None:
                constraint = grammar
            assert constraint is not None or (spec.sampling.item_trie is None and spec.sampling.grammar is None)
            adapter = self.adapters.key_of(spec.adapter)
            requests = self.scheduler.add_request(spec, 0.0, constraint=constraint, adapter=adapter)
            rids |= {request.serial: spec.rid for request in requests}
        in_flight: deque[StepInFlight] = deque()
        while True:
            self._end_orders()
            batch = self.scheduler.next_batch(0.0)
            if self.tier_io is not None:
                self.tier_io.submit_orders(self.scheduler.take_transfer_orders(0.0))
            if batch is not None:
                in_flight.append(self.step_runner.launch(batch, in_flight[-1] if in_flight else None))
                if self.overlap and len(in_flight) == 1 and not batch.beams:
                    continue
            if not in_flight and self.tier_io is not None and self.tier_io.under_way:
                self._end_orders()
                continue
            if not in_flight:
                break
            output = self.step_runner.finish(in_flight.popleft())
            for serial, chunk in output.input_logprobs:
                answers[rids[serial]].input_logprobs.append(chunk)
            for event in self.scheduler.process_result(output.result, 0.0):
                answer = answers[event.request.rid]
                answer.tokens += event.token_ids
                answer.beams = event.request.beams
                answer.finish = event.finish
                answer.found = event.request.found
                answer.inheritance = event.request.inheritance
                if event.row in output.output_logprobs:
                    answer.output_logprobs.append(output.output_logprobs[event.row])
                answer.vector = output.vectors.get(event.row)
            if in_flight and in_flight[-1].sampled is None:
                self.scheduler.add_masks(0.0)
                self.step_runner.sample(in_flight[-1])
            after_step()
        assert self.scheduler.is_idle, f"stuck with {self.scheduler.live_requests}"
        return list(answers.values())
