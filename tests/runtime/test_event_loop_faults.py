"""Exceptions at any call that the event loop makes for a request: one request ends with a 500, the loop goes on."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime import control, outputs
from baton.runtime.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EndJob,
    ReleaseRequest,
    RequestError,
    TokenOutputs,
)
from baton.runtime.text import continuation_suffixes
from baton.scheduler.batch import StepResult
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request_spec import ContinuationSpec
from tests.doubles.event_loop_rig import Rig, ask
from tests.doubles.fault_injection import FOLDERS, CallFaults
from tests.doubles.kv_echo import expected_output

SEED = int(os.environ.get("BATON_FAULT_SEED", "7"))
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
FILES = (*FOLDERS, *(str(Path(str(module.__file__)).resolve()) for module in (outputs, control, continuation_suffixes)))
PROMPTS = {f"r{n}": [n, *range(40 + 7 * n)] for n in range(6)}


def run(overlap: bool, at: int, host_tokens: int = 0) -> tuple[CallFaults, Rig]:
    """A few requests of all kinds; call number ``at`` of the loop fails, -1: none."""
    faults, rig = CallFaults(at, FILES), Rig(overlap=overlap, host_tokens=host_tokens)
    child = msgspec.structs.replace(ask("child", [5, 6], 4), continuation=ContinuationSpec("r0"))
    kept = msgspec.structs.replace(ask("r1", PROMPTS["r1"], 5), retain_ttl=1e6, job_id="job")
    first: list[Any] = [ask("r0", PROMPTS["r0"]), child, kept, ask("r2", PROMPTS["r2"], 5, n=3)]
    second: list[Any] = [ask("r3", PROMPTS["r3"], 9), ask("r4", PROMPTS["r4"], 9, beam_width=2, n=2)]
    rig.inbox += [first, [], second, [ReleaseRequest(call_id=1, rid="r1")], [ask("r5", PROMPTS["r5"], 20)]]
    rig.inbox += [[AbortRequest(rid="r5"), ControlRequest(call_id=2, verb="info")]]
    rig.inbox += [[EndJob(call_id=3, namespace="", job_id="job")]]
    turn: Any = faults.wrap(rig.loop.turn)
    rig.loop.turn = turn
    rig.run()
    return faults, rig


def check(rig: Rig) -> set[str]:
    """Returns the rids that have failed."""
    errors = Counter(message.rid for message in rig.sent if isinstance(message, RequestError))
    assert all(count == 1 for count in errors.values()), errors
    for rid, samples in {"r0": 1, "r1": 1, "r2": 3, "r3": 1, "r4": 2, "r5": 1, "child": 1}.items():
        ends = rig.finishes(rid)
        assert (errors[rid] == 1 and len(ends) < samples) or len(ends) == samples, (rid, ends, errors)
        if not errors[rid] and rid in ("r0", "r1", "r3"):
            assert rig.said(rid) == expected_output(PROMPTS[rid], len(rig.said(rid)))
    assert sorted(message.call_id for message in rig.sent if isinstance(message, ControlReply)) == [1, 2, 3]
    assert rig.scheduler.is_idle and not rig.loop._in_flight
    rig.scheduler._leases.break_all()
    stats = rig.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens and stats.leaked_tokens == 0
    rig.inbox.append([ask("late", [7, 8], 4)])
    rig.run()
    assert rig.said("late") == expected_output([7, 8], 4), "the loop serves the next request"
    check_forgotten(rig)
    return set(errors)


def check_forgotten(rig: Rig) -> None:
    """No component keeps anything of a request that has ended. (The runner drops the last one with the next step.)"""
    assert len(rig.step_runner.open) <= 1
    assert not rig.loop._outputs._pending and not rig.loop._suffixes._open
    scheduler = rig.scheduler
    assert not scheduler.num_parked and not len(scheduler._leases) and not scheduler.num_waiting
    assert all(not job["open_requests"] and not job["pins"] for job in scheduler.describe_jobs("", None, rig.now))
    shown: set[tuple[str, int]] = set()
    for message in rig.sent:  # as the detokenizer keeps them
        if isinstance(message, RequestError):
            shown = {key for key in shown if key[0] != message.rid}
        for item in message.items if isinstance(message, TokenOutputs) else ():
            shown.add((item.rid, item.index))
            if item.finish is not None:
                shown.remove((item.rid, item.index))
    assert not shown


@LOOPS
@pytest.mark.parametrize("host_tokens", [0, 2048], ids=["device", "host"])
def test_exception_at_random_loop_calls_is_contained(overlap: bool, host_tokens: int) -> None:
    rng = random.Random(SEED + overlap + host_tokens)
    calls = run(overlap, -1, host_tokens)[0].calls
    assert calls > 2000 and not check(run(overlap, -1, host_tokens)[1])
    for at in rng.sample(range(calls), 25):
        print(f"BATON_FAULT_SEED={SEED} call {at}")
        faults, rig = run(overlap, at, host_tokens)
        print(faults.place)
        assert len(check(rig)) <= 7


@pytest.mark.slow
@pytest.mark.timeout(7200)
@LOOPS
def test_exception_at_every_loop_call_is_contained(overlap: bool) -> None:
    """Minutes each; with a host tier, and in whole simulations, a sample has to do."""
    calls = run(overlap, -1)[0].calls
    ended = Counter(len(check(run(overlap, at)[1])) for at in range(calls))
    print(f"{calls} calls; requests that a fault ended: {sorted(ended.items())}")
    assert ended[0] + ended[1] + ended[2] > 0.9 * calls


@LOOPS
def test_token_outside_trie_ends_only_its_request(overlap: bool) -> None:
    """Even if nothing before the scheduler noticed it."""
    rig = Rig(overlap=overlap)
    rig.loop._item_tries.put("t", ItemTrie.build(np.array([(5, 6, 7), (5, 8, 9)], dtype=np.int32)))
    forward = rig.step_runner.model.forward

    def wrong(batch: Any) -> StepResult:
        result = forward(batch)
        if batch.allowed is not None:
            for row in np.unique(batch.allowed.rows).tolist():
                result.token_ids[int(result.counts[:row].sum())] = 400
        return result

    rig.step_runner.model.forward = wrong
    child = msgspec.structs.replace(ask("child", [1, 2], 4), continuation=ContinuationSpec("bad"))
    rig.inbox.append([ask("a", [1, 2, 3], 9), ask("bad", [4, 5], 3, item_trie="t"), ask("b", [6, 7], 9), child])
    rig.run()
    errors = rig.errors()
    assert set(errors) == {"bad", "child"} and (status_of(errors["bad"]), errors["bad"].code) == (500, "request_failed")
    assert (status_of(errors["child"]), errors["child"].code) == (409, "parent_failed")
    assert rig.said("a") == expected_output([1, 2, 3], 9) and rig.said("b") == expected_output([6, 7], 9)
    assert rig.scheduler.stats().failed_requests == 1


@LOOPS
@pytest.mark.parametrize("part", ["_outputs.open_sample", "_live_reports.requests_added", "_suffixes.forget_tails"])
def test_request_failing_after_add_request_ends_once(part: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has it by then."""
    rig = Rig(overlap=overlap)
    owner, name = part.split(".")
    monkeypatch.setattr(getattr(rig.loop, owner), name, Mock(side_effect=AssertionError))
    rig.inbox.append([ask("bad", [4, 5], 3, n=2)])
    rig.run()
    assert [type(message) for message in rig.sent if getattr(message, "rid", "") == "bad"] == [RequestError]
    assert rig.scheduler.stats().failed_requests == 1
    check_forgotten(rig)
