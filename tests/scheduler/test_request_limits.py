"""What a request may ask for: bounds on what it costs, and where its seed comes from."""

from __future__ import annotations

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.specs import make_spec


@pytest.mark.parametrize("beam_width", [None, 4])
def test_top_logprobs_are_bounded(beam_width: int | None) -> None:
    harness = Harness(rows=8)
    sampling = SamplingParams(max_new_tokens=2, beam_width=beam_width)
    spec = make_spec("r", prompt_of(5), sampling, logprobs=LogprobOptions(top_k=21))
    with pytest.raises(RequestRefused, match="top_logprobs_num is 21; this server gives at most 20") as refusal:
        harness.scheduler.add_request(spec, 0.0)
    assert status_of(refusal.value) == 400 and refusal.value.param == "top_logprobs_num"
    assert harness.scheduler.is_idle
    harness.scheduler.add_request(make_spec("r", prompt_of(5), sampling, logprobs=LogprobOptions(top_k=20)), 0.0)


def test_stop_ids_are_bounded() -> None:
    ids = tuple(range(MAX_STOP_TOKEN_IDS + 1))
    SamplingParams(stop_token_ids=ids[1:])
    with pytest.raises(ValueError, match="stop_token_ids has 1025 ids; use at most 1024"):
        SamplingParams(stop_token_ids=ids)


def test_stop_strings_are_bounded() -> None:
    strings = tuple(f"stop {number}" for number in range(MAX_STOPS + 1))
    SamplingParams(stop=strings[1:])
    with pytest.raises(ValueError, match="stop has 129 strings; use at most 128"):
        SamplingParams(stop=strings)
    SamplingParams(stop=("a", "b" * (MAX_STOP_CHARS - 1)))
    with pytest.raises(ValueError, match="stop has 16385 characters; use at most 16384 in all"):
        SamplingParams(stop=("a", "b" * MAX_STOP_CHARS))


def test_item_trie_name_length_is_bounded() -> None:
    with pytest.raises(ValueError, match="item_trie has 129 characters"):
        SamplingParams(item_trie="x" * 129)


def test_logit_biases_are_bounded() -> None:
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    SamplingParams(logit_bias=bias)
    with pytest.raises(ValueError, match="logit_bias has 1025 entries; use at most 1024"):
        SamplingParams(logit_bias=bias | {MAX_LOGIT_BIAS: 1.0})


def test_more_samples_than_queue_limit_are_400_not_429() -> None:
    """429 would have the client come back for ever."""
    harness = Harness(max_queued_requests=4, leases=2)
    with pytest.raises(RequestRefused, match="n is 5, and the queue holds 4 requests") as refusal:
        harness.add("r", prompt_of(5), n=5)
    assert status_of(refusal.value) == 400 and refusal.value.param == "n"
    harness.add("r", prompt_of(5), n=4)
    with pytest.raises(RequestRefused, match="4 requests wait already") as refusal:
        harness.add("late", prompt_of(5))
    assert status_of(refusal.value) == 429
    with pytest.raises(RequestRefused, match="n is 7, and the queue holds 6 requests") as refusal:
        harness.continue_from("r", "child", [1], n=7)
    assert status_of(refusal.value) == 400
    harness.run()


def seeds(random_seed: int | None) -> list[int]:
    harness = Harness(random_seed=random_seed)
    sampling = SamplingParams(max_new_tokens=2)
    specs = [make_spec(f"r{number}", prompt_of(5), sampling) for number in range(5)]
    return [request.seed for spec in specs for request in harness.scheduler.add_request(spec, 0.0)]


def test_seeds_come_from_the_random_seed() -> None:
    assert seeds(1) == seeds(1) and seeds(2) == seeds(2)
    assert not set(seeds(1)) & set(seeds(2))
    assert seeds(None) == seeds(None), "a scheduler draws nothing by itself"
