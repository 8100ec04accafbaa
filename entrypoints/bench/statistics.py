"""Summaries of the records of a run. Keys are those of SGLang's and vLLM's result files where the meaning is the same.

TTFT   from sending the request to the first event with output
ITL    between two such events; an event may hold several tokens (``tokens_per_event``)
TPOT   from the first event to the end, by the tokens after the first
E2E    from sending the request to the end
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .apis import Answer
from .load import Record, Run

TIMES = ("ttft", "tpot", "itl", "e2e_latency")
QUANTITIES = ("mean", "median", "p99")

Summary = dict[str, Any]
"""Name -> number, or None where there was nothing to measure. Times in milliseconds."""


def ttft_s(answer: Answer) -> float:
    return answer.arrivals[0] - answer.started


def e2e_s(answer: Answer) -> float:
    return answer.ended - answer.started


def tpot_s(answer: Answer) -> float | None:
    """None for an answer of one token."""
    tokens = answer.output_tokens or 0
    return (answer.ended - answer.arrivals[0]) / (tokens - 1) if tokens > 1 else None


def itl_s(answer: Answer) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(answer.arrivals)]


def summarize(run: Run, requests: int) -> Summary:
    """requests: the number that should have been sent."""
    answers = [record.answer for record in run.records if record.error is None]
    failed = len(run.records) - len(answers)
    read = sum(answer.prompt_tokens or 0 for answer in answers)
    written = sum(answer.output_tokens or 0 for answer in answers)
    events = sum(len(answer.arrivals) for answer in answers)

    def per_second(count: int) -> float | None:
        return count / run.seconds if run.seconds > 0 else None

    return {
        "completed": len(answers),
        "failed": failed,
        "not_sent": requests - len(run.records),
        "duration": run.seconds,
        "total_input_tokens": read,
        "total_cached_tokens": cached_tokens(answers),
        "total_output_tokens": written,
        "request_throughput": per_second(len(answers)),
        "input_throughput": per_second(read),
        "output_throughput": per_second(written),
        "total_throughput": per_second(read + written),
        "tokens_per_event": written / events if events else None,
        **_times(answers),
        "errors": dict(Counter(record.error for record in run.records if record.error is not None).most_common()),
    }


def by_turn(records: Sequence[Record]) -> list[Summary]:
    """One summary per turn, over the requests with a complete answer."""
    found = []
    whole = [record for record in records if record.error is None]
    for turn in sorted({record.turn for record in whole}):
        answers = [record.answer for record in whole if record.turn == turn]
        count, cached = len(answers), cached_tokens(answers)
        prompts = sum(answer.prompt_tokens or 0 for answer in answers)
        found.append(
            {
                "turn": turn + 1,
                "completed": count,
                "mean_input_tokens": prompts / count,
                "mean_cached_tokens": None if cached is None else cached / count,
                "mean_computed_tokens": None if cached is None else (prompts - cached) / count,
                **_quantities("ttft", map(ttft_s, answers)),
                "paths": dict(Counter(answer.path for answer in answers if answer.path is not None)),
            }
        )
    return found


def savings(prefix: Run, continuation: Run) -> Summary | None:
    """The turns after the first, of both ways: prompt tokens computed in one request and median TTFT in milliseconds.
    None if one of the ways has no such turn, or the server does not count cached tokens."""
    found: Summary = {}
    for name, run in (("prefix", prefix), ("continuation", continuation)):
        answers = [record.answer for record in run.records if record.error is None and record.turn > 0]
        cached = cached_tokens(answers)
        if not answers or cached is None:
            return None
        computed = sum(answer.prompt_tokens or 0 for answer in answers) - cached
        found[name] = {
            "computed_tokens_per_request": computed / len(answers),
            "median_ttft_ms": _quantities("ttft", map(ttft_s, answers))["median_ttft_ms"],
        }
    return found


def cached_tokens(answers: Sequence[Answer]) -> int | None:
    """None if the server counts them for no request."""
    counted = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(counted) if counted else None


def _times(answers: Sequence[Answer]) -> Summary:
    values: dict[str, Iterable[float]] = {
        "ttft": map(ttft_s, answers),
        "tpot": [time for answer in answers if (time := tpot_s(answer)) is not None],
        "itl": itertools.chain.from_iterable(map(itl_s, answers)),
        "e2e_latency": map(e2e_s, answers),
    }
    return {key: value for name in TIMES for key, value in _quantities(name, values[name]).items()}


def _quantities(name: str, seconds: Iterable[float]) -> Summary:
    values = np.fromiter(seconds, dtype=np.float64) * 1e3
    if not values.size:
        return {f"{quantity}_{name}_ms": None for quantity in QUANTITIES}
    found = (values.mean(), np.median(values), np.percentile(values, 99))
    return {f"{quantity}_{name}_ms": float(value) for quantity, value in zip(QUANTITIES, found, strict=True)}
