"""What a step costs on this machine, measured from outside: a file for the simulator's ``--costs``.

    python -m benchmarks.agents.step_costs --model FOLDER --out costs.json [--flags "--max-total-tokens 40000"]

A server of ours is started and asked for prompts of several lengths, new and behind a cached prefix, and for answers
of several rows at once, by OpenAI's client and in streams, as agents ask: what client and HTTP take from the cores
makes steps longer, and should. A straight line is laid through all (least squares of relative errors, none below 0):

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
import openai
from tqdm import tqdm

from baton.entrypoints.simulate.cost_model import Linear, StepSize
from benchmarks.common.measured import about_this_run
from benchmarks.common.servers import Server

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
"""What each cost of a step is counted in."""

ANSWER = 48
"""Tokens of an answer whose steps are measured."""

VOCABULARY = (1000, 30000)
"""Prompts are drawn from these ids; any of the model's will do, as it computes the same."""

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
    """Asks as agents do, with OpenAI's client and streams: what HTTP and the client take from the cores is a part of
    what a step costs here."""

    def __init__(self, url: str, seed: int, vocabulary: tuple[int, int] = VOCABULARY) -> None:
        self._vocabulary = vocabulary
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._rng = np.random.default_rng(seed)

    async def __aenter__(self) -> Meter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def ids(self, count: int) -> list[int]:
        return self._rng.integers(*self._vocabulary, size=count).tolist()

    async def ask(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds until all of them are answered."""
        started = time.perf_counter()
        await asyncio.gather(*(self._stream(prompt, max_tokens) for prompt in prompts))
        return time.perf_counter() - started

    async def _stream(self, prompt: list[int], max_tokens: int) -> None:
        stream = await self._client.completions.create(
            model="any",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            pass

    async def prompt(self, new: int, cached: int) -> Measured:
        times = []
        for _ in range(ROUNDS):
            before = self.ids(cached)
            if before:
                await self.ask([before], 1)
            times.append(await self.ask([before + self.ids(new)], 1))
        return Measured(new, 0, cached + new, median(times))

    async def decode(self, rows: int, context: int) -> Measured:
        """From answers of one token to such of several, all prompts cached."""
        prompts = [self.ids(context) for _ in range(rows)]
        await self.ask(prompts, 1)
        times = [(await self.ask(prompts, ANSWER + 1) - await self.ask(prompts, 1)) / ANSWER for _ in range(ROUNDS)]
        return Measured(0, rows, rows * (context + ANSWER // 2), median(times))

    async def all(self) -> list[Measured]:
        await self.ask([self.ids(256)], 8)  # the first request of a server is slower
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
    return Linear(**costs).step_s(step.size)


async def _measure_all(url: str, seed: int) -> list[Measured]:
    async with Meter(url, seed) as meter:
        return await meter.all()


def measure(model: Path, flags: list[str], seed: int) -> tuple[dict[str, float], list[Measured]]:
    """The line, and what it was laid through."""
    server = Server(model, flags)
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
