"""``stop_regex`` through the whole Engine, on the toy model; oracle: Python's `re` on what it says without one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.lang import function, gen
from baton.scheduler.outcome import RequestRefused

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
SAMPLED = {"temperature": 4.0, "max_new_tokens": 30, "seed": 3, "ignore_eos": True, "skip_special_tokens": False}
PATTERN = r"[a-z]+\.[a-z]"

_names = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=TOY, device="cpu", dtype="float32", max_total_tokens=4096) as running:
        yield running


def cut(engine: Engine, whole: dict[str, Any], pattern: str) -> tuple[list[int], str]:
    """The first ids of an output in whose text the pattern matches, and that text."""
    texts = [engine.tokenizer.token_text(token_id) for token_id in whole["output_ids"]]
    count = next(n for n in range(1, len(texts) + 1) if re.search(pattern, "".join(texts[:n])))
    return whole["output_ids"][:count], "".join(texts[:count])


def test_output_ends_at_the_token_completing_a_match(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)
    ids, text = cut(engine, whole, PATTERN)
    assert 2 < len(ids) < len(whole["output_ids"])
    for form in (PATTERN, ["never", PATTERN]):
        params = {**GREEDY, "stop_regex": form}
        last = list(engine.generate(PROMPT, params, stream=True))[-1]
        for answer in (engine.generate(PROMPT, params), last):
            assert (answer["output_ids"], answer["text"]) == (ids, text)
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": PATTERN}
    assert engine.generate(PROMPT, {**GREEDY, "stop_regex": ["never"]})["text"] == whole["text"]
    assert engine.generate(PROMPT, {**GREEDY, "stop_regex": ""})["text"] == whole["text"]


def test_stop_regex_ends_each_sample_independently(engine: Engine) -> None:
    pattern = "[aeiou][^ ]*[0-9_]|[u-z]{2}"
    wholes = engine.generate(PROMPT, {**SAMPLED, "n": 6})
    ended = engine.generate(PROMPT, {**SAMPLED, "n": 6, "stop_regex": pattern})
    lengths = set()
    for whole, answer in zip(wholes, ended, strict=True):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert answer["output_ids"] == cut(engine, whole, pattern)[0]
            lengths.add(len(answer["output_ids"]))
        else:
            assert answer["output_ids"] == whole["output_ids"] and not re.search(pattern, whole["text"])
    assert len(lengths) > 1, "the test needs samples that end in several places"


@pytest.mark.parametrize("at", ["finish", "now"])
def test_child_continues_after_the_match(engine: Engine, at: str) -> None:
    rid, params = f"parent-{next(_names)}", {**GREEDY, "stop_regex": PATTERN}
    parent = engine.generate(PROMPT, params, rid=rid, retain_ttl=60)
    child = engine.generate(None, GREEDY, continuation_of=rid, continuation_at=at)
    came = child["meta_info"]["continuation"]
    assert (came["path"], came["trimmed_tokens"]) == ("handoff", 0)
    assert child["meta_info"]["prompt_tokens"] == parent["meta_info"]["prompt_tokens"] + len(parent["output_ids"])
    whole = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": len(parent["output_ids"]) + 24})
    assert parent["output_ids"] + child["output_ids"] == whole["output_ids"]


def test_match_does_not_span_parent_output(engine: Engine) -> None:
    rid = f"parent-{next(_names)}"
    engine.generate(PROMPT, {**GREEDY, "stop_regex": PATTERN}, rid=rid, retain_ttl=60)
    child = engine.generate(None, {**GREEDY, "stop_regex": PATTERN}, continuation_of=rid)
    assert child["meta_info"]["finish_reason"]["matched"] != PATTERN


def test_min_new_tokens(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)
    ids, _ = cut(engine, whole, PATTERN)
    later = engine.generate(PROMPT, {**GREEDY, "stop_regex": PATTERN, "min_new_tokens": len(ids)})
    assert later["output_ids"] == whole["output_ids"], "a match within the minimum is text"
    more = {"min_new_tokens": len(ids) - 1, "stop_regex": "[a-z]"}
    assert engine.generate(PROMPT, {**GREEDY, **more})["output_ids"] == ids


def test_program_continues_after_the_match(engine: Engine) -> None:
    @function
    def two(s, **options):
        s += PROMPT
        s += gen("start", max_tokens=24, stop_regex=PATTERN)
        s += gen("rest", max_tokens=24, **options)

    whole = engine.generate(PROMPT, GREEDY)["text"]
    state = two.run(backend=engine, temperature=0)
    assert re.search(PATTERN, state["start"]) and state["start"] + state["rest"] == whole
    assert state.meta("rest")["continuation"]["trimmed_tokens"] == 0
    again = two.run(backend=engine, temperature=0, stop_regex=["never"])
    assert again.text() == state.text()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_regex": "a(?=b)"}, "look-arounds are not supported"),
        ({"stop_regex": [r"(a)\1"]}, "back-references are not supported"),
        ({"stop_regex": "a", "beam_width": 2}, "a beam search ends at plain strings"),
        ({"stop_regex": ["a"] * 9}, "use at most 8"),
    ],
)
def test_refusals(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        engine.generate(PROMPT, {**GREEDY, **fields})
    assert "stop_regex" in (refusal.value.param or "") and status_of(refusal.value) == 400
