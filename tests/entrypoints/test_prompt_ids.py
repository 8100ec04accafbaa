"""The ids of prompts, on the toy model, also of those that were inherited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.entrypoints.engine import Engine

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
SUFFIX = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}

_names = itertools.count()


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        model_path=TOY, device="cpu", dtype="float32", max_total_tokens=2048, page_size=request.param,
        linear_backend="torch",
    ) as running:  # fmt: skip
        yield running


@pytest.mark.parametrize("path", ["handoff", "match", "fork"])
def test_continuation_returns_all_prompt_token_ids(engine: Engine, path: str) -> None:
    rid = f"parent-{next(_names)}"
    fields: dict = {"continuation_of": rid, "continuation_suffix": SUFFIX, "return_prompt_token_ids": True}
    suffix = engine.encode(SUFFIX, add_special_tokens=False)
    if path == "fork":
        stream = engine.generate(PROMPT, GREEDY | {"max_new_tokens": 400, "ignore_eos": True}, rid=rid, stream=True)
        next(stream)
        child = engine.generate(None, GREEDY, continuation_at="now", **fields)
        parent = list(stream)[-1]["output_ids"]
        inherited = child["meta_info"]["continuation"]["inherited_tokens"]
        assert child["prompt_token_ids"] == (engine.encode(PROMPT) + parent)[:inherited] + suffix
    else:
        parent = engine.generate(PROMPT, GREEDY, rid=rid, retain_ttl=60 if path == "handoff" else 0)
        child = engine.generate(None, GREEDY, **fields)
        assert child["prompt_token_ids"] == engine.encode(PROMPT) + parent["output_ids"][:-1] + suffix
    assert child["meta_info"]["continuation"]["path"] == path
    assert child["meta_info"]["prompt_tokens"] == len(child["prompt_token_ids"])


def test_beam_results_return_prompt_token_ids(engine: Engine) -> None:
    params = {"beam_width": 4, "n": 3, "max_new_tokens": 4}
    for answer in engine.generate(PROMPT, params, return_prompt_token_ids=True):
        assert answer["prompt_token_ids"] == engine.encode(PROMPT)
