"""Compares speculation (--speculative-algorithm NGRAM) with none, on transcripts of agents, which repeat themselves.

    python -m benchmarks.serving.speculation [--model FOLDER] [--work edits] [--at-once 1 4] [--rounds 3] [--cpu-time]

The toy model uses its own agent language: commands, and answers that quote the output of tools. Any other model gets
files to edit: each turn requests one more change and the whole file again, and the context of the next turn has the
real answer. ``--work stories`` is the opposite: free text, sampled, with little repetition. ``--at-once`` sessions are
served together, each one turn after the other. Greedy (stories are seeded); both ways must give the same answers. Both
run in one process on the same weights, the order swapped every round; a figure is the median of the rounds. Scheduler
and step runner are the server's own, steps are waited for, there is no HTTP. Prompts are computed too, and count as
time. Prints a table, writes speculation.json.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.worker import build_worker, warm_up
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.clock import add_cpu_time, check_cpu_time, clock_of
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import TOY_MODEL
from examples.toy_model.agent_language import agent_conversation

Way = Literal["off", "NGRAM"]
WAYS: tuple[Way, ...] = ("off", "NGRAM")
WORDS = (
    "alpha", "count", "delta", "engine", "first", "gamma", "handle", "index",
    "join", "kernel", "limit", "merge", "next", "order", "parse", "queue",
)  # fmt: skip


@dataclass
class Session:
    """One agent. turns: what is said to the model before each of its answers; ``rest`` follows each answer."""

    turns: list[str]
    keeps_answers: bool
    """True: the next prompt holds the answer; False: each turn is a whole prompt."""
    rest: str = "<|im_end|>\n"
    temperature: float = 0.0


def toy_sessions(count: int, seed: int) -> list[Session]:
    """Conversations of the toy model's language, with their true answers in the prompts."""
    made = [agent_conversation(random.Random(seed * 1000 + number), rounds=3) for number in range(count)]
    return [Session([prompt for prompt, _ in conversation.prompts()], False) for conversation in made]


def edit_sessions(count: int, turns: int, seed: int) -> list[Session]:
    """Files to edit: names that are changed, one at a time."""
    sessions = []
    for number in range(count):
        rng = random.Random(seed * 1000 + number)
        names = rng.sample(WORDS, 8)
        code = "\n\n".join(
            f"def {name}_{rng.choice(WORDS)}(value, {other}):\n"
            f'    """Return the {name} of a value."""\n'
            f"    return value {rng.choice('+-*')} {rng.randrange(2, 90)} - {other}"
            for name, other in zip(names[:5], names[3:])
        )
        ask = (
            "Give the whole file again, with nothing before it and nothing after it.<|im_end|>\n<|im_start|>assistant\n"
        )
        first = (
            "<|im_start|>system\nYou edit files.<|im_end|>\n<|im_start|>user\nThis is tools.py:\n"
            f"```python\n{code}\n```\nReplace the word {names[0]} by {rng.choice(WORDS)}. {ask}"
        )
        more = [
            f"<|im_start|>user\nNow replace the word {name} by {rng.choice(WORDS)}. {ask}" for name in names[1:turns]
        ]
        sessions.append(Session([first, *more], True))
    return sessions


def story_sessions(count: int, seed: int) -> list[Session]:
    rng = random.Random(seed)
    asks = [f"<|im_start|>user\nTell me a story about {' and '.join(rng.sample(WORDS, 3))}." for _ in range(count)]
    return [Session([f"{ask}<|im_end|>\n<|im_start|>assistant\n"], False, temperature=1.0) for ask in asks]


@dataclass
class Cell:
    """One way with so many sessions at once. One figure per round."""

    way: Way
    at_once: int
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)
    """One value for each session."""
    drafted: int = 0
    accepted: int = 0


class Engine:
    """A scheduler and a step runner; its clients are this object."""

    def __init__(self, way: Way, args: argparse.Namespace, tokenizer: Tokenizer) -> None:
        config = SchedulerConfig(
            max_total_tokens=args.pool_tokens,
            max_running_requests=max(args.at_once),
            speculative_algorithm=way,
            speculative_num_draft_tokens=args.draft_tokens,
        )
        model = ModelArgs(model_path=str(args.model), dtype="float32", device="cpu")
        self._scheduler, self._step_runner, *_ = build_worker(WorkerConfig(model=model, scheduler=config))
        warm_up(self._scheduler, self._step_runner)
        self._tokenizer, self._args = tokenizer, args
        self._clock = clock_of(args)
        self._count, self._paused = 0, 0.0

    def _now(self) -> float:
        """Without the time of the tokenizer, which a server has in another process."""
        return self._clock() - self._paused

    def run(self, cell: Cell, sessions: list[Session]) -> list[list[int]]:
        """Serve the sessions, and add the figures to the cell. Returns all answers."""
        scheduler = self._scheduler
        waiting = list(enumerate(sessions))[::-1]
        answers: dict[str, list[int]] = {}
        serving: dict[str, tuple[int, int, str]] = {}
        said: dict[tuple[int, int], list[int]] = {}
        decode_rows = tokens = 0
        before, began = scheduler.stats().drafts, self._now()

        def send(number: int, turn: int, context: str) -> None:
            session = sessions[number]
            text = context + session.turns[turn] if session.keeps_answers else session.turns[turn]
            paused = self._clock()
            ids = self._tokenizer.encode(text)
            self._paused += self._clock() - paused
            rid, self._count = f"r{self._count}", self._count + 1
            sampling = SamplingParams(max_new_tokens=self._args.tokens, temperature=session.temperature, seed=number)
            spec = RequestSpec(rid=rid, input_ids=pack_ids(ids), sampling=sampling)
            scheduler.add_request(spec, now)
            answers[rid], serving[rid] = [], (number, turn, text)

        now = began
        while waiting or serving:
            while waiting and len(serving) < cell.at_once:
                send(waiting.pop()[0], 0, "")
            batch = scheduler.next_batch(now)
            assert batch is not None, "no step is in flight, yet requests are waiting"
            result = self._step_runner.run(batch).result
            now = self._now()  # once a turn, as in the event loop
            for event in scheduler.process_result(result, now):
                rid = event.request.rid
                answers[rid] += event.token_ids
                decode_rows, tokens = decode_rows + bool(event.token_ids), tokens + len(event.token_ids)
                if event.finish is None:
                    continue
                number, turn, text = serving.pop(rid)
                said[number, turn] = answers[rid]
                if turn + 1 < len(sessions[number].turns):
                    visible = [i for i in answers[rid] if i not in self._tokenizer.special_ids]
                    send(number, turn + 1, text + self._tokenizer.decode(visible) + sessions[number].rest)
        seconds, counts = self._now() - began, scheduler.stats().drafts
        scheduler.flush_cache()
        cell.tokens_per_s.append(tokens / seconds)
        cell.tokens_per_step.append(tokens / decode_rows)
        cell.drafted += counts.drafted - before.drafted
        cell.accepted += counts.accepted - before.accepted
        return [said[key] for key in sorted(said)]


def measure(args: argparse.Namespace) -> list[Cell]:
    tokenizer = Tokenizer.load(args.model)
    make = {"edits": lambda count, seed: edit_sessions(count, args.turns, seed), "stories": story_sessions}[args.work]
    if args.work == "edits" and args.model.resolve() == TOY_MODEL.resolve():
        make = toy_sessions
    engines = {way: Engine(way, args, tokenizer) for way in WAYS}
    cells = {(way, at_once): Cell(way, at_once) for at_once in args.at_once for way in WAYS}
    for number in range(args.rounds):
        for at_once in args.at_once:
            sessions = make(args.sessions, 100 * at_once + number)
            order = WAYS if number % 2 == 0 else WAYS[::-1]
            said = {way: engines[way].run(cells[way, at_once], sessions) for way in order}
            assert said["off"] == said["NGRAM"], "speculation changed an answer"
    return list(cells.values())


def print_table(cells: list[Cell]) -> None:
    print(f"\n{'at once':<9}{'drafts':<8}{'tokens/s':>10}{'gain':>7}{'tokens/step':>13}{'drafted':>9}{'accepted':>10}")
    for off, on in zip(cells[::2], cells[1::2], strict=True):
        gain = median(mine / its for mine, its in zip(on.tokens_per_s, off.tokens_per_s, strict=True))
        for cell, text in ((off, ""), (on, f"{gain:.2f}")):
            print(
                f"{cell.at_once:<9}{cell.way:<8}{median(cell.tokens_per_s):>10.1f}{text:>7}"
                f"{median(cell.tokens_per_step):>13.2f}{cell.drafted:>9}{cell.accepted:>10}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TOY_MODEL)
    parser.add_argument("--work", choices=("edits", "stories"), default="edits")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of a session that edits a file")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--draft-tokens", type=int, default=16, help="--speculative-num-draft-tokens")
    parser.add_argument("--pool-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_cpu_time(parser)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    check_cpu_time(parser, args)
    torch.set_num_threads(args.threads)
    cells = measure(args)
    print_table(cells)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "model")}
    report = {**about_this_run("cpu"), **settings, "model": args.model.name, "cells": [asdict(cell) for cell in cells]}
    (args.out / "speculation.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
