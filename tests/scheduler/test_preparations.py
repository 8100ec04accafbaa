"""The next turn of a job, prepared while its tool runs: what the next turn finds, and what it takes from others."""

from __future__ import annotations

import pytest

from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.preparations import BURST_STEPS, MAX_PENDING, Benefit
from tests.doubles.fault_injection import CallFaults, inject
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
PROMPT = prompt_of(70)
THOUGHTS = 12
"""Tokens that the model says first, and that the next prompt leaves out."""


def harness(**more) -> Harness:
    scene = Harness(**{"num_tokens": 2048, "context": 1024, "leases": 16, **more})
    scene.turn_s = 0.01
    return scene


def turn(scene: Harness, rid: str, prompt: list[int], job: str = "job", *, new: int = 20, **more) -> list[int]:
    """One turn of a job, to its end, leased for a minute. Returns its output."""
    scene.add(rid, prompt, new, job_id=job, **{"retain_ttl": 60.0, **more})
    scene.run()
    tokens = scene.outcomes[rid, 0].tokens
    assert tokens == expected_output(prompt, new)
    return tokens


def canonical(prompt: list[int], said: list[int]) -> list[int]:
    """The beginning of the next prompt, as a template writes it: without the thoughts, and with marks of its own."""
    return [*prompt, 901, *said[THOUGHTS:], 902]


def computed(scene: Harness, rid: str, prompt: list[int], **more) -> int:
    """Play a turn; returns the tokens that it computed, outputs aside."""
    before = scene.model.computed_tokens
    said = turn(scene, rid, prompt, **more)
    return scene.model.computed_tokens - before - (len(said) - 1)


def prepared(scene: Harness, rid: str) -> int:
    request = scene.outcomes[rid, 0].request
    assert request is not None
    return request.prepared_tokens


@PAGES
@DEPTHS
@pytest.mark.parametrize("chunk", [64, 500])
@pytest.mark.parametrize("policy", ["fcfs", "handoff"])
def test_next_turn_computes_only_its_own_tokens(page_size: int, depth: int, chunk: int, policy: str) -> None:
    spent: dict[bool, list[int]] = {}
    for prepares in (True, False):
        scene = harness(page_size=page_size, depth=depth, chunk=chunk, policy=policy)
        prompt, own = PROMPT, [7, 8, 9]
        spent[prepares] = []
        for number in range(4):
            rid = f"r{number}"
            spent[prepares].append(computed(scene, rid, prompt))
            text = canonical(prompt, scene.outcomes[rid, 0].tokens)
            if prepares:
                scene.prepare(rid, text)
                scene.run()
            prompt = [*text, *own]
    assert spent[True][1:] == [3, 3, 3]
    assert all(tokens > 3 + 20 - THOUGHTS for tokens in spent[False][1:])


@PAGES
def test_prepared_tokens_say_what_the_next_turn_used(page_size: int) -> None:
    scene = harness(page_size=page_size)
    said = turn(scene, "a", PROMPT)
    text = canonical(PROMPT, said)
    scene.prepare("a", text)
    scene.run()
    leases = scene.scheduler.live_leases()
    assert [lease.tokens for lease in leases] == [len(text)], "the lease of the turn has passed to its next prompt"
    turn(scene, "b", [*text, 5])
    request = scene.outcomes["b", 0].request
    assert request is not None and request.inheritance is not None
    assert (request.inheritance.path, request.found.total) == ("handoff", len(text))
    shared = 70 - 70 % page_size
    assert request.prepared_tokens == len(text) - shared
    stats = scene.scheduler.stats().preparations
    assert (stats.completed, stats.used_tokens, stats.dropped) == (1, len(text) - shared, {})
    assert stats.computed_tokens == len(text) - shared and stats.steps == 1
    assert prepared(scene, "a") == 0


def test_preparation_counts_in_no_other_statistics() -> None:
    scene, plain = harness(policy="handoff"), harness(policy="handoff")
    for each in (scene, plain):
        said = turn(each, "a", PROMPT)
        if each is scene:
            each.prepare("a", canonical(PROMPT, said))
        each.run()
    ours, theirs = scene.scheduler.stats(), plain.scheduler.stats()
    for name in ("prefix_cache_queries", "prefix_cache_hits", "computed_prompt_tokens", "output_tokens", "jobs"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.num_running_reqs, ours.leases_granted, ours.leases_broken) == (0, 1, 0)
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert job["turns"] == 1 and job["open_requests"] == [] and job["pinned_tokens"] == len(canonical(PROMPT, said))


@PAGES
def test_turn_that_returns_as_it_was_still_says_the_same(page_size: int) -> None:
    """The client sent the thoughts back after all: they are found in the tree, or computed again."""
    scene = harness(page_size=page_size)
    said = turn(scene, "a", PROMPT)
    scene.prepare("a", canonical(PROMPT, said))
    scene.run()
    turn(scene, "b", [*PROMPT, *said, 5])
    scene.continue_from("a", "c", [6, 6], 5)
    scene.run()
    assert scene.outcomes["c", 0].tokens == expected_output([*PROMPT, *said, 6, 6], 5)


@PAGES
def test_siblings_share_the_prepared_fork_point(page_size: int) -> None:
    scene = harness(page_size=page_size)
    said = turn(scene, "a", PROMPT)
    text = canonical(PROMPT, said)
    scene.prepare("a", text)
    scene.run()
    before = scene.model.computed_tokens
    for number in range(4):
        scene.add(f"child{number}", [*text, 30 + number], 1, job_id="job")
    scene.run()
    lost = len(text) % page_size
    assert scene.model.computed_tokens - before == 4 + 3 * lost
    for number in range(4):
        assert scene.outcomes[f"child{number}", 0].tokens == expected_output([*text, 30 + number], 1)


@DEPTHS
def test_any_request_preempts_within_one_step(depth: int) -> None:
    scene = harness(depth=depth, chunk=16)
    said = turn(scene, "a", PROMPT)
    long = [*PROMPT, *prompt_of(300, 5)]
    assert long[len(PROMPT)] != said[0]
    scene.prepare("a", long)
    for _ in range(3):
        assert scene.step()
    steps = scene.scheduler.stats().preparations.steps
    assert 0 < steps < 300 // 16
    scene.add("other", prompt_of(10, 9), 4)
    for _ in range(depth):
        scene.step()
    assert scene.outcomes["other", 0].tokens, "it waited for one step of the preparation at most"
    while scene.outcomes["other", 0].finish is None:
        scene.step()
        assert scene.scheduler.stats().preparations.steps <= steps + 1, "nothing is prepared beside it"
    scene.run()
    stats = scene.scheduler.stats().preparations
    assert stats.completed == 1 and stats.computed_tokens == len(long) - 70, "it went on where it was"


@PAGES
@DEPTHS
def test_job_that_returns_early_uses_what_there_is(page_size: int, depth: int) -> None:
    scene = harness(page_size=page_size, depth=depth, chunk=64)
    said = turn(scene, "a", PROMPT)
    text = [*canonical(PROMPT, said), *prompt_of(400, 6)]
    scene.prepare("a", text)
    for _ in range(5):
        scene.step()
    turn(scene, "b", [*text, 5])
    assert prepared(scene, "b") >= 64
    assert scene.scheduler.stats().preparations.dropped == {"returned": 1}


def test_preparations_take_a_bounded_share_of_steps() -> None:
    scene = harness(chunk=1, num_tokens=4096, check=False)
    said = turn(scene, "a", PROMPT)
    scene.prepare("a", [*canonical(PROMPT, said), *prompt_of(600, 6)])
    scene.run()
    first = scene.scheduler.stats().preparations.steps
    assert first == BURST_STEPS
    steps = scene.scheduler.stats().steps
    for number in range(8):
        scene.add(f"other{number}", prompt_of(20, number), 5)
        scene.run()
    stats = scene.scheduler.stats()
    more, others = stats.preparations.steps - first, stats.steps - steps
    assert 0 < more <= 0.25 * (others - more) + 1


def test_preparation_breaks_no_lease_and_evicts_nothing_recent() -> None:
    scene = harness(num_tokens=400, leased_ratio=0.9, lease_protection=5.0)
    said = turn(scene, "a", PROMPT)
    turn(scene, "leased", prompt_of(150, 2), job="other")
    scene.add("recent", prompt_of(130, 3), 1)
    scene.run()
    free = scene.allocator.free_tokens
    assert free < 60
    scene.prepare("a", [*PROMPT, *prompt_of(100, 6)])
    scene.run()
    stats = scene.scheduler.stats()
    assert stats.preparations.steps == 0 and stats.evicted_tokens == 0
    assert (stats.leases_broken, stats.retractions, stats.preparations.pending) == (0, 0, 1)
    assert scene.scheduler.is_idle, "it does not keep the loop from sleeping"
    scene.now += 10.0  # now what nobody used is older than T_fill
    scene.run()
    stats = scene.scheduler.stats()
    assert stats.preparations.completed == 1 and stats.leases_broken == 0 and stats.evicted_tokens
    assert sorted(lease.tokens for lease in scene.scheduler.live_leases()) == [169, 170]
    turn(scene, "b", [*PROMPT, *prompt_of(100, 6), 4])
    assert prepared(scene, "b") == 100 and said


def test_preparation_that_finds_no_memory_ends_with_its_lease() -> None:
    scene = harness(num_tokens=300, leased_ratio=0.9, lease_protection=1e6)
    turn(scene, "a", PROMPT)
    turn(scene, "b", prompt_of(140, 3), job="other")
    scene.prepare("a", [*PROMPT, *prompt_of(100, 6)])
    scene.run()
    scene.now += 100.0
    scene.run()
    assert scene.scheduler.stats().preparations.dropped == {"memory": 1}


def test_lease_that_would_exceed_its_budget_stays_as_it_is() -> None:
    scene = harness(num_tokens=1000, leased_ratio=0.1)
    said = turn(scene, "a", PROMPT)
    scene.prepare("a", [*PROMPT, *prompt_of(100, 6)])
    scene.run()
    (lease,) = scene.scheduler.live_leases()
    assert lease.tokens == 70 + len(said) - 1 and scene.scheduler.stats().preparations.dropped == {"lease": 1}
    turn(scene, "b", [*PROMPT, *prompt_of(100, 6), 4])


@pytest.mark.parametrize("how", ["end", "expire", "release", "abort", "flush", "unknown", "open", "empty", "long"])
def test_preparation_without_a_job_to_return_is_dropped(how: str) -> None:
    scene = harness(chunk=16)
    said = turn(scene, "a", PROMPT)
    text = [*canonical(PROMPT, said), *prompt_of(100, 6)]
    if how == "open":
        scene.add("side", prompt_of(10, 4), 50, job_id="job")
        scene.step()
    scene.prepare("nobody" if how == "unknown" else "a", {"empty": [], "long": text * 20}.get(how, text))
    if how not in ("unknown", "open", "empty", "long"):
        scene.step()
        scene.step()
        assert scene.scheduler.stats().preparations.steps > 0
    if how == "end":
        ended = scene.scheduler.end_job("", "job", scene.now)
        assert ended is not None and ended.aborted_rids == [] and ended.events == []
    elif how == "expire":
        scene.now += 1000.0
    elif how == "release":
        assert scene.scheduler.release_leases("a")
    elif how == "abort":
        assert scene.scheduler.abort_all_requests(scene.now, "all") == []
    elif how == "flush":
        assert scene.scheduler.flush_cache()
        assert scene.scheduler.stats().evictable_tokens == 0
    scene.run()
    reasons = {"end": "returned", "expire": "lease", "release": "lease", "abort": "cleared", "flush": "cleared"}
    reasons |= {"unknown": "returned", "open": "returned", "empty": "refused", "long": "refused"}
    stats = scene.scheduler.stats().preparations
    assert (stats.dropped, stats.completed, stats.pending) == ({reasons[how]: 1}, 0, 0)


@pytest.mark.parametrize("how", ["flush", "abort"])
def test_chunk_in_flight_ends_for_a_flush(how: str) -> None:
    """Overlapped: the step is in flight while the cache is flushed; its slots are used again only after it."""
    scene = harness(depth=2, chunk=16, num_tokens=256)
    said = turn(scene, "a", PROMPT)
    scene.prepare("a", [*canonical(PROMPT, said), *prompt_of(60, 6)])
    scene.step()
    assert scene.scheduler.live_requests and scene.scheduler.stats().num_running_reqs == 0
    if how == "flush":
        assert scene.scheduler.flush_cache()
    else:
        assert scene.scheduler.abort_all_requests(scene.now, "all") == []
    scene.verify()
    scene.add("other", prompt_of(200, 8), 4)
    scene.run()
    assert scene.outcomes["other", 0].tokens == expected_output(prompt_of(200, 8), 4)


def test_failed_chunk_waits_for_a_step_that_succeeds() -> None:
    """A device that fails must not be tried by preparations until the worker gives up."""
    scene = harness()
    said = turn(scene, "a", PROMPT)
    scene.fault = lambda batch: "compute"
    scene.prepare("a", canonical(PROMPT, said))
    scene.run()
    assert scene.scheduler.stats().preparations.dropped == {"failed": 1} and not scene.failed
    scene.prepare("a", canonical(PROMPT, said))
    scene.run()
    assert scene.scheduler.stats().preparations.steps == 1
    scene.fault = lambda batch: None
    scene.add("other", [1, 2, 3], 2)
    scene.run()
    assert scene.scheduler.stats().preparations.completed == 1


def test_flood_of_ended_jobs_is_bounded() -> None:
    scene = harness(num_tokens=4096, leases=MAX_PENDING + 100, context=64, check=False)
    scene.scheduler._preparations._credit = 0.0
    for number in range(MAX_PENDING + 50):
        said = turn(scene, f"r{number}", [number + 1] * 3, job=f"job{number}", new=2)
        scene.scheduler._preparations._credit = 0.0
        scene.prepare(f"r{number}", [*[number + 1] * 3, 5, *said])
    stats = scene.scheduler.stats().preparations
    assert stats.pending <= MAX_PENDING and sum(stats.dropped.values()) >= 50


@pytest.mark.parametrize("uses", [True, False])
def test_client_that_uses_nothing_gets_no_more(uses: bool) -> None:
    scene = harness(num_tokens=8192, check=False)
    computed_tokens: list[int] = []
    for number in range(24):
        job, prompt = f"job{number}", prompt_of(40, number)
        said = turn(scene, f"a{number}", prompt, job=job, client="one")
        scene.prepare(f"a{number}", canonical(prompt, said))
        scene.run()
        following = canonical(prompt, said) if uses else [*prompt, *said]
        turn(scene, f"b{number}", [*following, 5], job=job, client="one", is_last_step=True)
        computed_tokens.append(scene.scheduler.stats().preparations.computed_tokens)
    stats = scene.scheduler.stats().preparations
    if uses:
        assert stats.completed == 24 and stats.used_tokens == stats.computed_tokens
    else:
        assert stats.completed <= 2 * Benefit.TRIALS + 1 and stats.dropped["learned"] >= 15
    said = turn(scene, "other", PROMPT, job="other", client="two")
    scene.prepare("other", canonical(PROMPT, said))
    scene.run()
    assert scene.scheduler.stats().preparations.completed == stats.completed + 1, "others are not affected"


def test_scope_that_was_judged_badly_is_tried_again() -> None:
    benefit = Benefit()
    scope = ("client", "")
    for _ in range(Benefit.TRIALS):
        assert benefit.pays(scope)
        benefit.record_use(scope, 100, 0)
    assert [benefit.pays(scope) for _ in range(2 * Benefit.RETRIAL)].count(True) == 2
    for _ in range(4):
        benefit.record_use(scope, 100, 100)
    assert benefit.pays(scope), "earlier misses fade"


def test_last_step_is_not_prepared() -> None:
    scene = harness()
    said = turn(scene, "a", PROMPT, is_last_step=True)
    scene.prepare("a", canonical(PROMPT, said))
    scene.run()
    assert scene.outcomes["a", 0].finish == FinishReason(type="length")
    assert scene.scheduler.stats().preparations.steps == 0


def test_nothing_is_prepared_without_the_radix_cache() -> None:
    scene = harness(disable_radix_cache=True, chunk=16)
    said = turn(scene, "a", PROMPT)
    scene.prepare("a", canonical(PROMPT, said))
    scene.run()
    assert scene.scheduler.stats().preparations.dropped == {"refused": 1}


@pytest.mark.parametrize("depth, page_size", [(1, 16), (2, 1)])
def test_exception_at_any_call_spoils_no_answer(depth: int, page_size: int) -> None:
    """The turn before, another request and the next turn say what they would have said, or end with an error."""

    def play(at: int) -> tuple[CallFaults, Harness]:
        scene = harness(depth=depth, page_size=page_size, chunk=32, policy="handoff")
        faults = CallFaults(at)
        scene.add("a", PROMPT, 20, job_id="job", retain_ttl=60.0)
        scene.run()
        inject(scene, faults)
        text = [*canonical(PROMPT, scene.outcomes["a", 0].tokens), *prompt_of(100, 6)]
        scene.prepare("a", text)
        scene.step()
        scene.step()
        for rid, prompt in (("other", [1, 2, 3]), ("b", [*text, 5])):
            try:
                scene.add(rid, prompt, 4, job_id="job" if rid == "b" else None)
            except RequestRefused as refusal:
                assert refusal.code == "request_failed"
                continue
            scene.run()
            outcome = scene.outcomes[rid, 0]
            failed = outcome.refusal is not None and outcome.refusal.code == "request_failed"
            assert failed or outcome.tokens == expected_output(prompt, 4)
        scene.run()
        assert not scene.scheduler.live_requests and scene.scheduler._preparations.request_in_flight is None
        return faults, scene

    calls = play(-1)[0].calls
    for at in range(depth, calls, calls // 60):
        print(f"call {at}")
        play(at)


def test_turn_of_an_adapter_is_prepared_with_it() -> None:
    """Prepared by the model alone, its KV would be wrong; with the adapter unloaded, nothing is prepared."""
    for loaded, spent in ((True, 1), (False, 1 + 20 - THOUGHTS + 2)):
        scene = harness()
        scene.scheduler.set_adapters({"a"})
        scene.add("r", PROMPT, 20, job_id="job", retain_ttl=60.0, adapter="a")
        scene.run()
        said = scene.outcomes["r", 0].tokens
        assert said == expected_output(PROMPT, 20, adapter="a")
        text = canonical(PROMPT, said)
        scene.prepare("r", text)
        if not loaded:
            scene.scheduler.set_adapters(set())
        scene.run()
        assert scene.scheduler.stats().preparations.dropped == ({} if loaded else {"adapter": 1})
        before = scene.model.computed_tokens
        scene.add("s", [*text, 5], 1, job_id="job", adapter="a")
        scene.run()
        assert scene.outcomes["s", 0].tokens == expected_output([*text, 5], 1, adapter="a")
        assert scene.model.computed_tokens - before == spent
