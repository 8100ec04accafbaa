"""Values of the right JSON type that nobody can use."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.reading import read_rid
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native.generate import parse_generate
from baton.scheduler.outcome import RequestRefused

HUGE = 2**64


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("retain_n", {"text": "a", "retain_ttl": 1, "retain_n": HUGE}),
        ("retain_ttl", {"text": "a", "retain_ttl": 10**400}),
        ("continuation_index", {"continuation_of": "p", "continuation_index": HUGE}),
        ("logprob_start_len", {"continuation_of": "p", "return_logprob": True, "logprob_start_len": HUGE}),
        ("top_logprobs_num", {"text": "a", "return_logprob": True, "top_logprobs_num": -HUGE}),
        ("priority", {"text": "a", "priority": HUGE}),
    ],
)
def test_numbers_beyond_64_bits_are_refused(name: str, fields: dict[str, Any]) -> None:
    """They would be found out when the message to the worker is packed: after the request has been noted as open, which
    it then is for ever."""
    with pytest.raises(RequestRefused, match=f"{name} is .*; use a number of less than 64 bits") as refusal:
        parse_generate(fields)
    assert status_of(refusal.value) == 400 and refusal.value.param == name


@pytest.mark.parametrize("given", ["x", "cmpl-x", "chatcmpl-x", "msg_x", "resp_x", "resp_msg_x"])
def test_response_id_prefix_is_stripped_from_rid(given: str) -> None:
    assert read_rid(given, "rid") == "x"
    assert read_rid(f"x{given}", "rid") == f"x{given}", "only what it begins with"


@pytest.mark.parametrize("given", ["", "msg_", "x" * 513, "msg_" * 300 + "x", 1, None])
def test_invalid_rids_are_refused(given: Any) -> None:
    with pytest.raises(RequestRefused, match=r"continuation_of is .*; it takes a string of 1 to 512 characters"):
        read_rid(given, "continuation_of")
