"""Measures the host time per step, for scheduler, upload and outputs, with a model that takes no time.

    python -m benchmarks.core.host_time [--batch-sizes 1 16 64 256] [--plain] [--cprofile decode] [--plot]

The event loop, the scheduler, the step runner with its sampler, the upload and the channels are the server's own, on
one thread; only the model is a double that answers every step with the same logits. Four kinds of steps:

    decode   every running request gets a token and streams it
    states   the same, of a model with recurrent states: the rows' states are planned and uploaded, too; beside it, in
             turn, plain decodes
    extend   a batch of continuations with 8 ids each goes on from leased requests: messages, handoff, step, outputs
    beam     the same, but each continuation is a beam search of width 32 for 3 tokens; size counts the searches

Host time is receive + schedule + plan + commit (see runtime/runner/step_profile.py): with a GPU all of it but the
beams' can hide behind the device. The launch is left out: the sampler on a CPU is not what a GPU's host does. By
default one step is in flight while the next is formed, as on a GPU; --plain waits for each. Times are the thread's CPU
time, so that other programs on the cores matter less. Prints a table, writes host_time.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.memory_pool.state_pool import StatePool, StateShape, StateTensor
from baton.memory_pool.state_slots import StateSlots
from baton.radix.cache import RadixCache
from baton.radix.node_states import NodeStates
from baton.runtime.channels import Endpoints, Receiver, Sender
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.constraints.item_tries import ItemTries
from baton.runtime.event_loop import EventLoop
from baton.runtime.layers.states.state_batch import StatePlanner
from baton.runtime.lora.adapter_weights import AdapterWeights
from baton.runtime.lora.adapters import Adapters
from baton.runtime.messages import FromWorker, ToWorker
from baton.runtime.runner.forward_batch import attention_batch, build_forward_batch
from baton.runtime.runner.model_runner import ForwardOutput
from baton.runtime.runner.step_profile import StepProfiler
from baton.runtime.sampling.sampler import Sampler
from baton.runtime.step_runner import StepRunner
from baton.runtime.text.continuation_suffixes import ContinuationSuffixes
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.profile_table import plot_profiles, print_profiles

VOCAB = 256
BEAMS = 32
PROMPT, SUFFIX = 700, 8
BLOCKS = 10
"""Parts of a measurement of decodes, between which another one has its turn."""
GOAL_MS, GOAL_BATCH_SIZE = 1.0, 64
GOAL_STATES = 1.1
"""Host time of a decode step with states over that of one without."""
STATE: StateShape = {"conv": StateTensor((2, 16), torch.float32)}

Kinds = dict[str, dict[str, Any]]
"""The figures of a profile, by kind of step."""


class FreeRunner:
    """A model runner that uploads and plans a step as a real one does, and then has the answer ready."""

    def __init__(
        self, num_rows: int, context: int, max_rows: int, profiler: StepProfiler, states: StatePool | None
    ) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=())
        self.device = torch.device("cpu")
        self.profiler = profiler
        self._states = StatePlanner(states) if states is not None else None
        self._mirror = torch.zeros(num_rows + 1, context, dtype=torch.int32)  # the last row is padding
        self._logits = torch.randn(max_rows, VOCAB, generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def forward(
        self,
        batch: ScheduleBatch,
        previous_ids: torch.Tensor | None = None,
        prepared: Callable[[], None] = lambda: None,
        adapters: Sequence[str] = (),
    ) -> ForwardOutput:
        build_forward_batch(batch, attention_batch(batch, self._mirror), previous_ids)
        if self._states is not None and batch.states is not None:
            _ = self._states.plan_states(batch.states, batch.extend_lens).table  # as the compiled kernels take them
        prepared()
        self.profiler.lap("plan")
        return ForwardOutput(self._logits[: int(batch.samples.sum())], None)


class Turns(threading.Event):
    """The loop's stop signal: set after so many turns, or as soon as ``done`` says so."""

    def __init__(self, count: int, done: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._left, self._done = count, done

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0 or self._done()


class Rig:
    """A worker with a free model; its clients are this object. stateful: the model has recurrent states."""

    def __init__(self, max_running: int, max_leased: int, *, overlap: bool, stateful: bool = False) -> None:
        context = 2048
        tokens = (max_running + max_leased) * context
        config = SchedulerConfig(
            context_length=context,
            max_total_tokens=tokens,
            max_running_requests=max_running,
            max_leased_requests=max_leased,
            max_leased_ratio=0.9,
            chunked_prefill_size=max(2048, max_running * PROMPT),
        )
        pool, allocator = ReqToTokenPool(config.num_rows, context), Allocator(tokens)
        states, nodes = None, None
        if stateful:
            states = StatePool(4 * config.num_rows, [STATE], torch.device("cpu"))
            nodes = NodeStates(StateSlots(states.num_states, fences=allocator.fences), align=1)
        cache = RadixCache(pool, allocator, page_size=1, states=nodes)
        self.scheduler = Scheduler(config, pool, allocator, cache, ())
        self.profiler = StepProfiler(torch.device("cpu"), time.thread_time)
        runner: Any = FreeRunner(config.num_rows, context, max_running, self.profiler, states)
        step_runner = StepRunner(runner, Sampler(VOCAB, (), "cpu"), cast(Any, None), self.profiler)
        endpoints = Endpoints.for_threads()
        self._inbox: Receiver[ToWorker] = Receiver(endpoints.to_worker, ToWorker)
        self._client_inbox: Receiver[FromWorker] = Receiver(endpoints.to_detokenizer, FromWorker)
        self._client, self._outbox = Sender(endpoints.to_worker), Sender(endpoints.to_detokenizer)
        suffixes = ContinuationSuffixes(cast(Any, None), config.max_finished_requests)
        self.loop = EventLoop(
            scheduler=self.scheduler,
            step_runner=step_runner,
            inbox=self._inbox,
            outbox=self._outbox,
            suffixes=suffixes,
            item_tries=ItemTries(VOCAB),
            grammars=Grammars(cast(Any, None), VOCAB, ()),
            adapters=Adapters(AdapterWeights({}, dtype=torch.float32, device=torch.device("cpu"))),
            info={},
            profiler=self.profiler,
            overlap=overlap,
        )
        gc.collect()
        gc.freeze()  # as the worker does

    def ask(
        self, rid: str, ids: np.ndarray, *, parent: str | None = None, retain: bool = False, **sampling: Any
    ) -> None:
        self._client.send(
            RequestSpec(
                rid=rid,
                input_ids=pack_ids(ids),
                sampling=SamplingParams(temperature=0.0, ignore_eos=True, **sampling),
                stream=True,
                continuation=None if parent is None else ContinuationSpec(parent),
                retain_ttl=3600.0 if retain else None,
            )
        )

    def turns(self, count: int) -> None:
        self.loop.run(Turns(count))
        self._client_inbox.poll()

    def until_idle(self) -> None:
        self.turns(1)
        self.loop.run(Turns(10**9, lambda: self.scheduler.is_idle))
        self._client_inbox.poll()

    def close(self) -> None:
        gc.unfreeze()
        for channel in (self._client, self._outbox, self._inbox, self._client_inbox):
            channel.close()


def decode_steps(size: int, steps: int, overlap: bool) -> Kinds:
    return measure_decodes({"decode": Rig(size, 4, overlap=overlap)}, size, steps)


def state_steps(size: int, steps: int, overlap: bool) -> Kinds:
    """Decodes without states beside them, so that other work on the machine slows both alike."""
    rigs = {name: Rig(size, 4, overlap=overlap, stateful=name == "states") for name in ("plain", "states")}
    return measure_decodes(rigs, size, steps)


def measure_decodes(rigs: dict[str, Rig], size: int, steps: int) -> Kinds:
    """The rigs take turns."""
    for rig in rigs.values():
        rng = np.random.default_rng(0)
        for i in range(size):
            rig.ask(f"r{i}", rng.integers(0, VOCAB, PROMPT), max_new_tokens=steps + 100)
        rig.turns(20)
        rig.profiler.start()
        rig.profiler.recording = False
    for number in range(BLOCKS):
        for rig in rigs.values():
            rig.profiler.recording = True
            rig.profiler.lap("idle")
            rig.turns(steps * (number + 1) // BLOCKS - steps * number // BLOCKS)
            rig.profiler.recording = False
    kinds = {name: rig.profiler.stop()["kinds"]["decode"] for name, rig in rigs.items()}
    for rig in rigs.values():
        rig.close()
    return kinds


def extend_steps(size: int, steps: int, overlap: bool) -> Kinds:
    """The answer is one token, so that the step is both a request's first and its last."""
    return {"extend": second_stages(size, size, steps, overlap, max_new_tokens=1)["extend"]}


def beam_steps(size: int, steps: int, overlap: bool) -> Kinds:
    """Three tokens: an extend that begins the searches, and two steps of all beams."""
    kinds = second_stages(size, size * BEAMS, steps, overlap, max_new_tokens=3, beam_width=BEAMS, n=BEAMS)
    return {"beam begin": kinds["extend"], "beam": kinds["decode"]}


def second_stages(size: int, max_running: int, steps: int, overlap: bool, **sampling: Any) -> Kinds:
    """Rounds of children that go on from leased parents; all of a round wait in the channel when it begins."""
    rig = Rig(max_running, size, overlap=overlap)
    rng = np.random.default_rng(0)
    for number in range(min(steps, 60)):
        rig.profiler.recording = False
        for i in range(size):
            rig.ask(f"{number}-{i}", rng.integers(0, VOCAB, PROMPT), retain=True, max_new_tokens=2)
        rig.until_idle()
        for i in range(size):
            parent, suffix = f"{number}-{i}", rng.integers(0, VOCAB, SUFFIX)
            rig.ask(f"child-{parent}", suffix, parent=parent, **sampling)
        if number == 5:  # warm by now
            rig.profiler.start()
        rig.profiler.recording = number >= 5
        rig.profiler.lap("idle")
        rig.until_idle()
    profile = rig.profiler.stop()
    rig.close()
    most = profile["kinds"]["extend"]["new_tokens"]["max"]
    assert most <= size * (SUFFIX + 1), "all parents were handed off"
    return profile["kinds"]


KINDS: dict[str, Callable[[int, int, bool], Kinds]] = {
    "decode": decode_steps,
    "states": state_steps,
    "extend": extend_steps,
    "beam": beam_steps,
}


def measure(args: argparse.Namespace) -> Kinds:
    """By label."""
    cases = [(kind, size) for kind in args.kinds for size in (args.beam_sizes if kind == "beam" else args.batch_sizes)]
    return {
        f"{name} {size}": group
        for kind, size in cases
        for name, group in KINDS[kind](size, args.steps, not args.plain).items()
    }


def print_cprofile(kind: str, args: argparse.Namespace) -> None:
    size = max(args.beam_sizes if kind == "beam" else args.batch_sizes)
    profiler = cProfile.Profile()
    profiler.runcall(KINDS[kind], size, args.steps, not args.plain)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--beam-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain", action="store_true", help="wait for each step before the next is formed")
    parser.add_argument("--cprofile", choices=list(KINDS), help="only this kind, at its largest size: which functions")
    parser.add_argument("--plot", action="store_true", help="also host_time.png, of the phases")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cprofile:
        print_cprofile(args.cprofile, args)
        return
    profiles = measure(args)
    print_profiles(profiles)
    for kind in ("decode", "extend"):
        if case := profiles.get(f"{kind} {GOAL_BATCH_SIZE}"):
            print(f"{kind}, bs {GOAL_BATCH_SIZE}: {case['host_ms']['median']:.2f} ms (goal: {GOAL_MS:g})")
    for size in args.batch_sizes:
        plain, stateful = profiles.get(f"plain {size}"), profiles.get(f"states {size}")
        if plain and stateful:
            times = stateful["host_ms"]["median"] / plain["host_ms"]["median"]
            print(f"states over plain, bs {size}: {times:.2f} (goal: {GOAL_STATES:g})")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**about_this_run("cpu"), "goal_ms": GOAL_MS, "steps": args.steps, "cases": profiles}
    (args.out / "host_time.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot_profiles(profiles, args.out / "host_time.png")


if __name__ == "__main__":
    main()
