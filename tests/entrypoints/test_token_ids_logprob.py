"""``token_ids_logprob`` through the whole Engine, on the toy model. Oracle: the likeliest tokens of the same call, and
the logprobs of the tokens themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 12}
KINDS = ("input", "output")

_names = itertools.count()


@pytest.fixture(scope="module", params=[None, 7], ids=["whole", "chunks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    chunks = {} if request.param is None else {"chunked_prefill_size": request.param}
    with Engine(model_path=TOY, device="cpu", dtype="float32", max_total_tokens=4096, **chunks) as running:
        yield running


def ask(engine: Engine, ids: Any, prompt: Any = PROMPT, **fields: Any) -> Any:
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, **fields}
    return engine.generate(prompt, more.pop("sampling", GREEDY), token_ids_logprob=ids, **more)


def check(meta: dict[str, Any], ids: list[int]) -> int:
    """Each position names these ids, with the logprobs that they have elsewhere in the answer. Returns how many of
    those there were to compare with."""
    compared = 0
    for kind in KINDS:
        tokens, tops, named = (
            meta[f"{kind}_{name}"] for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
        )
        assert len(tokens) == len(named)
        for (value, token_id, _), top, rows in zip(tokens, tops, named, strict=True):
            if value is None:
                assert rows is None and top is None
                continue
            assert [row[1] for row in rows] == ids
            known = {row[1]: row[0] for row in top} | {token_id: value}
            for logprob, named_id, _ in rows:
                if named_id in known:
                    assert logprob == pytest.approx(known[named_id], abs=1e-4)
                    compared += 1
                else:
                    assert logprob <= min(row[0] for row in top) + 1e-4
    return compared


def test_token_ids_logprob_covers_prompt_and_output(engine: Engine) -> None:
    plain = engine.generate(PROMPT, GREEDY)
    ids = [*dict.fromkeys([*engine.encode(PROMPT)[:6], *plain["output_ids"][:6], 700]), 700]
    answer = ask(engine, ids)
    assert answer["output_ids"] == plain["output_ids"]
    assert check(answer["meta_info"], ids) > 20
    assert answer["meta_info"]["input_token_ids_logprobs"][0] is None
    assert answer["meta_info"]["output_token_ids_logprobs"][0][0][2] is None
    streamed = list(ask(engine, ids, stream=True))[-1]
    for kind in KINDS:
        name = f"{kind}_token_ids_logprobs"
        for row, twin in zip(streamed["meta_info"][name], answer["meta_info"][name], strict=True):
            if row is not None:
                assert [entry[1:] for entry in row] == [entry[1:] for entry in twin]
                assert [entry[0] for entry in row] == pytest.approx([entry[0] for entry in twin], abs=1e-4)


def test_token_ids_logprob_with_texts_for_output_only(engine: Engine) -> None:
    answer = ask(engine, [281, 311], logprob_start_len=-1, return_text_in_logprobs=True, top_logprobs_num=0)
    meta = answer["meta_info"]
    assert meta["input_token_ids_logprobs"] == [] and "input_top_logprobs" not in meta
    texts = [engine.tokenizer.token_text(token_id) for token_id in (281, 311)]
    assert [[row[2] for row in rows] for rows in meta["output_token_ids_logprobs"]] == [texts] * len(
        answer["output_ids"]
    )


def test_batch_takes_one_shared_list_or_one_per_prompt(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT + "```", "a"]
    for given, each in (([281, 75], [[281, 75]] * 3), ([[281], None, [75, 311, 5]], [[281], [], [75, 311, 5]])):
        for answer, ids in zip(ask(engine, given, prompts), each, strict=True):
            if ids:
                check(answer["meta_info"], ids)
            else:
                assert "output_token_ids_logprobs" not in answer["meta_info"]
    assert "output_token_ids_logprobs" not in ask(engine, [])["meta_info"]
    for answer in ask(engine, [281, 198], sampling={**GREEDY, "temperature": 1, "n": 3}):
        check(answer["meta_info"], [281, 198])


def test_token_ids_logprob_covers_inherited_tokens(engine: Engine) -> None:
    rid = f"parent-{next(_names)}"
    parent = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 5}, rid=rid, retain_ttl=60)
    ids = parent["output_ids"]
    child = engine.generate(
        None, GREEDY, continuation_of=rid, return_logprob=True, top_logprobs_num=20, token_ids_logprob=ids,
        logprob_start_len=parent["meta_info"]["prompt_tokens"],
    )  # fmt: skip
    assert len(child["meta_info"]["input_token_ids_logprobs"]) == len(ids)
    assert check(child["meta_info"], ids) >= len(ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids_logprob": [5]}, "token_ids_logprob is set without return_logprob"),
        ({"token_ids_logprob": 5, "return_logprob": True}, "takes a list of token ids, or one list for each prompt"),
        ({"token_ids_logprob": [True], "return_logprob": True}, "takes a list of token ids"),
        ({"token_ids_logprob": [[5]], "return_logprob": True}, "single prompt; give one value"),
        ({"token_ids_logprob": [-1], "return_logprob": True}, "holds token id -1"),
        ({"token_ids_logprob": [10**6], "return_logprob": True}, "holds token id 1000000"),
        ({"token_ids_logprob": [5] * 129, "return_logprob": True}, "has 129 ids; use at most 128"),
        (
            {"token_ids_logprob": [5], "return_logprob": True, "sampling_params": {"beam_width": 2}},
            "does not go with beam_width",
        ),
    ],
)
def test_refusals(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        engine.generate(PROMPT, **fields)
    assert refusal.value.param == "token_ids_logprob" and status_of(refusal.value) == 400
