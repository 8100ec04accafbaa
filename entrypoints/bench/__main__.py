"""`baton bench`: sends load to a server and measures it. See docs/bench.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import numpy as np
from tqdm import tqdm

from ..program import allow_open_files, run_program
from ..version import baton_version
from .apis import APIS, CONTINUATION, PREFIX, Answer, Api, Turn
from .arguments import parse
from .connections import Connections, RequestFailed
from .load import Load, Run, arrivals, ask
from .prompts import WordCount, conversations, probe_sizes, random_text
from .report import make_report, table

_PROBE_TOKENS = 1
_OTHER_FILES = 64
"""Open files beside connections."""
_WAY_SEEDS = {PREFIX: 1, CONTINUATION: 2}
"""Seeds of the texts. Each way has its own, so that it finds none of the other's in the server's cache."""


class BenchError(Exception):
    """Nothing can be measured. The message is one line."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 if requests failed, 2 if nothing could be measured."""
    args = parse(argv)

    def measure() -> int:
        report = asyncio.run(bench(args))
        try:
            _write(report, args)  # first: the reader of the table may leave
        finally:
            print(table(report))
        return int(any(run["failed"] for run in report["runs"].values()))

    try:
        return run_program("baton bench", measure)
    except (BenchError, RequestFailed, ValueError) as error:
        print(f"baton bench: {error}", file=sys.stderr)
        return 2


async def bench(args: argparse.Namespace) -> dict:
    """Run the benchmark; return its report. Raises BenchError, RequestFailed, and ValueError for an invalid address."""
    connections = Connections(args.base_url, args.api_key, args.timeout)
    model = args.model or await _first_model(connections)
    api = APIS[args.backend](model, ignore_eos=not args.disable_ignore_eos)
    words = await _count_words(connections, api, args)
    _allow_connections(min(args.num_prompts, args.max_concurrency or args.num_prompts))
    about = _about(args, connections.url, api, model)
    print(_headline(args, about), file=sys.stderr)
    load = Load(
        api=api,
        connections=connections,
        output_tokens=args.random_output_len,
        offsets=arrivals(args.request_rate, args.num_prompts, args.seed),
        max_concurrency=args.max_concurrency,
        timeout_s=args.timeout,
    )
    runs: dict[str, Run] = {}
    for way in args.turns_by:
        if args.flush_cache:
            await connections.fetch("POST", "/flush_cache")
        texts = conversations((args.seed, _WAY_SEEDS[way]), args.num_prompts, args.turns, args.random_input_len, words)
        with tqdm(total=args.num_prompts * args.turns, desc=way, unit="req", disable=None, file=sys.stderr) as bar:
            runs[way] = await load.run(way, texts, bar.update)
    return make_report(about, runs, args.num_prompts * args.turns, args.turns)


def _allow_connections(count: int) -> None:
    """Each is an open file; 1024 is a usual limit."""
    if (possible := allow_open_files(count + _OTHER_FILES)) < count + _OTHER_FILES:
        print(
            f"baton bench: only {possible} files may be open, too few for {count} requests at once, and more than that "
            "will fail: set --max-concurrency, or raise the hard limit (ulimit -Hn)",
            file=sys.stderr,
        )


async def _first_model(connections: Connections) -> str:
    listed = await connections.fetch("GET", "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise BenchError(f"{connections.url}/v1/models lists no model; name one with --model") from None


async def _count_words(connections: Connections, api: Api, args: argparse.Namespace) -> WordCount:
    """Count tokens per word with two short requests, which also show that the server accepts this model and key."""
    rng = np.random.default_rng((args.seed, 0))
    probes = []
    for words in probe_sizes(args.random_input_len):
        answer = Answer()
        fields = api.request(Turn(random_text(rng, words)), PREFIX, _PROBE_TOKENS)
        await ask(connections, api, fields, answer, args.timeout)
        probes.append((words, answer.prompt_tokens or 0))
    try:
        return WordCount.of(*probes)
    except ValueError as error:
        raise BenchError(f"texts of a wanted length cannot be made: {error}") from None


def _about(args: argparse.Namespace, url: str, api: Api, model: str) -> dict:
    return {
        "baton_version": baton_version(),
        "base_url": url,
        "backend": api.name,
        "model": model,
        "num_prompts": args.num_prompts,
        "turns": args.turns,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "ignore_eos": not args.disable_ignore_eos,
        "flush_cache": args.flush_cache,
        "seed": args.seed,
    }


def _headline(args: argparse.Namespace, about: dict) -> str:
    what = (
        f"{args.num_prompts} conversations of {args.turns} turns" if args.turns > 1 else f"{args.num_prompts} prompts"
    )
    when = "all at once" if about["request_rate"] == "inf" else f"{args.request_rate:g} a second"
    most = f", at most {args.max_concurrency} under way" if args.max_concurrency else ""
    lengths = f"{args.random_input_len} + {args.random_output_len} tokens"
    return f"{about['base_url']}{APIS[args.backend].path}, model {about['model']}: {what}, {lengths}, {when}{most}"


def _write(report: dict, args: argparse.Namespace) -> None:
    if args.output_file is None:
        return
    try:
        args.output_file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--output-file {args.output_file} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
