"""Requests whose logits are not finite end alone, and what they cached is found by nobody."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.limits import logits_not_finite
from baton.scheduler.outcome import RequestRefused
from tests.doubles.beam_search_scene import DEPTHS, add, search
from tests.doubles.continuation_scene import inheritance
from tests.doubles.kv_echo import SPOILED, expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

BAD = 999
CLEAN = [token for token in prompt_of(400, 3) if token != BAD]


def failed(harness: Harness, rid: str, index: int = 0) -> bool:
    outcome = harness.outcomes[rid, index]
    if outcome.refusal is None or status_of(outcome.refusal) != 500:
        return False
    assert outcome.refusal.code == "logits_not_finite" and outcome.refusal.message == logits_not_finite().message
    assert outcome.finish is not None and outcome.finish.type == "abort"
    return True


def cached(harness: Harness, prompt: list[int]) -> int:
    return harness.cache.match_len("", np.array(prompt, dtype=np.int32))


def end(harness: Harness) -> None:
    """Nothing is lost."""
    harness.run()
    harness.scheduler._leases.break_all()
    stats = harness.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens
    assert harness.pool.num_free == harness.pool.num_rows
    assert harness.scheduler.flush_cache()
    assert harness.allocator.free_tokens == harness.allocator.total_tokens


@PAGES
@DEPTHS
@pytest.mark.parametrize("at", [0, 50, 139], ids=["first token", "first chunk", "last token"])
@pytest.mark.parametrize("shown", [True, False])
def test_nonfinite_prompt_fails_with_500_and_keeps_sound_prefix(
    page_size: int, depth: int, at: int, shown: bool
) -> None:
    harness = Harness(num_tokens=2048, page_size=page_size, depth=depth, chunk=64)
    harness.model.spoiling, harness.model.shows_spoiled = {BAD}, shown
    bad, good = CLEAN[:140], CLEAN[150:220]
    bad[at] = BAD
    harness.add("good", good, 20)
    harness.add("bad", bad, 20)
    harness.run()
    assert failed(harness, "bad") and harness.outcomes["bad", 0].tokens == []
    assert harness.outcomes["good", 0].tokens == expected_output(good, 20)
    sound = min(at - at % page_size, 122 - 122 % page_size) if shown else 0  # its last 18 tokens are not published
    assert cached(harness, bad) == sound and cached(harness, good) == 70 - 70 % page_size
    assert harness.scheduler.stats().nonfinite_requests == 1
    harness.model.spoiling.clear()
    harness.add("again", bad, 5)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output(bad, 5)
    end(harness)


@DEPTHS
def test_nonfinite_sampled_token_fails_its_request(depth: int) -> None:
    harness = Harness(page_size=4, depth=depth)
    prompt = CLEAN[:30]
    output = expected_output(prompt, 10)
    assert len(set(output)) == 10
    harness.model.spoiling = {output[6]}
    harness.add("a", prompt, 10)
    harness.run()
    assert failed(harness, "a") and harness.outcomes["a", 0].tokens == output[:7]
    assert cached(harness, prompt + output) == 28, "the prompt's whole pages"
    end(harness)


@DEPTHS
def test_unpublished_nonfinite_request_caches_nothing(depth: int) -> None:
    """The prompt has no whole page, so that nothing of the request is in the tree before its end."""
    harness = Harness(page_size=16, depth=depth)
    prompt = CLEAN[:10]
    output = expected_output(prompt, 40)
    bad = next(n for n in range(25, 40) if output.index(output[n]) == n)
    harness.model.spoiling = {output[bad]}
    harness.add("a", prompt, 60)
    harness.run()
    assert failed(harness, "a") and harness.outcomes["a", 0].tokens == output[: bad + 1]
    assert cached(harness, prompt + output) == 0 == harness.cache.total_nodes
    end(harness)


@pytest.mark.parametrize("shown", [True, False])
def test_leases_on_shared_prefix_break_if_bad_slot_is_unknown(shown: bool) -> None:
    harness = Harness(num_tokens=2048)
    harness.model.spoiling, harness.model.shows_spoiled = {BAD}, shown
    harness.add("leased", CLEAN[:60], 4, retain_ttl=1000.0)
    harness.add("elsewhere", CLEAN[200:260], 4, retain_ttl=1000.0)
    harness.run()
    harness.add("bad", [*CLEAN[:50], BAD], 4)
    harness.run()
    assert failed(harness, "bad")
    assert harness.scheduler.lease_counts.broken == (0 if shown else 1)
    path_of_leased = "handoff" if shown else "fallback"
    for rid, prompt, path in (("leased", CLEAN[:60], path_of_leased), ("elsewhere", CLEAN[200:260], "handoff")):
        harness.continue_from(rid, f"after {rid}", [5], 4)
        harness.run()
        assert inheritance(harness, f"after {rid}").path == path
        tokens = harness.outcomes[f"after {rid}", 0].tokens
        assert tokens == expected_output([*prompt, *expected_output(prompt, 4), 5], 4)
    end(harness)


@PAGES
@DEPTHS
def test_spoiled_prefix_fails_sharing_requests_once(page_size: int, depth: int) -> None:
    """Something writes into a cached prefix. A request that is computed already goes on as long as it can; what comes
    later is computed afresh."""
    harness = Harness(num_tokens=2048, page_size=page_size, depth=depth)
    stem = CLEAN[:128]
    harness.add("first", [*stem, 1], 3)
    harness.run()
    harness.add("shares", [*stem, 2], 30)
    harness.step()
    request = harness.outcomes["shares", 0].request
    assert request is not None and request.found.total == 128
    harness.model._kv[harness.pool.rows[request.held_kv.row, 70]] = SPOILED
    harness.add("second", [*stem, 3], 30)
    harness.run()
    assert failed(harness, "shares") and failed(harness, "second")
    assert cached(harness, stem) == 70 - 70 % page_size
    harness.add("third", [*stem, 4], 3)
    harness.run()
    assert harness.outcomes["third", 0].tokens == expected_output([*stem, 4], 3)
    end(harness)


@PAGES
def test_running_request_keeps_hidden_prefix(page_size: int) -> None:
    harness = Harness(num_tokens=2048, page_size=page_size)
    stem = CLEAN[:130]
    harness.model.spoiling, harness.model.shows_spoiled = {BAD}, False
    harness.add("runs", [*stem, 1], 40, retain_ttl=1000.0, stop_token_ids=(expected_output([*stem, 1], 25)[-1],))
    for _ in range(4):
        harness.step()
    harness.add("bad", [*stem, BAD], 5)
    for _ in range(2):
        harness.step()
    assert failed(harness, "bad") and cached(harness, stem) == 0
    harness.add("fresh", [*stem, 2], 5)
    harness.run()
    for rid, prompt, count in (("runs", [*stem, 1], 25), ("fresh", [*stem, 2], 5)):
        assert harness.outcomes[rid, 0].tokens == expected_output(prompt, count)
    request = harness.outcomes["fresh", 0].request
    assert request is not None and request.found.total == 0
    # Its lease is on the hidden branch, and is as good as any other.
    harness.continue_from("runs", "child", [5, 6], 4)
    harness.run()
    assert inheritance(harness, "child").path == "handoff"
    said = expected_output([*stem, 1], 24)
    assert harness.outcomes["child", 0].tokens == expected_output([*stem, 1, *said, 5, 6], 4)
    end(harness)


@DEPTHS
def test_nonfinite_sample_fails_siblings_and_children(depth: int) -> None:
    """Three samples have the same output, and one of them is corrupted."""
    harness = Harness(page_size=4, depth=depth, leases=4)
    prompt = CLEAN[:30]
    harness.add("parent", prompt, 30, n=3, retain_ttl=100.0)
    while harness.outcomes["parent", 2].tokens == []:
        harness.step()
    harness.continue_from("parent", "waits", [5], 3, index=1)
    request = harness.outcomes["parent", 1].request
    assert request is not None
    harness.model._kv[harness.pool.rows[request.held_kv.row, request.committed_len - 1]] = SPOILED
    harness.run()
    assert all(failed(harness, "parent", index) for index in range(3))
    refusal = harness.outcomes["waits", 0].refusal
    assert refusal is not None and status_of(refusal) == 409
    with pytest.raises(RequestRefused, match="not finite") as late:
        harness.continue_from("parent", "late", [5], 3)
    assert status_of(late.value) == 409
    assert harness.scheduler.stats().nonfinite_requests == 1, "requests are counted, not samples"
    end(harness)


@pytest.mark.parametrize("length", [20, 100], ids=["partial page only", "pages in the tree"])
@pytest.mark.parametrize("keep_parent", [True, False])
def test_leases_on_spoiled_kv_break(length: int, keep_parent: bool) -> None:
    harness = Harness(num_tokens=2048, page_size=64)
    prompt = CLEAN[:length]
    harness.add("parent", prompt, 4, retain_ttl=1000.0)
    harness.add("stranger", CLEAN[200:300], 4, retain_ttl=1000.0)
    harness.run()
    (lease,) = (lease for lease in harness.scheduler.live_leases() if lease.tokens < 150 and lease.serial == 0)
    assert lease.kv is not None
    harness.model._kv[harness.pool.rows[lease.kv.row, 10]] = SPOILED
    harness.continue_from("parent", "child", [5], 4, keep_parent=keep_parent)
    harness.run()
    assert failed(harness, "child") and not lease.is_live
    assert len(harness.scheduler._leases) == 1, "the stranger's"
    harness.continue_from("parent", "again", [5], 4)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output([*prompt, *expected_output(prompt, 4), 5], 4)
    end(harness)


@pytest.mark.parametrize("length", [20, 100], ids=["partial page only", "pages in the tree"])
def test_lease_survives_bad_token_in_child_suffix(length: int) -> None:
    harness = Harness(num_tokens=2048, page_size=64)
    harness.model.spoiling = {BAD}
    prompt = CLEAN[:length]
    harness.add("parent", prompt, 4, retain_ttl=1000.0)
    harness.run()
    harness.continue_from("parent", "child", [5, BAD], 4, keep_parent=True)
    harness.run()
    assert failed(harness, "child") and harness.scheduler.lease_counts.broken == 0
    harness.continue_from("parent", "again", [5], 4)
    harness.run()
    assert inheritance(harness, "again").path == "handoff"
    assert harness.outcomes["again", 0].tokens == expected_output([*prompt, *expected_output(prompt, 4), 5], 4)
    end(harness)


@PAGES
@DEPTHS
def test_nonfinite_beam_fails_whole_search(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=4096, page_size=page_size, rows=8, depth=depth)
    prompt, params = CLEAN[:37], search(4, 30, n=2)
    add(harness, "find", prompt, params, retain_ttl=100.0)
    for _ in range(8):
        harness.step()
    request = harness.outcomes["find", 0].request
    assert request is not None
    beams = request.held_beams
    harness.model._kv[harness.pool.rows[beams.rows[1], beams.length - 2]] = SPOILED
    harness.run()
    assert failed(harness, "find") and cached(harness, prompt) == 37 - 37 % page_size
    end(harness)


@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_nonfinite_requests_fail(seed: int) -> None:
    """Random stems, tails and ends, with memory so short that requests are retracted and prefixes evicted."""
    rng = random.Random(seed)
    page = rng.choice([1, 4, 16])
    harness = Harness(num_tokens=640, page_size=page, rows=6, leases=4, depth=rng.choice([1, 2]), chunk=48)
    harness.model.spoiling = {BAD}
    stems = [CLEAN[i * 40 : i * 40 + rng.randrange(20, 80)] for i in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(40):
        prompt = [*rng.choice(stems), rng.choice([7, 8, BAD]) if rng.random() < 0.3 else 9]
        prompt += [rng.randrange(900) for _ in range(rng.randrange(20))]
        asked[f"r{number}"] = prompt, rng.randrange(1, 25)
        harness.add(f"r{number}", *asked[f"r{number}"], retain_ttl=rng.choice([0.0, 20.0]))
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    for rid, (prompt, new) in asked.items():
        expected = expected_output(prompt, new)
        said = harness.outcomes[rid, 0].tokens
        assert failed(harness, rid) == (BAD in [*prompt, *expected[:-1]]), rid
        assert said == expected[: len(said)]
    assert any(failed(harness, rid) for rid in asked)
    end(harness)
