"""Requests that can never be served are refused at once, to the token; with what to change, in a code and a field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.memory_pool.allocator import Allocator
from baton.scheduler import limits
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request import Request
from baton.scheduler.request_spec import ContinuationSpec, LogprobOptions, Predecessor, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.scheduler_harness import Harness
from tests.doubles.specs import make_spec

TRIE = ItemTrie.build(np.array([[10, 11, -1, -1], [12, 13, 14, 15]], dtype=np.int32))


def request(
    max_new_tokens: int | None,
    *,
    constrained: bool = False,
    retain_ttl: float | None = None,
    clamps_output: bool = False,
    **sampling,
) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **sampling)
    constraint = ItemConstraint(TRIE, "items") if constrained else None
    spec = make_spec("r", [1], params, retain_ttl=retain_ttl, clamps_output=clamps_output)
    return Request(spec, index=0, seed=0, arrival=0.0, serial=0, constraint=constraint)


def most(prompt_len: int, max_new_tokens: int | None, pool: int = 1024, page_size: int = 1, **more) -> int:
    return limits.check_lengths(request(max_new_tokens, **more), prompt_len, 100, Allocator(pool, page_size))


def refused(*args, **more) -> tuple[str, int, str, str | None]:
    with pytest.raises(RequestRefused) as refusal:
        most(*args, **more)
    return str(refusal.value), status_of(refusal.value), refusal.value.code, refusal.value.param


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_context_limits_prompt_plus_output() -> None:
    assert most(60, 40) == 40 and most(60, None) == 40 and most(99, None) == 1
    text, *rest = refused(60, 41)
    assert rest == [400, "context_length_exceeded", "max_new_tokens"]
    assert "60 tokens from the input and 41 tokens for the output. Use max_new_tokens <= 40" in text
    text, *rest = refused(100, None)
    assert rest == [400, "context_length_exceeded", "input_ids"] and "input (100 tokens) is longer" in text
    assert refused(0, 3)[1:] == (400, "invalid_request", "input_ids")


def test_default_output_limit_is_clamped_to_context() -> None:
    assert most(60, 41, clamps_output=True) == 40 and most(99, 16, clamps_output=True) == 1
    assert most(60, 16, clamps_output=True) == 16
    assert refused(100, 16, clamps_output=True)[2] == "context_length_exceeded"


def test_prefill_only_prompt_may_fill_context_and_pool() -> None:
    assert most(100, 0) == 0 and most(64, 0, pool=64) == 0
    text, *rest = refused(101, 0)
    assert rest == [400, "context_length_exceeded", "input_ids"] and "length (100 tokens)" in text
    assert refused(65, 0, pool=64)[2] == "kv_pool_exceeded"
    assert refused(10, 0, constrained=True)[3] == "max_new_tokens"


def test_pool_limits_all_tokens_but_the_last() -> None:
    assert most(50, 15, pool=64) == 15 and most(50, None, pool=64) == 15 and most(64, 1, pool=64) == 1
    text, *rest = refused(50, 16, pool=64)
    assert rest == [400, "kv_pool_exceeded", "max_new_tokens"] and "KV pool of 64 tokens" in text
    assert refused(65, None, pool=64)[2] == "kv_pool_exceeded"


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "width", "room"),
    [
        (1, 40, 4, (64 - 40) // 4),
        (16, 32, 2, 16),
        (16, 40, 2, 8),  # each beam fills up the prompt's partial page
        (16, 33, 1, 31),
        (16, 60, 4, 0),  # the first tokens need no KV beside the prompt's
    ],
)
def test_beams_share_whole_prompt_pages_in_limits(page_size: int, prompt_len: int, width: int, room: int) -> None:
    assert most(prompt_len, None, 64, page_size, beam_width=width) == room + 1
    assert most(prompt_len, room + 1, 64, page_size, beam_width=width) == room + 1
    text, *rest = refused(prompt_len, room + 2, 64, page_size, beam_width=width)
    assert rest == [400, "kv_pool_exceeded", "max_new_tokens"]
    assert f"× beam_width ({width})" in text and ("in pages of 16 tokens" in text) == (page_size > 1)


def test_retained_search_results_count_twice() -> None:
    assert most(4, None, beam_width=4, n=2, pool=4 + 8 * 5, retain_ttl=1.0) == 6
    assert most(4, None, beam_width=4, n=2, pool=4 + 4 * 5) == 6
    text = refused(4, 7, beam_width=4, n=2, pool=4 + 8 * 5, retain_ttl=1.0)[0]
    assert "twice more for each of the 2 that retain_ttl keeps" in text


def test_search_prompt_beyond_pool_is_refused() -> None:
    assert most(64, 1, 64, beam_width=8) == 1
    assert refused(65, 1, 64, beam_width=8)[2] == "kv_pool_exceeded"


def test_output_limit_is_the_longest_item() -> None:
    assert most(10, None, constrained=True) == 4 and most(10, 90, constrained=True) == 4
    assert most(10, 2, constrained=True) == 2
    text, *rest = refused(10, 1, constrained=True)
    assert rest == [400, "invalid_request", "max_new_tokens"] and "has 2 tokens" in text


# -- others ------------------------------------------------------------------------------------------------------------


def test_logprob_start_must_be_within_prompt() -> None:
    limits.check_logprob_start(LogprobOptions(start_len=9), 10)
    with pytest.raises(RequestRefused, match="logprob_start_len is 10; the prompt has 10 tokens") as refusal:
        limits.check_logprob_start(LogprobOptions(start_len=10), 10)
    assert refusal.value.param == "logprob_start_len"


@pytest.mark.parametrize(("widest", "rows"), [(4, 8), (8, 4)])
def test_beam_width_is_limited_by_config_and_rows(widest: int, rows: int) -> None:
    limits.check_beam_limits(SamplingParams(), max_beam_width=0, rows=0)
    limits.check_beam_limits(SamplingParams(beam_width=4), max_beam_width=widest, rows=rows)
    with pytest.raises(RequestRefused, match="beam_width is 5, over 4") as refusal:
        limits.check_beam_limits(SamplingParams(beam_width=5), max_beam_width=widest, rows=rows)
    assert (status_of(refusal.value), refusal.value.param) == (400, "beam_width")


@pytest.mark.parametrize(("states", "widest"), [(2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (60, 40)])
def test_beam_width_is_limited_by_recurrent_states(states: int, widest: int) -> None:
    limits.check_beam_limits(SamplingParams(beam_width=widest), max_beam_width=100, rows=100, states=states)
    with pytest.raises(RequestRefused, match=f"beam_width is {widest + 1}, over {widest}, .*--max-states") as refusal:
        limits.check_beam_limits(SamplingParams(beam_width=widest + 1), max_beam_width=100, rows=100, states=states)
    assert (status_of(refusal.value), refusal.value.param) == (400, "beam_width")


def spec(n: int = 1, **parent: Any) -> RequestSpec:
    return make_spec("r", [1], SamplingParams(n=n), **parent)


@pytest.mark.parametrize(
    ("parent", "holds"),
    [({}, 10), ({"continuation": ContinuationSpec("parent")}, 13), ({"predecessor": Predecessor("turn")}, 13)],
)
def test_queue_has_extra_room_for_continuations(parent: dict[str, Any], holds: int) -> None:
    config = SchedulerConfig(max_queued_requests=10, max_leased_requests=3)
    limits.check_queue(spec(2, **parent), holds - 2, config)
    with pytest.raises(RequestRefused, match=f"^{holds - 1} requests wait already, and the queue holds 10 ") as refusal:
        limits.check_queue(spec(2, **parent), holds - 1, config)
    assert (status_of(refusal.value), refusal.value.code, refusal.value.param) == (429, "queue_full", None)


def test_zero_queue_limit_means_unlimited() -> None:
    limits.check_queue(spec(), 10**9, SchedulerConfig(max_queued_requests=0))


def test_lease_budget_from_config() -> None:
    config = SchedulerConfig(
        max_leased_ratio=0.5, max_client_leased_ratio=0.25, max_leased_requests=7, max_leases_per_client=0
    )
    budget = limits.lease_budget(config, Allocator(160, 16))
    assert (budget.max_tokens, budget.max_leases) == (80, 7)
    assert (budget.max_client_tokens, budget.max_client_leases) == (20, 4), "half of the leases, rounded up"
    config = SchedulerConfig(max_leased_requests=7, max_leases_per_client=6)
    assert limits.lease_budget(config, Allocator(160, 16)).max_client_leases == 6


def test_timeout_and_duplicate_rid_refusals() -> None:
    late, twice = limits.timed_out(2.5), limits.duplicate_rid("r")
    assert (status_of(late), late.code, late.param) == (408, "request_timeout", None) and "2.5 s" in str(late)
    assert (status_of(twice), twice.code, twice.param) == (409, "duplicate_rid", "rid") and "'r'" in str(twice)


def test_refused_request_leaves_scheduler_idle() -> None:
    harness = Harness(num_tokens=64, context=100)
    with pytest.raises(RequestRefused, match="can never fit"):
        harness.add("r", [1] * 50, 16)
    assert harness.scheduler.is_idle
