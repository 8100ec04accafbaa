"""Continuations through the Engine, on the toy model: every path says what a replay of the same ids says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from tests.doubles.continued_engine import (
    GREEDY,
    PROMPT,
    SAMPLED,
    SUFFIX,
    assert_same,
    child_of,
    evict_everything,
    inherited_ids,
    name,
    replay,
    start,
    stats,
    suffix_ids,
    toy_engine,
)


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with toy_engine(request.param) as running:
        yield running


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", ["text", "ids", "empty"])
def test_handoff_after_eviction_equals_replay(engine: Engine, sampling: dict, form: str) -> None:
    rid, prompt_ids, parent = start(engine, sampling)
    retained = parent["meta_info"]["retained"]
    assert retained["tokens"] >= len(prompt_ids) and 0 < retained["ttl"] <= 60
    evict_everything(engine)
    suffix = {"text": {"continuation_suffix": SUFFIX}, "ids": {"continuation_ids": suffix_ids(engine)}, "empty": {}}
    child = child_of(engine, rid, sampling, **suffix[form])
    ids = inherited_ids(prompt_ids, parent)
    got = child["meta_info"]["continuation"]
    assert (got["path"], got["inherited_tokens"]) == ("handoff", len(ids))
    assert got["recomputed_tokens"] <= 1
    ids += suffix_ids(engine) if form != "empty" else []
    assert child["meta_info"]["prompt_tokens"] == len(ids)
    assert_same(child, replay(engine, ids, sampling))


def test_unleased_kv_is_evicted_and_recomputed(engine: Engine) -> None:
    rid, _, _ = start(engine, retain_ttl=0)
    evict_everything(engine)
    child = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX)
    got = child["meta_info"]["continuation"]
    assert got["path"] == "fallback" and got["recomputed_tokens"] == got["inherited_tokens"]


def test_chained_continuations_equal_replay(engine: Engine) -> None:
    rid, ids, answer = start(engine)
    for stage in range(4):
        evict_everything(engine)
        ids = inherited_ids(ids, answer) + suffix_ids(engine)
        child = name("stage")
        answer = engine.generate(
            None, GREEDY, rid=child, continuation_of=rid, continuation_suffix=SUFFIX, retain_ttl=60
        )
        assert answer["meta_info"]["continuation"]["path"] == "handoff", stage
        assert answer["meta_info"]["continuation"]["recomputed_tokens"] <= 1
        assert_same(answer, replay(engine, ids, GREEDY))
        rid = child
    assert engine.release(rid) and stats(engine)["leased_tokens"] == 0


def test_child_may_reuse_its_parents_rid(engine: Engine) -> None:
    rid, ids, answer = start(engine)
    for _ in range(3):
        ids = inherited_ids(ids, answer) + suffix_ids(engine)
        answer = engine.generate(None, GREEDY, rid=rid, continuation_of=rid, continuation_suffix=SUFFIX, retain_ttl=60)
        assert answer["meta_info"]["continuation"]["path"] == "handoff"
        assert_same(answer, replay(engine, ids, GREEDY))
    assert engine.release(rid) and stats(engine)["leased_tokens"] == 0


def test_streamed_continuation_equals_replay(engine: Engine) -> None:
    rid, prompt_ids, parent = start(engine)
    outputs = list(child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX, stream=True))
    assert all("continuation" not in output["meta_info"] for output in outputs[:-1])
    assert outputs[-1]["meta_info"]["continuation"]["path"] == "handoff"
    ids = inherited_ids(prompt_ids, parent) + suffix_ids(engine)
    assert_same(outputs[-1], replay(engine, ids, GREEDY))


def test_child_of_a_running_parent_waits_or_forks(engine: Engine) -> None:
    rid = name("parent")
    long = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    running = engine.generate(PROMPT, long, stream=True, rid=rid)
    next(running)
    answers: dict[str, dict] = {}

    def call(at: str) -> None:
        answers[at] = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX, continuation_at=at)

    threads = [threading.Thread(target=call, args=(at,)) for at in ("finish", "now")]
    for thread in threads:
        thread.start()
    *_, parent = running
    for thread in threads:
        thread.join(30)
    ids = engine.encode(PROMPT) + parent["output_ids"]
    finish, now = answers["finish"], answers["now"]
    got = finish["meta_info"]["continuation"]
    assert (got["path"], got["inherited_tokens"]) == ("handoff", len(ids)) and got["recomputed_tokens"] <= 1
    assert_same(finish, replay(engine, ids + suffix_ids(engine), GREEDY))
    got = now["meta_info"]["continuation"]
    assert got["path"] == "fork" and len(engine.encode(PROMPT)) < got["inherited_tokens"] < len(ids)
    assert_same(now, replay(engine, ids[: got["inherited_tokens"]] + suffix_ids(engine), GREEDY))
    assert "retained" not in parent["meta_info"], "nobody asked for it"


def test_concurrently_sent_parent_and_child_hand_off(engine: Engine) -> None:
    rid = name("parent")

    async def run() -> tuple[Any, Any]:
        parent = engine.async_generate(PROMPT, GREEDY, rid=rid)
        return await asyncio.gather(parent, engine.async_generate(None, GREEDY, continuation_of=rid))

    parent, child = asyncio.run(run())
    assert child["meta_info"]["continuation"]["path"] == "handoff"
    assert_same(child, replay(engine, inherited_ids(engine.encode(PROMPT), parent), GREEDY))


def test_kept_parent_is_handed_off_to_several_children(engine: Engine) -> None:
    rid, prompt_ids, parent = start(engine)
    evict_everything(engine)
    suffixes = [SUFFIX, SUFFIX.replace("12", "7"), ""]
    children = child_of(engine, rid, GREEDY, continuation_suffix=suffixes, keep_parent=True)
    for suffix, child in zip(suffixes, children, strict=True):
        assert child["meta_info"]["continuation"]["path"] == "handoff"
        ids = inherited_ids(prompt_ids, parent) + suffix_ids(engine, suffix)
        assert_same(child, replay(engine, ids, GREEDY))
    assert engine.release(rid), "the parent was kept"
    assert not engine.release(rid) and not engine.release("nobody")
    evict_everything(engine)
    child = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX)
    assert child["meta_info"]["continuation"]["path"] == "fallback"
    assert_same(child, replay(engine, inherited_ids(prompt_ids, parent) + suffix_ids(engine), GREEDY))


def test_child_continues_the_indexed_parent_sample(engine: Engine) -> None:
    rid = name("parent")
    sampling = {**SAMPLED, "temperature": 1.2, "n": 3}
    parents = engine.generate(PROMPT, sampling, rid=rid, retain_ttl=60)
    assert {parent["meta_info"]["id"] for parent in parents} == {rid}
    prompt_ids = engine.encode(PROMPT)
    children = engine.generate(
        None, {**SAMPLED, "n": 2}, continuation_of=rid, continuation_index=2, continuation_suffix=SUFFIX
    )
    ids = inherited_ids(prompt_ids, parents[2]) + suffix_ids(engine)
    assert children[0]["meta_info"]["continuation"]["path"] == "handoff"
    for sample, child in enumerate(children):
        assert_same(child, replay(engine, ids, {**SAMPLED, "seed": SAMPLED["seed"] + sample}))
    for index in (0, 1):
        child = child_of(engine, rid, GREEDY, continuation_index=index)
        assert child["meta_info"]["continuation"]["path"] == "handoff"
        assert_same(child, replay(engine, inherited_ids(prompt_ids, parents[index]), GREEDY))
    with pytest.raises(RequestRefused, match="continuation_index is 3") as caught:
        child_of(engine, rid, GREEDY, continuation_index=3)
    assert (status_of(caught.value), caught.value.param) == (400, "continuation_index")


def test_each_batch_prompt_can_be_a_parent(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT.replace("manual.md", "notes.txt")]
    parents = engine.generate(prompts, GREEDY, rid=name("batch"), retain_ttl=60)
    rids = [parent["meta_info"]["id"] for parent in parents]
    fallback = engine.encode(PROMPT)
    children = engine.generate(
        input_ids=[fallback, fallback, fallback], sampling_params=GREEDY, continuation_of=[rids[1], None, rids[0]]
    )
    paths = [child["meta_info"].get("continuation", {}).get("path") for child in children]
    assert paths == ["handoff", None, "handoff"]
    for child, prompt, parent in ((children[0], prompts[1], parents[1]), (children[2], prompts[0], parents[0])):
        assert_same(child, replay(engine, inherited_ids(engine.encode(prompt), parent), GREEDY))


def test_rest_of_a_split_token_precedes_the_suffix(engine: Engine) -> None:
    """The stop string begins inside a token: the child inherits the tokens before it, and the text up to it."""
    _, prompt_ids, whole = start(engine, retain_ttl=0)
    texts = [engine.tokenizer.token_text(token_id) for token_id in whole["output_ids"]]
    cut = next(k for k, text in enumerate(texts) if k > 1 and len(text) > 2 and texts[k + 1])
    stop = texts[cut][2:] + texts[cut + 1][0]
    assert "".join(texts).index(stop) == len("".join(texts[:cut])) + 2
    rid = name("parent")
    parent = engine.generate(PROMPT, {**GREEDY, "stop": stop}, rid=rid, retain_ttl=60)
    assert parent["text"] == "".join(texts[:cut]) + texts[cut][:2]
    forms: list[dict[str, Any]] = [{"continuation_suffix": SUFFIX}, {"continuation_ids": suffix_ids(engine)}]
    for form in forms:
        child = child_of(engine, rid, GREEDY, keep_parent=True, **form)
        got = child["meta_info"]["continuation"]
        assert (got["path"], got["trimmed_tokens"]) == ("handoff", 2)
        assert got["inherited_tokens"] == len(prompt_ids) + cut
        rest = texts[cut][:2]
        ids = suffix_ids(engine, rest + SUFFIX if "continuation_suffix" in form else rest)
        ids += suffix_ids(engine) if "continuation_ids" in form else []
        assert_same(child, replay(engine, prompt_ids + whole["output_ids"][:cut] + ids, GREEDY))


def test_no_stop_trim_keeps_the_stop_token(engine: Engine) -> None:
    rid, prompt_ids, parent = start(engine, no_stop_trim=True)
    assert isinstance(parent["meta_info"]["finish_reason"]["matched"], int)
    child = child_of(engine, rid, GREEDY, continuation_suffix="\n<|im_start|>assistant\n")
    assert child["meta_info"]["continuation"]["trimmed_tokens"] == 0
    ids = prompt_ids + parent["output_ids"] + suffix_ids(engine, "\n<|im_start|>assistant\n")
    assert_same(child, replay(engine, ids, GREEDY))


def test_logprobs_of_inherited_tokens_match_replay(engine: Engine) -> None:
    rid, prompt_ids, parent = start(engine)
    ids = inherited_ids(prompt_ids, parent) + suffix_ids(engine)
    start_len = len(prompt_ids)
    child = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX, logprob_start_len=start_len)
    plain = engine.generate(
        input_ids=ids,
        sampling_params=GREEDY,
        cache_salt=name("replay"),
        return_logprob=True,
        logprob_start_len=start_len,
    )
    for kind in ("input_token_logprobs", "output_token_logprobs"):
        mine, theirs = child["meta_info"][kind], plain["meta_info"][kind]
        assert [row[1] for row in mine] == [row[1] for row in theirs]
        assert [row[0] for row in mine] == pytest.approx([row[0] for row in theirs], abs=1e-4)
    assert [row[1] for row in child["meta_info"]["input_token_logprobs"]] == ids[len(prompt_ids) :]
