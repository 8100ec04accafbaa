"""Decode steps under constraints and free ones, on the same engine, in turns.

Scheduler and step runner are the server's own, with a step in flight or without; there is no HTTP. The clock runs from
the first token of the last request to the end of all. A constrained request cannot end before it has all its tokens: a
schema asks for a list that is longer, and an item trie's items have so many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.constraints.grammar import GrammarStates
from baton.runtime.sampling import beam_candidates
from baton.runtime.step_runner import StepInFlight
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.worker import build_worker, warm_up
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.outcome import DraftCounts
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from benchmarks.grammars.masks import Clock, Compiler
from benchmarks.grammars.schemas import Schema

GOAL_RATIO = 0.95

BEAMS = 512

PROMPT = "<|im_start|>user\nWrite a JSON document, number {}.<|im_end|>\n<|im_start|>assistant\n"

ITEM_FAN = 4
"""Tokens that may follow each token of an item: ten tokens make a million items."""

OPEN_LIST: Schema = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "text": {"type": "string"},
            "kind": {"enum": ["question", "answer", "comment"]},
            "score": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["title", "text", "kind", "score", "tags"],
        "additionalProperties": False,
    },
}
"""No output ends. Most of it are free strings."""


class Engine:
    """A scheduler and a step runner; its clients are this object."""

    def __init__(self, folder: Path, *, jumps: bool, max_running: int, pool_tokens: int, clock: Clock) -> None:
        """jumps: jump-forward is on."""
        config = SchedulerConfig(
            max_total_tokens=pool_tokens,
            max_running_requests=max_running,
            max_beam_width=BEAMS,
            disable_jump_forward=not jumps,
        )
        model = ModelArgs(model_path=str(folder), dtype="float32", device="cpu")
        self._scheduler, self._step_runner, *_ = build_worker(WorkerConfig(model=model, scheduler=config))
        warm_up(self._scheduler, self._step_runner)
        self._clock, self._count = clock, 0

    @property
    def drafts(self) -> DraftCounts:
        """Since start."""
        return self._scheduler.stats().drafts

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        constraints: Sequence[Constraint | None],
        *,
        overlap: bool = False,
        after_step: Callable[[float], None] = lambda seconds: None,
    ) -> Run:
        """Serve these requests together. after_step: called with the duration of each, in seconds."""
        scheduler, found = self._scheduler, Run()
        scheduler.flush_cache()
        waiting: set[str] = set()
        for number, (prompt, constraint) in enumerate(zip(prompts, constraints, strict=True)):
            self._count += 1
            spec = RequestSpec(rid=f"r{self._count}", input_ids=pack_ids(prompt), sampling=_seeded(sampling, number))
            scheduler.add_request(spec, 0.0, constraint=constraint)
            waiting.add(spec.rid)
            found.outputs[spec.rid] = []
        in_flight: deque[StepInFlight] = deque()
        began = began_step = self._clock()
        while True:
            batch = scheduler.next_batch(began_step)
            if batch is not None:
                in_flight.append(self._step_runner.launch(batch, in_flight[-1] if in_flight else None))
                if overlap and len(in_flight) == 1 and not batch.beams:
                    continue
            if not in_flight:
                break
            result = self._step_runner.finish(in_flight.popleft()).result
            now = self._clock()
            for event in scheduler.process_result(result, now):
                rid = event.request.rid
                waiting.discard(rid)
                found.outputs[rid] += event.token_ids
                if event.token_ids:
                    found.rows += 1
            if in_flight and in_flight[-1].sampled is None:
                scheduler.add_masks(now)
                self._step_runner.sample(in_flight[-1])
            now = self._clock()
            after_step(now - began_step)
            began_step = now
            if waiting:
                began, found.early_tokens = now, sum(map(len, found.outputs.values()))
        found.seconds = self._clock() - began
        return found


@dataclass
class Run:
    """The outputs of some requests, and what they took."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Token ids by request."""
    rows: int = 0
    """Rows of all steps that brought at least one token."""
    early_tokens: int = 0
    """Before the clock began to run."""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def tokens_per_s(self) -> float:
        return (self.num_tokens - self.early_tokens) / self.seconds


def _seeded(sampling: SamplingParams, seed: int) -> SamplingParams:
    return sampling if sampling.beam_width else msgspec.structs.replace(sampling, seed=seed)


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """A constrained batch beside a free one. One figure of each for each round."""

    constraint: str
    batch: int
    jumps: bool
    overlap: bool
    free: list[float] = field(default_factory=list)
    """Tokens per second."""
    held: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Speed of constrained requests as a part of that of free ones."""
        return [held / free for held, free in zip(self.held, self.free, strict=True)]

    def row(self) -> dict[str, Any]:
        """JSON."""
        return {**vars(self), "ratios": self.ratios, "ratio": median(self.ratios)}


def measure_steps(
    folder: Path, batches: Sequence[int], tokens: int, rounds: int, temperature: float, item_tokens: int, clock: Clock
) -> list[Cell]:
    compiler = Compiler(folder)
    pool = max(batches) * (tokens + 128) + 256
    engines = {
        jumps: Engine(folder, jumps=jumps, max_running=max(batches), pool_tokens=pool, clock=clock)
        for jumps in (False, True)
    }
    schema = compiler.of_schema(OPEN_LIST)
    assert schema is not None
    items = ItemConstraint(make_trie(compiler.vocabulary.tokenizer.vocab_size, item_tokens), "items")
    cells = [
        Cell(name, batch, jumps, overlap)
        for batch in batches
        for name, jumps, overlap in [
            *(("schema", jumps, False) for jumps in (False, True)),
            *(("items", False, overlap) for overlap in (False, True)),
        ]
    ]
    for number in range(rounds + 1):
        for cell in cells if number % 2 == 0 else cells[::-1]:
            prompts = make_prompts(compiler.tokenizer, cell.batch)
            constraint: Constraint = schema if cell.constraint == "schema" else items
            times = 1 if cell.constraint == "schema" else max(1, tokens // item_tokens)
            length = tokens if cell.constraint == "schema" else item_tokens
            sampling = SamplingParams(
                max_new_tokens=length,
                temperature=temperature,
                ignore_eos=True,
            )
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(times):
                for held in (False, True) if (number + turn) % 2 == 0 else (True, False):
                    constraints = [constraint if held else None] * cell.batch
                    run = engines[cell.jumps].run(prompts, sampling, constraints, overlap=cell.overlap)
                    assert run.num_tokens == length * cell.batch, "an output ended early"
                    speeds[held].append(run.tokens_per_s)
            if number:  # the first round warms up
                cell.free.append(median(speeds[False]))
                cell.held.append(median(speeds[True]))
    return cells


def make_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    return [tokenizer.encode(PROMPT.format(number)) for number in range(count)]


def make_trie(vocab_size: int, length: int) -> ItemTrie:
    """Items of ``length`` tokens; `ITEM_FAN` tokens, spread over the vocabulary, may follow at each place."""
    rng, number = np.random.default_rng(0), np.arange(ITEM_FAN**length)
    codes = rng.permutation(vocab_size)[: ITEM_FAN * length].reshape(length, ITEM_FAN).astype(np.int32)
    columns = [codes[place][number // ITEM_FAN**place % ITEM_FAN] for place in range(length)]
    return ItemTrie.build(np.stack(columns, axis=1))


# -- beams -------------------------------------------------------------------------------------------------------------


@dataclass
class BeamCell:
    """Searches with a schema beside free ones, in ms for each step of all beams."""

    width: int
    free: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    """Milliseconds of ``held`` spent on filling the beams' masks."""
    positions: list[float] = field(default_factory=list)
    """Milliseconds of ``held`` spent on moving the beams to their next positions."""
    applied: list[float] = field(default_factory=list)
    """Milliseconds of ``held`` spent on applying masks to logits."""

    def row(self) -> dict[str, Any]:
        """JSON: medians, and 99th percentiles of the masks."""
        names = ("free", "held", *PARTS)
        row: dict[str, Any] = {f"{name}_ms": median(getattr(self, name)) for name in names}
        row["masks_p99_ms"] = float(np.percentile(self.masks, 99))
        return {"width": self.width, "steps": len(self.held), **row}


PARTS = ("masks", "positions", "applied")


def measure_beams(folder: Path, width: int, tokens: int, rounds: int, clock: Clock) -> BeamCell:
    compiler = Compiler(folder)
    engine = Engine(folder, jumps=False, max_running=width, pool_tokens=width * (tokens + 2) + 1024, clock=clock)
    schema, cell = compiler.of_schema(OPEN_LIST), BeamCell(width)
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True, beam_width=width, n=1)
    prompts = make_prompts(compiler.tokenizer, 1)
    whole = slice(tokens // 2, tokens - 1)  # by then the search has all its beams
    for number in range(rounds + 1):
        for held in (False, True) if number % 2 == 0 else (True, False):
            with _parts_timed(clock) as seconds:
                log: list[dict[str, float]] = []
                engine.run(
                    prompts,
                    sampling,
                    [schema if held else None],
                    after_step=lambda duration, seconds=seconds, log=log: log.append(_taken(seconds, duration)),
                )
            if number:  # the first round warms up
                for step in log[whole]:
                    (cell.held if held else cell.free).append(step["step"])
                    for name in PARTS if held else ():
                        getattr(cell, name).append(step.get(name, 0.0))
    return cell


def _taken(seconds: dict[str, float], duration: float) -> dict[str, float]:
    """ms by part, and of the whole step; takes them out of ``seconds``."""
    step = {name: value * 1e3 for name, value in [*seconds.items(), ("step", duration)]}
    seconds.clear()
    return step


@contextmanager
def _parts_timed(clock: Clock) -> Iterator[dict[str, float]]:
    """Seconds spent in a search's constraint, by part; the reader takes them away."""
    seconds: dict[str, float] = {}
    places = [
        (GrammarStates, "allowed", "masks"),
        (GrammarStates, "advance", "positions"),
        (beam_candidates, "allow_only", "applied"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), original in zip(places, originals):
        setattr(owner, name, _timed(original, part, seconds, clock))
    try:
        yield seconds
    finally:
        for (owner, name, _), original in zip(places, originals):
            setattr(owner, name, original)


def _timed(function: Callable[..., Any], part: str, seconds: dict[str, float], clock: Clock) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] = seconds.get(part, 0.0) + clock() - began

    return run


# -- jump-forward ------------------------------------------------------------------------------------------------------


@dataclass
class Jumped:
    """Outputs under schemas, with jump-forward."""

    name: str
    tokens: int = 0
    accepted: int = 0
    """Tokens that were accepted from forced drafts."""
    rows: int = 0
    """Steps, each request's counted on its own: the tokens without jump-forward."""
    seconds: float = 0.0
    plain_seconds: float = 0.0
    """The same without jump-forward."""

    def row(self) -> dict[str, Any]:
        """JSON."""
        return {
            **vars(self),
            "forced_share": self.accepted / self.tokens if self.tokens else 0.0,
            "steps_saved": 1 - self.rows / self.tokens if self.tokens else 0.0,
        }


def measure_forward(folder: Path, schemas: Sequence[Schema], batch: int, tokens: int, clock: Clock) -> list[Jumped]:
    """Each schema gives one output, free spaces allowed, and one without spaces."""
    compiler = Compiler(folder)
    pool = batch * (tokens + 128) + 256
    engines = [Engine(folder, jumps=jumps, max_running=batch, pool_tokens=pool, clock=clock) for jumps in (True, False)]
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    found = []
    for name, options in (("free spaces", {}), ("no spaces", {"x-guidance": {"whitespace_flexible": False}})):
        every = [each for schema in schemas if (each := compiler.of_schema({**schema, **options})) is not None]
        jumped = Jumped(name)
        for first in range(0, len(every), batch):
            constraints = every[first : first + batch]
            prompts = make_prompts(compiler.tokenizer, len(constraints))
            before = engines[0].drafts.accepted
            run, plain = (engine.run(prompts, sampling, constraints) for engine in engines)
            assert list(run.outputs.values()) == list(plain.outputs.values()), "jump-forward changed an output"
            jumped.tokens += run.num_tokens
            jumped.accepted += engines[0].drafts.accepted - before
            jumped.rows += run.rows
            jumped.seconds += run.seconds
            jumped.plain_seconds += plain.seconds
        found.append(jumped)
    return found
