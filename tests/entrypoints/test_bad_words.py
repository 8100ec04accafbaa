"""``bad_words`` through the whole Engine, on the toy model. Slow twin: one call for each token, with what must not come
next pushed down by logit_bias."""

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
GREEDY = {"temperature": 0, "max_new_tokens": 16}
SAMPLED = {"temperature": 1.5, "max_new_tokens": 40, "seed": 3, "ignore_eos": True}

_names = itertools.count()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=TOY, device="cpu", dtype="float32", max_total_tokens=4096) as running:
        yield running


def sequences(engine: Engine, words: list[str]) -> list[list[int]]:
    return [engine.encode(space + word, add_special_tokens=False) for word in words for space in ("", " ")]


def bans(output: list[int], banned: list[list[int]]) -> list[int]:
    """What must not come next."""
    return [ids[-1] for ids in banned if output[len(output) - len(ids) + 1 :] == ids[:-1] or len(ids) == 1]


def slow_generate(engine: Engine, prompt_ids: list[int], words: list[str], sampling: dict[str, Any]) -> list[int]:
    output: list[int] = []
    banned = sequences(engine, words)
    while len(output) < sampling["max_new_tokens"]:
        bias = {str(token_id): -100.0 for token_id in bans(output, banned)}
        params = {**sampling, "max_new_tokens": 1, "logit_bias": bias}
        answer = engine.generate(input_ids=prompt_ids + output, sampling_params=params)
        output += answer["output_ids"]
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            break
    return output


@pytest.mark.parametrize(
    "words",
    [["manual"], ["wc"], ["wc -l"], ["manual.md"], ["ma", "manual.md\n```"], ["```", "bash", "l m", "-l man", "."]],
    ids=str,
)
def test_greedy_bad_words_match_reference(engine: Engine, words: list[str]) -> None:
    plain = engine.generate(PROMPT, GREEDY)
    answer = engine.generate(PROMPT, {**GREEDY, "bad_words": words})
    assert answer["output_ids"] == slow_generate(engine, engine.encode(PROMPT), words, GREEDY)
    assert answer["output_ids"] != plain["output_ids"], "the test needs words that the model would say"
    streamed = list(engine.generate(PROMPT, {**GREEDY, "bad_words": words}, stream=True))[-1]
    assert streamed["output_ids"] == answer["output_ids"]


def test_bad_words_apply_to_each_sample_independently(engine: Engine) -> None:
    """Samples of one request side by side with others: each says what it says alone, and nothing that is banned."""
    words = ["a", "an", "in", "the ", "manual", "lines", "er", "wc -l", "bash\nwc"]
    banned = sequences(engine, words)
    plain, *others = engine.generate(
        [PROMPT] * 3, [{**SAMPLED, "n": 4}, {**SAMPLED, "n": 4, "bad_words": words}, {**GREEDY, "n": 4}]
    )[::4]
    together = engine.generate(PROMPT, {**SAMPLED, "n": 4, "bad_words": words})
    assert others[0]["output_ids"] == together[0]["output_ids"] != plain["output_ids"]
    for index, answer in enumerate(together):
        ids = answer["output_ids"]
        alone = engine.generate(PROMPT, {**SAMPLED, "seed": SAMPLED["seed"] + index, "bad_words": words})
        assert ids == alone["output_ids"]
        assert not any(ids[n] in bans(ids[:n], banned) for n in range(len(ids)))


def test_bad_word_started_in_the_parent_may_end_in_the_child(engine: Engine) -> None:
    """Only output counts, as in vLLM: what the parent said is the child's prompt."""
    rid, word = f"parent-{next(_names)}", "wc -l"
    whole = engine.generate(PROMPT, GREEDY)
    ids = engine.encode("wc -l", add_special_tokens=False)
    spoken = next(n for n in range(len(whole["output_ids"])) if whole["output_ids"][n : n + len(ids)] == ids)
    engine.generate(PROMPT, {**GREEDY, "max_new_tokens": spoken + len(ids) - 1}, rid=rid, retain_ttl=60)
    child = engine.generate(None, {**GREEDY, "bad_words": [word]}, continuation_of=rid)
    assert child["output_ids"][0] == ids[-1]
    start = engine.encode(PROMPT) + whole["output_ids"][: spoken + len(ids) - 1]
    assert child["output_ids"] == slow_generate(engine, start, [word], GREEDY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": "wc"}, "bad_words: expected array, got str"),
        ({"bad_words": ["wc", "  "]}, "an empty word, or spaces alone"),
        ({"bad_words": ["a"] * 129}, "bad_words has 129 words; use at most 128"),
        ({"bad_words": ["a" * 4097]}, "bad_words has 4097 characters; use at most 4096"),
        ({"bad_words": ["a"], "beam_width": 2}, "beam_width is 2; it does not go with bad_words"),
        ({"bad_words": ["a"], "item_trie": "items"}, "it does not go with bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": [5]}, "it does not go with bad_words"),
        ({"bad_words": ["a\ud800"]}, "not valid Unicode"),
    ],
)
def test_refusals(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        engine.generate(PROMPT, {**GREEDY, **fields})
    assert status_of(refusal.value) == 400
