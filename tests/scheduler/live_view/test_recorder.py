"""The lives of requests, as an event loop tells them: every phase, every end."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.runtime.messages import AbortRequest, ReleaseRequest
from baton.scheduler.live_view import recorder as recorder_module
from baton.scheduler.live_view.reports import MAX_PHASES, Life
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from tests.doubles.event_loop_rig import ask
from tests.doubles.kv_echo import prompt_of
from tests.doubles.watched_loop import WatchedLoop

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def wants(spec: RequestSpec, **fields) -> RequestSpec:
    return msgspec.structs.replace(spec, **fields)


def child_of(parent: str, rid: str, new: int = 3, **continuation) -> RequestSpec:
    return wants(ask(rid, [5, 6], new, ignore_eos=True), continuation=ContinuationSpec(parent, **continuation))


def check(life: Life) -> None:
    """Phases follow each other; only an open life has an open one, or one with a lease."""
    at = life.arrival if life.phases[0][0] == "queued" else life.phases[0][1]
    for kind, begin, end, tokens in life.phases:
        assert begin >= at and tokens >= 0, life
        if end is not None:
            assert end >= begin, life
        at = begin if end is None or kind == "leased" else end
    still_open = [kind for kind, _, end, _ in life.phases if end is None]
    assert still_open == ["leased"] * len(still_open) if life.end else len(still_open) <= 1, life


# -- what is computed --------------------------------------------------------------------------------------------------


def test_life_has_phases_for_chunks_and_decode() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(70, 1), 3, ignore_eos=True))
    loop.until_idle()
    assert loop.phases("a") == [
        ("queued", 2, 2, 70),
        ("prefill", 2, 3, 32),
        ("prefill", 3, 4, 32),
        ("prefill", 4, 5, 6),
        ("decode", 5, 7, 3),
    ]
    life = loop.lives["a", 0]
    assert (life.arrival, life.prompt, life.cached, life.output, life.end) == (2, 70, 0, 3, "length")
    assert life.missed == [("unseen", 0, 69, None, None), ("required", 69, 1, None, None)]


def test_phases_of_overlapped_chunks_are_contiguous() -> None:
    loop = WatchedLoop(overlap=True)
    loop.say(ask("a", prompt_of(70, 1), 3, ignore_eos=True))
    loop.turns(1)
    (life,) = loop.loop._live_reports._recorder.take_lives(9)  # type: ignore[union-attr]
    assert life.phases[1:] == [("prefill", 2, None, 32), ("prefill", 3, None, 32)], "both are in flight"
    loop.until_idle()
    assert loop.phases("a")[:4] == [
        ("queued", 2, 2, 70),
        ("prefill", 2, 4, 32),
        ("prefill", 4, 5, 32),
        ("prefill", 5, 6, 6),
    ]
    assert loop.phases("a")[4][0] == "decode" and loop.lives["a", 0].output == 3


def test_life_is_queued_while_waiting() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(64, 1), 1), ask("b", prompt_of(10, 2), 1))
    loop.until_idle()
    assert loop.phases("b") == [("queued", 2, 4, 10), ("prefill", 4, 5, 10)]
    assert loop.lives["b", 0].output == 1, "which the chunk brought"


def test_life_records_cached_tokens() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(30, 1), 2))
    loop.until_idle()
    loop.say(ask("b", prompt_of(40, 1), 2))
    loop.until_idle()
    assert loop.lives["b", 0].cached == 30 and loop.phases("b")[1][3] == 10


def test_intermediate_report_shows_progress() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(8, 1), 100, ignore_eos=True))
    loop.turns(50)
    kind, begin, end, tokens = loop.phases("a")[-1]
    assert (kind, begin, end) == ("decode", 3, None) and 30 < tokens <= 50 and loop.lives["a", 0].end is None


@OVERLAP
def test_life_of_retracted_request_restarts_with_prefill(overlap: bool) -> None:
    loop = WatchedLoop(overlap=overlap)
    loop.say(*(ask(f"r{number}", prompt_of(40, number), 80, ignore_eos=True) for number in range(8)))
    loop.until_idle()
    assert loop.scheduler.stats().retractions
    retracted = [life for life in loop.lives.values() if "retracted" in [phase[0] for phase in life.phases]]
    assert retracted
    for life in loop.lives.values():
        check(life)
        assert (life.output, life.end) == (80, "length")
    for life in retracted:
        kinds = [phase[0] for phase in life.phases]
        again = kinds.index("retracted")
        assert kinds[again - 1] in ("decode", "prefill") and kinds[again + 1] == "prefill"
        decoded = sum(tokens for kind, _, _, tokens in life.phases if kind == "decode")
        assert decoded == 80, "each token is told in one phase"


def test_each_sample_has_its_own_life() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(8, 1), 4, n=3, ignore_eos=True))
    loop.until_idle()
    assert {*loop.lives} == {("a", 0), ("a", 1), ("a", 2)}
    for life in loop.lives.values():
        assert life.end == "length" and life.output == 4
        check(life)


def test_a_beam_search_is_one_life() -> None:
    loop = WatchedLoop()
    loop.say(ask("s", prompt_of(8, 1), 5, n=2, beam_width=3, ignore_eos=True))
    loop.until_idle()
    life = loop.lives["s", 0]
    assert [*loop.lives] == [("s", 0)] and life.output == 5 and life.end == "length"
    assert [phase[0] for phase in life.phases] == ["queued", "prefill", "decode"]


def test_surplus_phases_of_life_are_merged() -> None:
    life_loop = WatchedLoop()
    chunks = MAX_PHASES + 20
    rec = recorder_module._Recorded(_request(life_loop), 0.0)
    for at in range(chunks):
        rec.begin_phase("prefill", at, 10).end = at + 1
    assert len(rec.phases) == MAX_PHASES
    assert sum(phase.tokens for phase in rec.phases) == 10 * chunks
    assert (rec.phases[0].begin, rec.phases[-1].end) == (0, chunks)
    for at in range(chunks, 2 * chunks):
        rec.begin_phase("retracted" if at % 2 else "prefill", at, 10)
    assert len(rec.phases) == MAX_PHASES


def _request(loop: WatchedLoop):
    loop.say(ask("a", prompt_of(8, 1), 50, ignore_eos=True))
    return loop.scheduler.live_requests[0]


# -- leases ------------------------------------------------------------------------------------------------------------


@OVERLAP
def test_lives_of_parent_and_child_record_handoff(overlap: bool) -> None:
    loop = WatchedLoop(overlap=overlap)
    loop.say(wants(ask("a", prompt_of(20, 1), 2, ignore_eos=True), retain_ttl=1e6))
    loop.turns(20)
    parent = loop.lives["a", 0]
    assert parent.phases[-1][0] == "leased" and parent.phases[-1][2] is None and parent.end == "length"
    assert parent.phases[-1][3] == 21, "the last token has no KV yet"
    loop.say(child_of("a", "b"))
    handed_off = loop.now
    loop.until_idle()
    parent, child = loop.lives["a", 0], loop.lives["b", 0]
    assert (child.parent, child.path, parent.child) == ("a", "handoff", "b")
    assert parent.phases[-1][2] == handed_off == child.phases[1][1], "in the very step that the child begins with"
    assert child.cached == 21 and child.prompt == 24 and child.phases[1][3] == 3
    check(parent)
    check(child)


def test_lives_of_parked_child_and_parent() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(20, 1), 9, ignore_eos=True))
    loop.say(child_of("a", "b"))
    loop.until_idle()
    parent, child = loop.lives["a", 0], loop.lives["b", 0]
    assert (child.parent, child.path, parent.child) == ("a", "handoff", "b")
    ended = parent.phases[-1][2]
    assert child.phases[0] == ("queued", 3, ended, 31), "it knows its parent's tokens by then"
    assert child.phases[1][1] == ended and "leased" not in [phase[0] for phase in parent.phases]


@pytest.mark.parametrize(("continuation", "path"), [({"keep_parent": True}, "handoff"), ({"at": "now"}, "fork")])
def test_kept_parent_life_records_no_child(continuation: dict, path: str) -> None:
    loop = WatchedLoop()
    loop.say(wants(ask("a", prompt_of(20, 1), 2 if path == "handoff" else 60, ignore_eos=True), retain_ttl=1e6))
    loop.turns(20)
    loop.say(child_of("a", "b", **continuation))
    loop.turns(30)
    child = loop.lives["b", 0]
    assert (child.parent, child.path, loop.lives["a", 0].child) == ("a", path, None)


def test_leased_phase_ends_at_expiry() -> None:
    loop = WatchedLoop()
    loop.say(wants(ask("a", prompt_of(20, 1), 2, ignore_eos=True), retain_ttl=7.0))
    loop.until_idle()
    kind, begin, end, tokens = loop.phases("a")[-1]
    assert (kind, end, tokens) == ("leased", begin + 7, 21)


def test_leased_phase_ends_on_release_or_break() -> None:
    loop = WatchedLoop()
    for rid in ("a", "b"):
        loop.say(wants(ask(rid, prompt_of(20, ord(rid)), 2, ignore_eos=True), retain_ttl=1e6))
        loop.turns(10)
    loop.say(ReleaseRequest(call_id=1, rid="a"))
    given_up = loop.now
    loop.turns(10)
    loop.scheduler._leases.break_all()
    loop.turns(1)
    broken = loop.now
    loop.turns(20)
    assert (loop.phases("a")[-1][2], loop.phases("b")[-1][2]) == (given_up, broken)


def test_search_life_has_leased_phase_per_result() -> None:
    loop = WatchedLoop()
    search = ask("s", prompt_of(8, 1), 5, n=2, beam_width=2, ignore_eos=True)
    loop.say(wants(search, retain_ttl=1e6))
    loop.turns(20)
    assert [phase[0] for phase in loop.phases("s")][-2:] == ["leased", "leased"]
    loop.say(child_of("s", "b", index=1))
    loop.until_idle()
    assert loop.lives["s", 0].child == "b" and sum(phase[2] is None for phase in loop.phases("s")) == 1


def test_each_sample_life_has_its_leased_phase() -> None:
    loop = WatchedLoop()
    loop.say(wants(ask("a", prompt_of(8, 1), 4, n=2, ignore_eos=True), retain_ttl=1e6))
    loop.turns(20)
    loop.say(child_of("a", "b", index=1))
    loop.until_idle()
    first, second = loop.lives["a", 0], loop.lives["a", 1]
    assert (first.child, second.child) == (None, "b")
    assert first.phases[-1][2] is None and second.phases[-1][2] is not None


# -- ends --------------------------------------------------------------------------------------------------------------


def test_lives_of_aborted_requests_end_with_abort() -> None:
    loop = WatchedLoop()
    loop.say(ask("runs", prompt_of(8, 1), 90, ignore_eos=True), ask("waits", prompt_of(60, 2), 9))
    loop.say(AbortRequest(rid="waits"))
    aborted = loop.now
    loop.turns(3)
    loop.say(AbortRequest(rid=None))
    loop.until_idle()
    assert {rid: life.end for (rid, _), life in loop.lives.items()} == {"runs": "abort", "waits": "abort"}
    assert loop.phases("waits")[-1][2] == aborted
    for life in loop.lives.values():
        check(life)


def test_lives_in_failed_step_end_with_error() -> None:
    loop = WatchedLoop()
    loop.step_runner.failing_waits = {2}
    loop.say(ask("a", prompt_of(8, 1), 9, ignore_eos=True))
    loop.until_idle()
    assert loop.lives["a", 0].end == "error"
    check(loop.lives["a", 0])


def test_lives_of_refused_requests_end_with_error() -> None:
    loop = WatchedLoop()
    loop.say(ask("long", prompt_of(100, 1), 90), child_of("nobody", "orphan"))
    loop.until_idle()
    assert loop.phases("long") == [("queued", 2, 2, 0)]
    assert {rid: life.end for (rid, _), life in loop.lives.items()} == {"long": "error", "orphan": "error"}


def test_duplicate_rid_does_not_end_running_life() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(8, 1), 9, ignore_eos=True))
    loop.say(ask("a", prompt_of(8, 2), 9))
    loop.until_idle()
    assert loop.lives["a", 0].end == "length" and loop.lives["a", 0].output == 9


def test_life_of_child_with_failed_parent_ends_with_error() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(20, 1), 50, ignore_eos=True))
    loop.say(child_of("a", "b"))
    loop.say(AbortRequest(rid="a"))
    loop.until_idle()
    assert (loop.lives["a", 0].end, loop.lives["b", 0].end) == ("abort", "error")


def test_reused_rid_starts_new_life() -> None:
    """The first one's lease ends with that, and does not overwrite the second."""
    loop = WatchedLoop()
    loop.say(wants(ask("a", prompt_of(20, 1), 2, ignore_eos=True), retain_ttl=1e6))
    loop.turns(20)
    loop.say(*(ask(f"r{number}", prompt_of(5, number), 40, ignore_eos=True) for number in range(8)))
    loop.turns(20)
    before = len(loop.reports)
    loop.say(ask("a", prompt_of(10, 2), 60, ignore_eos=True))  # there is no row for it yet
    loop.turns(20)
    told = [life for report in loop.reports[before:] for life in report.lives if life.rid == "a"]
    assert told and {life.prompt for life in told} == {10}, "from the first on"
    loop.until_idle()
    life = loop.lives["a", 0]
    assert (life.prompt, life.output) == (10, 60) and "leased" not in [phase[0] for phase in life.phases]


# -- watching begins, and ends -----------------------------------------------------------------------------------------


def test_watch_includes_requests_already_open() -> None:
    loop = WatchedLoop(watched=False)
    loop.say(ask("decodes", prompt_of(8, 1), 40, ignore_eos=True))
    loop.turns(5)
    loop.say(ask("computes", prompt_of(100, 2), 3, ignore_eos=True), ask("waits", prompt_of(30, 3), 3))
    loop.turns(1)
    loop.watch()
    began = loop.now
    loop.turns(12)
    assert loop.lives["decodes", 0].phases[0][:2] == ("decode", began) and loop.lives["decodes", 0].arrival == 1
    assert loop.phases("computes")[0][0] == "prefill" and loop.phases("computes")[0][1] >= began
    assert loop.phases("waits")[0][:2] == ("queued", 7), "since it came, which is known"
    loop.until_idle()
    assert {life.end for life in loop.lives.values()} == {"length"}
    for life in loop.lives.values():
        check(life)


def test_recording_stops_when_watch_time_ends() -> None:
    loop = WatchedLoop(watched=False)
    loop.watch(seconds=10.0)
    loop.say(ask("a", prompt_of(8, 1), 60, ignore_eos=True))
    loop.turns(20)
    told = len(loop.reports)
    loop.until_idle()
    assert told and len(loop.reports) == told and all(report.t < 11 for report in loop.reports)
    loop.watch()
    loop.turns(20)
    assert len(loop.reports) > told


def test_number_of_followed_lives_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that there was no room for are followed later; all that are followed end."""
    monkeypatch.setattr(recorder_module, "MAX_LIVES", 4)
    loop = WatchedLoop()
    loop.say(*(ask(f"r{number}", prompt_of(20, number), 30, ignore_eos=True) for number in range(12)))
    loop.turns(5)
    assert len(loop.lives) == 4
    loop.until_idle()
    assert len(loop.lives) > 8 and {life.end for life in loop.lives.values()} == {"length"}


def test_number_of_followed_leases_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_LIVES", 1)
    loop = WatchedLoop()
    for rid in ("a", "b"):
        loop.say(wants(ask(rid, prompt_of(20, ord(rid)), 2, ignore_eos=True), retain_ttl=1e6))
        loop.turns(20)
    loop.scheduler._leases.break_all()
    loop.turns(20)
    assert loop.phases("a")[-1][2] is None, "nobody looks at the older one any more"
    assert loop.phases("b")[-1][2] is not None


@pytest.mark.parametrize("seed", range(4))
@OVERLAP
def test_every_life_ends(overlap: bool, seed: int) -> None:
    """Random requests, aborts, failures: the end that the client hears of, once, and phases in order."""
    print("seed", seed)
    rng = random.Random(seed)
    loop = WatchedLoop(overlap=overlap, watched=False)
    loop.step_runner.failing_waits = {rng.randrange(20, 200)} if rng.random() < 0.5 else set()
    begin, rids = rng.randrange(30), []
    for turn in range(150):
        if turn == begin:
            loop.watch()
        messages = []
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            rid = f"r{len(rids)}"
            options = rng.choice([{}, {}, {"n": 2}, {"beam_width": 3, "n": 2}])
            spec = ask(rid, prompt_of(rng.randrange(1, 70), rng.randrange(3)), rng.randrange(1, 40), **options)
            if rids and not options and rng.random() < 0.5:
                spec = child_of(rng.choice(rids[-5:]), rid, rng.randrange(1, 20), at=rng.choice(["finish", "now"]))
            ttl = rng.choice([None, 5.0, 50.0])
            messages.append(wants(spec, retain_ttl=ttl))
            rids.append(rid)
        if rids and rng.random() < 0.1:
            messages.append(AbortRequest(rid=rng.choice(rids[-8:])))
        loop.say(*messages)
    loop.until_idle()
    loop.turns(100)
    errors = loop.errors()
    assert len(loop.lives) > 20
    for life in loop.lives.values():
        check(life)
        assert life.end == ("error" if life.rid in errors else life.end) and life.end is not None
        if life.end != "error":
            assert life.end in loop.finishes(life.rid)
        assert all(end is not None for _, _, end, _ in life.phases), "all leases have ended"
