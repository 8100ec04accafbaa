"""Continuations through the Engine that find less than they name: an expired lease, a refused one, no parent at all."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from tests.doubles.continued_engine import (
    GREEDY,
    ONE,
    POOL,
    PROMPT,
    SUFFIX,
    TOY,
    assert_same,
    child_of,
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


def test_continuation_requires_the_same_salt(engine: Engine) -> None:
    rid, prompt_ids, parent = start(engine, cache_salt="mine")
    messages = []
    for salt in (None, "theirs"):
        with pytest.raises(RequestRefused) as caught:
            child_of(engine, rid, GREEDY, cache_salt=salt)
        assert (status_of(caught.value), caught.value.code) == (404, "parent_not_found")
        messages.append(caught.value.message)
    with pytest.raises(RequestRefused) as caught:
        engine.generate(None, GREEDY, continuation_of="nobody")
    assert {*messages, caught.value.message.replace("nobody", rid)} == {messages[0]}, "nobody learns that it exists"
    child = child_of(engine, rid, GREEDY, cache_salt="mine")
    assert child["meta_info"]["continuation"]["path"] == "handoff"
    assert_same(child, replay(engine, inherited_ids(prompt_ids, parent), GREEDY))


def test_expired_lease_falls_back_to_match(engine: Engine) -> None:
    expired = stats(engine)["leases_expired"]
    rid, prompt_ids, parent = start(engine, retain_ttl=0.05)
    deadline = time.monotonic() + 60
    while stats(engine)["leases_expired"] == expired:
        assert time.monotonic() < deadline, "the lease never expired"
        time.sleep(0.01)
    assert not engine.release(rid)
    child = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX)
    assert child["meta_info"]["continuation"]["path"] == "match"
    assert_same(child, replay(engine, inherited_ids(prompt_ids, parent) + suffix_ids(engine), GREEDY))


def test_lease_over_budget_is_refused_but_parent_stays_known(engine: Engine) -> None:
    rng = random.Random(3)
    ids = [rng.randrange(5, 1000) for _ in range(POOL // 2 + 20)]
    rid = name("large")
    answer = engine.generate(input_ids=ids, sampling_params=ONE, rid=rid, retain_ttl=60)
    assert "--max-leased-ratio" in answer["meta_info"]["retained"]["refused"]
    child = child_of(engine, rid, ONE)
    assert child["meta_info"]["continuation"]["path"] == "match"
    assert child["meta_info"]["prompt_tokens"] == len(ids) + 1


def test_child_of_an_aborted_parent_gets_409(engine: Engine) -> None:
    rid = name("parent")
    running = engine.generate(PROMPT, {"max_new_tokens": 1500, "ignore_eos": True}, stream=True, rid=rid)
    next(running)
    errors: list[RequestRefused] = []

    def wait(stream: bool) -> None:
        try:
            got = child_of(engine, rid, GREEDY, stream=stream, rid=name("waiting"))
            for _ in got if stream else ():
                pass
        except RequestRefused as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while engine._manager.num_open < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert engine.abort(rid) == [rid]
    for thread in threads:
        thread.join(60)
    list(running)
    with pytest.raises(RequestRefused) as caught:
        child_of(engine, rid, GREEDY)
    for error in (*errors, caught.value):
        assert (status_of(error), error.code, error.param) == (409, "parent_failed", "continuation_of")
    assert len(errors) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continuation_ids": [7] * 2030}, "continuation_ids"),
        ({"continuation_suffix": "x " * 1990}, "continuation_suffix"),
        ({"continuation_ids": [7] * 1900, "sampling_params": {"max_new_tokens": 140}}, "max_new_tokens"),
    ],
)
def test_suffix_beyond_the_context_is_refused(engine: Engine, fields: dict, param: str, stream: bool) -> None:
    """Only the worker knows how long parent and suffix are together."""
    rid, _, _ = start(engine)
    with pytest.raises(RequestRefused, match="context") as caught:
        list(
            engine.generate(continuation_of=rid, stream=stream, **{"sampling_params": {"max_new_tokens": 1}, **fields})
        )
    assert (status_of(caught.value), caught.value.param) == (400, param)
    child = child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX)
    assert child["meta_info"]["continuation"]["path"] == "handoff", "a refused child takes nothing"


def test_async_release(engine: Engine) -> None:
    async def run() -> list[bool]:
        rid = name("parent")
        await engine.async_generate(PROMPT, GREEDY, rid=rid, retain_ttl=60)
        return [await engine.async_release(f"cmpl-{rid}"), await engine.async_release(rid)]

    assert asyncio.run(run()) == [True, False]


def test_forgotten_parent_is_refused_or_falls_back() -> None:
    with Engine(
        model_path=TOY, device="cpu", dtype="float32", max_total_tokens=1024, max_finished_requests=2
    ) as engine:
        rid, prompt_ids, parent = start(engine, retain_ttl=0)
        for _ in range(3):
            engine.generate(PROMPT, GREEDY)
        with pytest.raises(RequestRefused) as caught:
            child_of(engine, rid, GREEDY, continuation_suffix=SUFFIX)
        assert (status_of(caught.value), caught.value.code) == (410, "parent_forgotten")
        whole = inherited_ids(prompt_ids, parent) + suffix_ids(engine)
        child = engine.generate(
            input_ids=whole, sampling_params=GREEDY, continuation_of=rid, continuation_suffix=SUFFIX
        )
        got = child["meta_info"]["continuation"]
        assert (got["path"], got["inherited_tokens"]) == ("fallback", 0)
        assert child["meta_info"]["prompt_tokens"] == len(whole)
        assert_same(child, replay(engine, whole, GREEDY))
        child = engine.generate("whole prompt", GREEDY, continuation_of="never heard of")
        assert child["meta_info"]["continuation"]["path"] == "fallback"
