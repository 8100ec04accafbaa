"""Which sampling parameters can never be right, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from baton.scheduler.sampling_params import SamplingParams

NAN = float("nan")
WRONG: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("max_new_tokens", -1, "use 1 or more, or 0 to compute the prompt only", {}),
    ("min_new_tokens", -1, "use 0 or more", {}),
    ("min_new_tokens", 9, "it exceeds max_new_tokens (8)", {"max_new_tokens": 8}),
    ("temperature", -0.1, "use 0 (greedy) to 1e+30", {}),
    ("temperature", float("inf"), "use 0 (greedy) to 1e+30", {}),
    ("temperature", 1e39, "use 0 (greedy) to 1e+30", {}),
    ("temperature", NAN, "use 0 (greedy) to 1e+30", {}),
    ("top_p", 0.0, "use a value in (0, 1]", {}),
    ("top_p", 1.001, "use a value in (0, 1]", {}),
    ("top_k", 0, "use -1 (off) or 1 and more, in 63 bits", {}),
    ("top_k", 2**63, "use -1 (off) or 1 and more, in 63 bits", {}),
    ("top_k", -2, "use -1 (off) or 1 and more, in 63 bits", {}),
    ("min_p", -0.001, "use a value in [0, 1]", {}),
    ("min_p", 1.001, "use a value in [0, 1]", {}),
    ("frequency_penalty", -2.001, "use a value in [-2, 2]", {}),
    ("frequency_penalty", 2.001, "use a value in [-2, 2]", {}),
    ("presence_penalty", -2.001, "use a value in [-2, 2]", {}),
    ("presence_penalty", 2.001, "use a value in [-2, 2]", {}),
    ("repetition_penalty", 0.0, "use a value in [1e-06, 1e+06]; 1 is off", {}),
    ("repetition_penalty", 1e-300, "use a value in [1e-06, 1e+06]; 1 is off", {}),
    ("repetition_penalty", 1.0001e6, "use a value in [1e-06, 1e+06]; 1 is off", {}),
    ("n", 0, "use 1 to 512", {}),
    ("n", 513, "use 1 to 512", {}),
    ("stop_regex", ("end", ""), "an empty expression would end every output at once; drop it", {}),
    ("stop_regex", ("a",), "a beam search ends at plain strings; use stop", {"beam_width": 2}),
    ("stop", ("end", ""), "an empty stop string would end every output at once; drop it", {}),
    ("logit_bias", {3: -100.001}, "use values in [-100, 100]", {}),
    ("logit_bias", {3: 1.0, 4: 100.001}, "use values in [-100, 100]", {}),
    ("seed", -(2**63) - 1, "use a whole number of 64 bits, or leave it out", {}),
    ("seed", 2**63, "use a whole number of 64 bits, or leave it out", {}),
    ("item_trie", "", "name a loaded trie, or leave it out", {}),
    ("min_new_tokens", 1, "an item of item_trie ends where it ends; leave it out", {"item_trie": "items"}),
    ("item_trie", "items", "it does not go with allowed_token_ids; leave one of them out", {"allowed_token_ids": (1,)}),
    ("beam_width", 2, "it does not go with allowed_token_ids; leave one of them out", {"allowed_token_ids": (1,)}),
    ("length_penalty", 0.999, "it needs a beam_width", {}),
    ("early_stopping", "never", "it needs a beam_width", {}),
    ("beam_width", 0, "use 1 to 512, or leave it out", {}),
    ("beam_width", 513, "use 1 to 512, or leave it out", {}),
    ("max_new_tokens", 0, "a beam search without a step has no sequences; use 1 or more", {"beam_width": 4}),
    ("n", 5, "a beam search returns at most beam_width (4) sequences", {"beam_width": 4}),
    ("length_penalty", -10.001, "use a value in [-10, 10]", {"beam_width": 4}),
    ("length_penalty", 10.001, "use a value in [-10, 10]", {"beam_width": 4}),
    ("temperature", 0.999, "a beam search does not sample; leave it out, or use 0 or 1", {"beam_width": 4}),
    ("top_k", 1, "a beam search does not sample; leave it out", {"beam_width": 4}),
    ("top_p", 0.999, "a beam search does not sample; leave it out", {"beam_width": 4}),
    ("min_p", 0.001, "a beam search does not sample; leave it out", {"beam_width": 4}),
    ("seed", 0, "a beam search draws nothing; leave it out", {"beam_width": 4}),
    ("frequency_penalty", 0.001, "a beam search compares log-probabilities; leave it out", {"beam_width": 4}),
    ("presence_penalty", 0.001, "a beam search compares log-probabilities; leave it out", {"beam_width": 4}),
    ("repetition_penalty", 0.999, "a beam search compares log-probabilities; leave it out", {"beam_width": 4}),
]
RIGHT: list[dict[str, Any]] = [
    {"max_new_tokens": 1, "min_new_tokens": 1},
    {"max_new_tokens": 0},
    {"max_new_tokens": None, "min_new_tokens": 10**6},
    {"temperature": 0.0, "top_p": 1e-9, "top_k": 1, "min_p": 0.0},
    {"temperature": 1e30, "top_p": 1.0, "top_k": -1, "min_p": 1.0},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 1e-6},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1e6},
    {"n": 512, "seed": 0, "stop": ("end",), "logit_bias": {3: -100.0, 4: 100.0}},
    {"seed": 2**63 - 1, "logit_bias": {}},
    {"seed": -(2**63)},
    {"item_trie": "items"},
    {"beam_width": 1, "length_penalty": -10.0, "early_stopping": "never"},
    {"beam_width": 512, "n": 512, "length_penalty": 10.0, "early_stopping": True, "temperature": 0.0},
]


@pytest.mark.parametrize(("name", "value", "fix", "more"), WRONG)
def test_sampling_refusal_names_field_value_and_fix(name: str, value, fix: str, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{name: value, **more})
    assert str(refusal.value) == f"{name} is {value!r}; {fix}"


@pytest.mark.parametrize("given", RIGHT)
def test_boundary_values_are_accepted(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in given} == given


def test_a_search_is_one_request_of_many_rows() -> None:
    plain, search = SamplingParams(n=3), SamplingParams(n=3, beam_width=5)
    assert (plain.num_requests, plain.num_rows) == (3, 1)
    assert (search.num_requests, search.num_rows) == (1, 5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 5e-324}, True),
        ({"temperature": 9.9e-7}, True),
        ({"temperature": 1e-6}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({"temperature": 0.1}, False),
    ],
)
def test_is_greedy_by_temperature_or_top_k(given: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**given).is_greedy is expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop_regex": ("a",) * 9}, "stop_regex has 9 expressions; use at most 8"),
        ({"stop_regex": ("a" * 256, "b" * 257)}, "stop_regex has 513 characters; use at most 512"),
        ({"stop": ("x", "b"), "stop_regex": ("a", "b")}, "stop_regex holds 'b', and so does stop"),
    ],
)
def test_stop_regexes_are_bounded(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)
