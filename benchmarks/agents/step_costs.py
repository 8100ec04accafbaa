"""Measures step costs on this machine over HTTP, and writes a file for the simulator's ``--costs``.

    python -m benchmarks.agents.step_costs --model FOLDER --out costs.json [--flags "--max-total-tokens 40000"]

Baton's server is started. It gets prompts of several lengths, new ones and continued conversations, and generates
answers of several rows at once: streamed chats through OpenAI's client, as agents use it, so that the costs include the
share of the cores that templates, HTTP and the client take. A linear model is fitted to all steps (least squares of
relative errors, no coefficient below 0):

    seconds = fixed_s + prompt tokens × prompt_token_s + rows × decode_row_s + context tokens × context_token_s
              + prompts × prompt_row_s + (new token, token it looks at) pairs × attended_s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from baton.entrypoints.simulate.cost_model import StepSize
from benchmarks.agents.job_runner import Server, TurnResult
from benchmarks.common.measured import about_this_run
from benchmarks.common.servers import Server as OwnServer

PROMPTS = ((32, 0), (128, 0), (512, 0), (1024, 0), (64, 1024), (256, 1024), (256, 2048))
"""(new tokens, cached ones before them)"""

DECODES = ((1, 64), (1, 1024), (4, 512), (8, 1024), (16, 64), (16, 1024), (32, 512))
"""(rows, tokens of each)"""

COSTS: dict[str, Callable[[StepSize], float]] = {
    "fixed_s": lambda size: 1.0,
    "prompt_token_s": lambda size: size.prompt_tokens,
    "decode_row_s": lambda size: size.decode_rows,
    "context_token_s": lambda size: size.context,
    "prompt_row_s": lambda size: size.prompt_rows,
    "attended_s": lambda size: size.attended,
}
"""Units in which each cost of a step is counted."""

ANSWER = 48
"""Tokens of an answer with measured steps."""

ROUNDS = 5


class Measured(NamedTuple):
    """A step: what it computes and reads, and its seconds."""

    prompt_tokens: int
    rows: int
    context: int
    seconds: float

    @property
    def size(self) -> StepSize:
        new, rows = self.prompt_tokens, self.rows
        attended = new * (self.context - new) + new * (new + 1) // 2 if new else self.context
        return StepSize(new, rows, self.context, attended, int(new > 0))


class Meter:
    """Asks as agents do, in chats, with OpenAI's client and streams: what templates, HTTP and the client take from the
    cores is a part of what a step costs here. How long a prompt is, and what was found of it, the server says."""

    def __init__(self, url: str, seed: int) -> None:
        self._server = Server(url, "none", plain=False, timeout_s=600)
        self._seed = seed
        self._asked = 0

    async def __aenter__(self) -> Meter:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    def said(self, tokens: int) -> dict[str, str]:
        """A message that has not been sent before."""
        self._asked += 1
        return {"role": "user", "content": self._server.words(tokens, (self._seed, self._asked))}

    async def ask(self, talk: list[dict[str, str]], max_tokens: int) -> tuple[str, TurnResult]:
        self._asked += 1
        return await self._server.answer(talk, max_tokens, f"step-{self._seed}-{self._asked}", is_last=True)

    async def prompt(self, new: int, cached: int) -> Measured:
        """A conversation of so many tokens goes on."""
        found: list[TurnResult] = []
        for _ in range(ROUNDS):
            talk = []
            if cached:
                talk = [self.said(cached)]
                answer, _ = await self.ask(talk, 1)
                talk.append({"role": "assistant", "content": answer})
            found.append((await self.ask([*talk, self.said(new)], 1))[1])
        usual = sorted(found, key=lambda result: result.latency)[ROUNDS // 2]
        return Measured(usual.prompt_tokens - (usual.cached_tokens or 0), 0, usual.prompt_tokens, usual.latency)

    async def decode(self, rows: int, context: int) -> Measured:
        """From answers of one token to such of several, all prompts cached."""
        talks = [[self.said(context)] for _ in range(rows)]

        async def all_of(max_tokens: int) -> tuple[float, list[TurnResult]]:
            began = time.perf_counter()
            answers = await asyncio.gather(*(self.ask(talk, max_tokens) for talk in talks))
            return time.perf_counter() - began, [result for _, result in answers]

        _, results = await all_of(1)
        times = []
        for _ in range(ROUNDS):
            (long, results), (short, _) = await all_of(ANSWER + 1), await all_of(1)
            times.append((long - short) / (max(result.output_tokens for result in results) - 1))
        tokens = sum(result.prompt_tokens + result.output_tokens // 2 for result in results)
        return Measured(0, rows, tokens, median(times))

    async def all(self) -> list[Measured]:
        await self.ask([self.said(256)], 8)  # the first request of a server is slower
        steps = []
        with tqdm(total=len(PROMPTS) + len(DECODES), desc="steps", disable=None) as bar:
            for measure, size in [
                *((self.prompt, size) for size in PROMPTS),
                *((self.decode, size) for size in DECODES),
            ]:
                steps.append(await measure(*size))
                bar.update()
        return steps


def fit(steps: list[Measured]) -> dict[str, float]:
    """The line's costs; those that come out below 0 are left out, and the others fitted again."""
    names = [*COSTS]
    seconds = np.array([step.seconds for step in steps])
    terms = np.array([[of(step.size) for of in COSTS.values()] for step in steps]) / seconds[:, None]
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
    return sum(cost * COSTS[name](step.size) for name, cost in costs.items())


async def _measure_all(url: str, seed: int) -> list[Measured]:
    async with Meter(url, seed) as meter:
        return await meter.all()


def measure(model: Path, flags: list[str], seed: int) -> tuple[dict[str, float], list[Measured]]:
    """The line, and what it was laid through."""
    server = OwnServer(model, flags)
    try:
        steps = asyncio.run(_measure_all(server.url, seed))
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
