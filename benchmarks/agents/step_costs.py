"""What a step costs on this machine, measured from outside: a file for the simulator's ``--costs``.

    python -m benchmarks.agents.step_costs --model FOLDER --out costs.json [--flags "--max-total-tokens 40000"]

A server of ours is started and asked for prompts of several lengths, new and behind a cached prefix, and for answers of
several rows at once. Each is a difference of two times, so what HTTP costs drops out of decode steps; of prompts it is
part of the fixed cost. A straight line is laid through all (least squares of relative errors, no cost below 0):

    seconds = fixed_s + prompt tokens × prompt_token_s + rows × decode_row_s + context tokens × context_token_s
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.common.measured import about_this_run
from benchmarks.common.servers import Server

PROMPTS = ((32, 0), (128, 0), (512, 0), (1024, 0), (64, 1024), (256, 1024), (256, 2048))
"""(new tokens, cached ones before them)"""

DECODES = ((1, 64), (1, 1024), (4, 512), (8, 1024), (16, 64), (16, 1024), (32, 512))
"""(rows, tokens of each)"""

ANSWER = 48
"""Tokens of an answer whose steps are measured."""

VOCABULARY = (1000, 30000)
ROUNDS = 5


class Measured(NamedTuple):
    """A step: what it computes and reads, and its seconds."""

    prompt_tokens: int
    rows: int
    context: int
    seconds: float


class Meter:
    def __init__(self, server: Server, seed: int) -> None:
        self._client = server.client
        self._rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        return self._rng.integers(*VOCABULARY, size=count).tolist()

    def ask(self, prompts: list[list[int]], max_new_tokens: int) -> float:
        """Seconds until all of them are answered."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        started = time.perf_counter()
        self._client.post("/generate", json={"input_ids": prompts, "sampling_params": sampling}).raise_for_status()
        return time.perf_counter() - started

    def prompt(self, new: int, cached: int) -> Measured:
        times = []
        for _ in range(ROUNDS):
            before = self.ids(cached)
            if before:
                self.ask([before], 1)
            times.append(self.ask([before + self.ids(new)], 1))
        return Measured(new, 0, cached + new, median(times))

    def decode(self, rows: int, context: int) -> Measured:
        """From answers of one token to such of several, all prompts cached."""
        prompts = [self.ids(context) for _ in range(rows)]
        self.ask(prompts, 1)
        times = [(self.ask(prompts, ANSWER + 1) - self.ask(prompts, 1)) / ANSWER for _ in range(ROUNDS)]
        return Measured(0, rows, rows * (context + ANSWER // 2), median(times))


def fit(steps: list[Measured]) -> dict[str, float]:
    """The line's four costs; those that come out below 0 are left out, and the others fitted again."""
    names = ["fixed_s", "prompt_token_s", "decode_row_s", "context_token_s"]
    seconds = np.array([step.seconds for step in steps])
    terms = np.array([[1.0, step.prompt_tokens, step.rows, step.context] for step in steps]) / seconds[:, None]
    kept = list(range(len(names)))
    while True:
        costs = np.linalg.lstsq(terms[:, kept], np.ones(len(steps)), rcond=None)[0]
        if (costs >= 0).all():
            break
        kept.remove(kept[int(np.argmin(costs))])
    found = dict.fromkeys(names, 0.0)
    return found | {names[index]: float(cost) for index, cost in zip(kept, costs)}


def said(step: Measured, costs: dict[str, float]) -> float:
    """Seconds that the line gives a step."""
    return (
        costs["fixed_s"]
        + costs["prompt_token_s"] * step.prompt_tokens
        + costs["decode_row_s"] * step.rows
        + costs["context_token_s"] * step.context
    )


def measure(model: Path, flags: list[str], seed: int) -> tuple[dict[str, float], list[Measured]]:
    server = Server(model, flags)
    try:
        meter = Meter(server, seed)
        meter.ask([meter.ids(256)], 8)  # the first request of a server is slower
        with tqdm(total=len(PROMPTS) + len(DECODES), desc="steps", disable=None) as bar:
            steps = []
            for size in PROMPTS:
                steps.append(meter.prompt(*size))
                bar.update()
            for size in DECODES:
                steps.append(meter.decode(*size))
                bar.update()
    finally:
        server.close()
    return fit(steps), steps


def show(costs: dict[str, float], steps: list[Measured]) -> None:
    print(f"{'new':>6}{'rows':>6}{'context':>9}{'measured ms':>13}{'line ms':>9}")
    for step in steps:
        line = 1e3 * said(step, costs)
        print(f"{step.prompt_tokens:>6}{step.rows:>6}{step.context:>9}{1e3 * step.seconds:>13.2f}{line:>9.2f}")
    print(json.dumps(costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--flags", default="", help="of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("costs.json"))
    args = parser.parse_args()
    costs, steps = measure(args.model, shlex.split(args.flags), args.seed)
    show(costs, steps)
    args.out.write_text(json.dumps(costs, indent=1) + "\n")
    about: dict[str, Any] = about_this_run("cpu")
    print(f"wrote {args.out}; {about}")


if __name__ == "__main__":
    main()
