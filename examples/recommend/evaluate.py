"""Measures the quality of the recommendations, and whether continuation and the item trie change them.

    python -m baton.examples.recommend.evaluate                       greedy thoughts
    python -m baton.examples.recommend.evaluate --temperature 0.6     sampled ones, top_p 0.95, top_k 50

Every held-out user is served three times:

    program        examples/recommend/program.py: stage 2 continues stage 1
    two requests   without continuation: the second sends all the token ids again, and finds nothing in the cache
    no trie        as the second of these, but the search may write any codes

The first two must give the same thoughts and items, and scores within 1e-4; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from baton.entrypoints.engine import Engine

from ..toy_model.make_data import HELD_OUT_SEED
from .catalogue import TOY_MODEL, load_catalogue, token_table
from .held_out import User, held_out_users
from .metrics import evaluate
from .program import CODES_PER_ITEM, TRIE, WIDTH, recommend

TOP_K = (1, 3, 8, 32)
TOLERANCE = 1e-4
"""Tolerance of scores (natural logarithms): float32 sums in another order."""
THINK_END, ITEM_START = "</think>", "\n<|sid_begin|>"


@dataclass(slots=True)
class Answer:
    """The result of a user. items: codes, best first. scores: sequence_score of each. computed, prompt: computed
    tokens, and all prompt tokens, of stage 2."""

    thought: str
    items: list[str]
    scores: list[float]
    computed: int
    prompt: int
    path: str | None = None
    """How the KV came to stage 2, if it was a continuation."""


# --- three ways to serve a user ---------------------------------------------------------------------------------------


def run_program(engine: Engine, users: Sequence[User], sampling: dict[str, Any], concurrency: int) -> list[Answer]:
    """With continuation; ``concurrency`` users at a time."""
    batch = [
        {"instruction": user.instruction, "question": user.question, "seed": seed} for seed, user in enumerate(users)
    ]
    states = recommend.run_batch(batch, backend=engine, num_threads=concurrency, progress_bar=True, **sampling)
    answers = []
    for state in states:
        metas = state.meta("items")
        answer = _answer(state["thought"], state["items"], metas)
        answer.path = metas[0]["continuation"]["path"]
        answers.append(answer)
    return answers


def run_two_requests(engine: Engine, user: User, sampling: dict[str, Any], seed: int) -> tuple[Answer, Answer]:
    """Without continuation: (with the trie, without it). Each user has a part of the cache to itself, and so has each
    stage, so that nothing is found that another request computed."""
    prompt = engine.encode(user.prompt, add_special_tokens=False)
    thinking = {**sampling, "seed": seed, "max_new_tokens": 100, "stop": [THINK_END]}
    first = engine.generate(input_ids=prompt, sampling_params=thinking, cache_salt=uuid4().hex)
    thought_ids = first["output_ids"]
    if first["meta_info"]["finish_reason"].get("matched") == THINK_END:
        thought_ids = thought_ids[: -len(engine.encode(THINK_END))]
    ids = prompt + thought_ids + engine.encode(THINK_END + ITEM_START)
    search = {"beam_width": WIDTH, "n": WIDTH, "max_new_tokens": CODES_PER_ITEM}
    salt = uuid4().hex
    with_trie = engine.generate(input_ids=ids, sampling_params={**search, "item_trie": TRIE}, cache_salt=salt)
    without = engine.generate(input_ids=ids, sampling_params=search, cache_salt=salt)
    both = [
        _answer(first["text"], [result["text"] for result in results], [result["meta_info"] for result in results])
        for results in (with_trie, without)
    ]
    return both[0], both[1]


def _answer(thought: str, items: list[str], metas: list[dict[str, Any]]) -> Answer:
    scores = [meta["sequence_score"] for meta in metas]
    prompt, cached = metas[0]["prompt_tokens"], metas[0]["cached_tokens"]
    return Answer(thought, items, scores, computed=prompt - cached, prompt=prompt)


# --- what they are compared by ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """Shares and metrics are in [0, 1], tokens are medians over users."""

    users: int
    temperature: float
    metrics: dict[str, float]
    metrics_without_trie: dict[str, float]
    exist: float
    exist_without_trie: float
    different: list[int]
    """Numbers of the users for which the program and two requests gave different thoughts, items or orders; empty if
    all is well."""
    largest_difference: float
    """Between the scores of the program and of two requests, over the other users."""
    paths: dict[str, int]
    computed: float
    computed_by_two_requests: float
    prompt: float


def compare(program: list[Answer], two: list[Answer], no_trie: list[Answer], users: Sequence[User], t: float) -> Report:
    """``t``: the temperature that the thoughts were sampled at."""
    known = {item.codes for item in load_catalogue()}
    targets = [user.targets for user in users]
    is_same = [(a.thought, a.items) == (b.thought, b.items) for a, b in zip(program, two, strict=True)]
    pairs = [(a, b) for a, b, same in zip(program, two, is_same) if same]
    differences = [abs(x - y) for a, b in pairs for x, y in zip(a.scores, b.scores, strict=True)]
    paths = [answer.path or "" for answer in program]
    return Report(
        users=len(users),
        temperature=t,
        metrics=evaluate([answer.items for answer in program], targets, TOP_K),
        metrics_without_trie=evaluate([answer.items for answer in no_trie], targets, TOP_K),
        exist=_share_that_exists(program, known),
        exist_without_trie=_share_that_exists(no_trie, known),
        different=[number for number, same in enumerate(is_same) if not same],
        largest_difference=max(differences, default=0.0),
        paths={path: paths.count(path) for path in sorted(set(paths))},
        computed=statistics.median(answer.computed for answer in program),
        computed_by_two_requests=statistics.median(answer.computed for answer in two),
        prompt=statistics.median(answer.prompt for answer in program),
    )


def _share_that_exists(answers: list[Answer], known: set[str]) -> float:
    items = [item for answer in answers for item in answer.items]
    return sum(item in known for item in items) / len(items)


def run(number: int, *, seed: int = HELD_OUT_SEED, temperature: float = 0.0, concurrency: int = 8) -> Report:
    """Serve ``number`` held-out users all three ways."""
    users = held_out_users(number, seed)
    sampling = {"temperature": temperature} | ({"top_p": 0.95, "top_k": 50} if temperature > 0 else {})
    with Engine(model_path=str(TOY_MODEL), dtype="float32", max_total_tokens=16384) as engine:
        table = token_table(load_catalogue(), lambda text: engine.encode(text, add_special_tokens=False))
        engine.load_item_trie(TRIE, table)
        program = run_program(engine, users, sampling, concurrency)
        pairs = [run_two_requests(engine, user, sampling, place) for place, user in enumerate(tqdm(users))]
    two, no_trie = (list(column) for column in zip(*pairs, strict=True))
    return compare(program, two, no_trie, users, temperature)


def failures(report: Report) -> list[str]:
    """Failures of continuation or of the trie."""
    found = []
    if report.different:
        found.append(f"with and without continuation users {report.different} got something else")
    if report.largest_difference > TOLERANCE:
        found.append(f"with and without continuation scores differ by {report.largest_difference:.1e}")
    if report.exist < 1.0:
        found.append(f"the search with the trie named items that do not exist: {1 - report.exist:.1%}")
    return found


# --- output -----------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    thoughts = "greedy thoughts" if report.temperature == 0 else f"thoughts sampled at {report.temperature:g}"
    print(f"\n{report.users} held-out users, {thoughts}, {WIDTH} items each\n")
    print(f"{'':24} {'with the trie':>14} {'without':>9}")
    print(f"{'ids that exist':24} {report.exist:14.1%} {report.exist_without_trie:9.1%}")
    for name, value in report.metrics.items():
        print(f"{name:24} {value:14.1%} {report.metrics_without_trie[name]:9.1%}")
    paths = ", ".join(f"{path} {number}" for path, number in report.paths.items())
    same = report.users - len(report.different)
    print(
        f"""
Stage 2 as a continuation computed {report.computed:g} of its {report.prompt:g} prompt tokens (path: {paths});
as a request of its own it computed {report.computed_by_two_requests:g}. Medians.
With and without continuation {same} of {report.users} users got the same thought and the same items in the same order;
their scores differ by {report.largest_difference:.1e} at most."""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge the recommender on users it was not trained on.")
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="of the stream of users")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the thoughts; 0: greedy")
    parser.add_argument("--concurrency", type=int, default=8, help="users at a time")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    report = run(args.users, seed=args.seed, temperature=args.temperature, concurrency=args.concurrency)
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    for failure in failures(report):
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures(report) else 0


if __name__ == "__main__":
    sys.exit(main())
