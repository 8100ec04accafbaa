"""An Engine on the toy model whose continuations are compared with replays of the same ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
SUFFIX = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5, "max_new_tokens": 24}
ONE = {"temperature": 0, "max_new_tokens": 1}
POOL = 2048
TIE = 1e-3

_names = itertools.count()


@contextmanager
def toy_engine(page_size: int) -> Iterator[Engine]:
    """Leases are those that requests ask for: under fcfs, none is granted on its own."""
    settings = {"max_total_tokens": POOL, "page_size": page_size, "schedule_policy": "fcfs"}
    with Engine(model_path=TOY, device="cpu", dtype="float32", **settings) as running:
        yield running


def name(kind: str) -> str:
    return f"{kind}-{next(_names)}"


def evict_everything(engine: Engine) -> None:
    """Other traffic takes all the memory that nothing locks."""
    rng = random.Random(next(_names))
    before = stats(engine)["evicted_tokens"]
    while stats(engine)["evicted_tokens"] - before < POOL:
        ids = [[rng.randrange(5, 1000) for _ in range(400)] for _ in range(3)]
        engine.generate(input_ids=ids, sampling_params=ONE)


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["stats"]


def replay(engine: Engine, ids: list[int], sampling: dict) -> dict:
    """The same prompt as plain ids, in a namespace of its own: nothing of it is cached."""
    return engine.generate(
        input_ids=ids, sampling_params=sampling, cache_salt=name("replay"), return_logprob=True, top_logprobs_num=2
    )


def child_of(engine: Engine, parent: str, sampling: dict, **fields: Any) -> Any:
    return engine.generate(None, sampling, continuation_of=parent, return_logprob=True, **fields)


def assert_same(child: dict, replayed: dict) -> None:
    """The same prompt, and equal token for token. They may part where the two best logits are all but equal; the
    logprobs up to there tell a context that is slightly wrong from the right one."""
    assert child["meta_info"]["prompt_tokens"] == replayed["meta_info"]["prompt_tokens"]
    tops = replayed["meta_info"]["output_top_logprobs"]
    for position, (mine, theirs) in enumerate(zip(child["output_ids"], replayed["output_ids"])):
        if "output_token_logprobs" in child["meta_info"] and mine == theirs:
            (value, *_), (want, *_) = (x["meta_info"]["output_token_logprobs"][position] for x in (child, replayed))
            assert value == pytest.approx(want, abs=1e-3), f"token {position}"
        if mine != theirs:
            (best, *_), (second, *_) = tops[position]
            assert best - second < TIE, f"token {position}: {mine} instead of {theirs}, by {best - second}"
            return
    assert child["output_ids"] == replayed["output_ids"] and child["text"] == replayed["text"]


def inherited_ids(prompt_ids: list[int], parent: dict) -> list[int]:
    """What the parent's client saw, as ids; its stop, where it matched one, was a token."""
    matched = parent["meta_info"]["finish_reason"].get("matched")
    assert matched is None or isinstance(matched, int)
    return prompt_ids + parent["output_ids"][: -1 if matched is not None else None]


def start(engine: Engine, sampling: dict | None = None, **fields: Any) -> tuple[str, list[int], dict]:
    """A finished parent: its rid, its prompt's ids, its answer."""
    rid = name("parent")
    fields = {"retain_ttl": 60, **fields}
    return rid, engine.encode(PROMPT), engine.generate(PROMPT, sampling or GREEDY, rid=rid, **fields)


def suffix_ids(engine: Engine, text: str = SUFFIX) -> list[int]:
    return engine.encode(text, add_special_tokens=False)
