"""Decisions of the scheduler, one at a time, on the KV-echo model."""

from __future__ import annotations

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.batch import StepResult, StopMatch
from baton.scheduler.request import RequestStatus
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import RequestRefused
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.specs import make_spec


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [1, 5, 64, 1000])
def test_output_matches_the_model(page_size: int, chunk: int, depth: int) -> None:
    harness = Harness(page_size=page_size, chunk=chunk, depth=depth)
    for i in range(6):
        harness.add(f"r{i}", prompt_of(30 + 9 * i, i), 12)
    harness.run()
    for i in range(6):
        assert harness.outcomes[f"r{i}", 0].tokens == expected_output(prompt_of(30 + 9 * i, i), 12)


@pytest.mark.parametrize("depth", [1, 2])
def test_scheduled_tokens_are_prompt_plus_new_minus_one(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.add("a", prompt_of(40), 17)
    harness.run()
    assert harness.model.computed_tokens == 40 + 17 - 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_stop_noticed_one_step_late_rolls_back(page_size: int, depth: int) -> None:
    prompt = prompt_of(33)
    says = expected_output(prompt, 20)
    harness = Harness(depth=depth, page_size=page_size)
    harness.add("a", prompt, 20, stop_token_ids=(says[6],))
    harness.run()
    outcome = harness.outcomes["a", 0]
    assert outcome.tokens == says[: says.index(says[6]) + 1]
    assert outcome.finish is not None and (outcome.finish.type, outcome.finish.matched) == ("stop", says[6])
    # Only committed tokens are in the tree: the over-run token of the step in flight is not.
    committed = (33 + len(outcome.tokens) - 1) // page_size * page_size
    assert harness.cache.evictable_tokens == committed


def test_negative_seed_of_samples_wraps_in_64_bits() -> None:
    harness = Harness()
    harness.add("a", [1] * 4, 2, n=3, seed=-2)
    assert [request.seed for request in harness.scheduler.live_requests] == [2**64 - 2, 2**64 - 1, 0]


def test_second_request_reuses_cached_prompt() -> None:
    harness = Harness(page_size=16)
    prompt = prompt_of(70)
    harness.add("a", prompt, 4)
    harness.run()
    harness.add("b", prompt, 4)
    harness.run()
    request = harness.outcomes["b", 0].request
    assert request is not None and request.found.total == 64
    assert harness.outcomes["b", 0].tokens == harness.outcomes["a", 0].tokens
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (140, 64)


def test_same_prompt_in_one_batch_is_computed_once() -> None:
    harness = Harness(num_tokens=2048, rows=16)
    harness.add("a", prompt_of(100), 1, n=16)
    harness.run()
    assert harness.model.computed_tokens == 100 + 15


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    harness.add("a", prompt_of(50), 2, namespace="one")
    harness.run()
    harness.add("b", prompt_of(50), 2, namespace="two")
    harness.run()
    request = harness.outcomes["b", 0].request
    assert request is not None and request.found.total == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_changes_no_output(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=320, rows=8, page_size=page_size, depth=depth)
    for i in range(8):
        harness.add(f"r{i}", prompt_of(40, i), 100)
    harness.run()
    assert harness.scheduler.stats().retractions > 0
    for i in range(8):
        assert harness.outcomes[f"r{i}", 0].tokens == expected_output(prompt_of(40, i), 100)


def test_running_requests_get_tokens_between_the_chunks_of_a_long_prompt() -> None:
    harness = Harness(chunk=8)
    harness.add("short", prompt_of(8, 1), 50)
    harness.step()
    harness.add("long", prompt_of(160, 2), 2)
    while harness.outcomes["long", 0].tokens == []:
        harness.step()
    assert len(harness.outcomes["short", 0].tokens) >= 160 // 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps_before", range(12))
def test_abort_at_every_point_frees_everything(steps_before: int, depth: int) -> None:
    harness = Harness(chunk=16, depth=depth, page_size=16)
    harness.add("a", prompt_of(90), 6)
    harness.add("b", prompt_of(90, 1), 6)
    for _ in range(steps_before):
        harness.step()
    harness.abort("a")
    finish = harness.outcomes["a", 0].finish
    assert finish is not None
    harness.run()
    assert harness.outcomes["b", 0].tokens == expected_output(prompt_of(90, 1), 6)
    stats = harness.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens


def test_any_single_allocation_failure_is_survived() -> None:
    def run(fail_at: int | None) -> int:
        harness = Harness(num_tokens=256, rows=4, chunk=32, page_size=16, depth=2)
        harness.allocator.should_fail = lambda call: call == fail_at
        for i in range(5):
            harness.add(f"r{i}", prompt_of(50, i), 12)
        harness.run()
        for i in range(5):
            assert harness.outcomes[f"r{i}", 0].tokens == expected_output(prompt_of(50, i), 12)
        return harness.allocator.calls

    for fail_at in range(run(None)):
        run(fail_at)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_request_just_fitting_the_pool_runs_alone(page_size: int) -> None:
    harness = Harness(num_tokens=128, page_size=page_size)
    harness.add("a", prompt_of(100), 29)  # 128 tokens of KV: the last token's is never computed
    harness.add("b", prompt_of(100, 1), 29)
    harness.run()
    assert harness.outcomes["b", 0].tokens == expected_output(prompt_of(100, 1), 29)


@pytest.mark.parametrize(
    ("length", "new", "param", "words"),
    [
        (0, 4, "input_ids", "empty"),
        (256, 1, "input_ids", "context"),
        (200, 57, "max_new_tokens", "<= 56"),
        (200, 56, "max_new_tokens", "--max-total-tokens"),
    ],
)
def test_requests_that_can_never_fit_are_refused(length: int, new: int, param: str, words: str) -> None:
    harness = Harness(num_tokens=240)
    with pytest.raises(RequestRefused, match=words) as refusal:
        harness.add("a", prompt_of(length), new)
    assert refusal.value.param == param
    assert harness.scheduler.is_idle


def test_duplicate_live_rid_is_refused_with_409() -> None:
    harness = Harness()
    harness.add("a", prompt_of(9), 4)
    with pytest.raises(RequestRefused) as refusal:
        harness.add("a", prompt_of(9), 4)
    assert status_of(refusal.value) == 409
    harness.run()
    harness.add("a", prompt_of(9), 4)
    harness.run()


def test_failed_step_spares_new_request_with_reused_rid() -> None:
    harness = Harness(depth=2)
    output = expected_output([1, 2, 3], 8)
    harness.add("a", [1, 2, 3], 8, stop_token_ids=(output[1],))
    harness.add("b", [7, 7], 8)
    while harness.outcomes["a", 0].finish is None:
        harness.step()
    harness._results.popleft()  # of a step in flight that computes one token too many for "a"
    harness.add("a", [4, 5, 6], 8)
    harness._take(harness.scheduler.fail_step(harness.now, "no"))
    harness.run()
    finish = harness.outcomes["b", 0].finish
    assert finish is not None and finish.type == "abort"
    assert harness.outcomes["a", 0].tokens == expected_output([4, 5, 6], 8)


def test_unlimited_output_is_bounded_by_context_and_pool() -> None:
    harness = Harness(num_tokens=512, context=64)
    spec = make_spec("a", prompt_of(10), SamplingParams(max_new_tokens=None))
    (request,) = harness.scheduler.add_request(spec, 0.0)
    assert request.max_new_tokens == 54


def test_stop_match_ends_the_request_with_its_string() -> None:
    harness = Harness()
    spec = make_spec("a", prompt_of(10), SamplingParams(stop=("x", "y")))
    harness.scheduler.add_request(spec, 0.0)
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None
    (event,) = harness.scheduler.process_result(
        StepResult(np.array([5], dtype=np.int32), np.ones(1, dtype=np.int32), {0: StopMatch(1, 0)}), 0.0
    )
    assert event.finish is not None and event.finish.matched == "y"
    assert harness.scheduler.is_idle


def test_flush_is_refused_while_requests_run() -> None:
    harness = Harness()
    harness.add("a", prompt_of(20), 4)
    harness.step()
    assert not harness.scheduler.flush_cache()
    harness.run()
    assert harness.cache.evictable_tokens > 0
    assert harness.scheduler.flush_cache()
    assert harness.cache.evictable_tokens == 0


def test_fcfs_does_not_let_small_requests_pass_a_large_one() -> None:
    harness = Harness(num_tokens=256, rows=8)
    harness.add("first", prompt_of(150, 1), 60)
    harness.step()
    harness.add("large", prompt_of(180, 2), 20)
    harness.add("small", prompt_of(5, 3), 2)
    harness.step()
    small = harness.outcomes["small", 0].request
    assert small is not None and small.status is RequestStatus.WAITING
    harness.run()


def test_lpm_prefers_cached_prompts() -> None:
    harness = Harness(policy="lpm", rows=1)
    harness.add("warm", prompt_of(60, 1), 1)
    harness.run()
    harness.add("cold", prompt_of(60, 2), 1)
    harness.add("hit", prompt_of(60, 1), 1)
    harness.step()
    assert harness.outcomes["hit", 0].finish is not None
    assert harness.outcomes["cold", 0].finish is None
    harness.run()


def test_missing_seeds_are_drawn_and_differ_between_samples() -> None:
    harness = Harness()
    a, b = harness.scheduler.add_request(make_spec("a", np.arange(3, dtype=np.int32), SamplingParams(n=2)), 0.0)
    (c,) = harness.scheduler.add_request(make_spec("c", np.arange(3, dtype=np.int32), SamplingParams(seed=11)), 0.0)
    assert b.seed == a.seed + 1 and c.seed == 11


def test_requested_prompt_logprobs_limit_cached_prefix() -> None:
    harness = Harness()
    harness.add("a", prompt_of(50), 1)
    harness.run()
    prompt_ids = np.array(prompt_of(50), dtype=np.int32)
    spec = make_spec("b", prompt_ids, SamplingParams(max_new_tokens=1), logprobs=LogprobOptions(start_len=20))
    harness.scheduler.add_request(spec, 0.0)
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None
    # The KV of 19 tokens is reused; new token 0 (position 19) predicts position 20, the first one asked for.
    assert (batch.prefix_lens[0], batch.logprob_starts[0]) == (19, 0)


def test_higher_priority_is_admitted_first_and_retracted_last() -> None:
    """Admitted before older requests; under pressure the lower one is retracted, though it is older; but never the
    oldest of all."""
    harness = Harness(num_tokens=128, rows=1)
    harness.add("first", prompt_of(20), 4)
    harness.step()
    harness.add("low", prompt_of(20, 1), 4)
    harness.add("high", prompt_of(20, 2), 4, priority=1)
    while harness.outcomes["high", 0].finish is None:
        harness.step()
        assert harness.outcomes["low", 0].finish is None
    harness.run()
    pressed = Harness(num_tokens=256, rows=4)
    for rid, priority in (("oldest", -1), ("low", 0), ("high", 1)):
        pressed.add(rid, prompt_of(40, len(rid)), 60, priority=priority)
    pressed.run()
    requests = [pressed.outcomes[rid, 0].request for rid in ("oldest", "low", "high")]
    assert [request is not None and request.retractions > 0 for request in requests] == [False, True, False]
