"""What clients are told, in codes, about a request that cannot continue another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.continuation import refusals
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request_spec import ContinuationSpec

SPEC = ContinuationSpec(parent_rid="parent", index=3)


@pytest.mark.parametrize(
    ("refuse", "given", "status", "code", "param"),
    [
        (refusals.unknown_parent, ("parent",), 404, "parent_not_found", "continuation_of"),
        (refusals.failed_parent, ("parent", None), 409, "parent_failed", "continuation_of"),
        (refusals.parked_parent, ("parent",), 409, "parent_not_started", "continuation_at"),
        (refusals.undecided_search, (SPEC,), 409, "parent_undecided", "continuation_at"),
        (refusals.search_with_stop_strings, (SPEC,), 409, "parent_undecided", "continuation_of"),
        (refusals.fewer_results, (SPEC, 2), 409, "parent_failed", "continuation_index"),
        (refusals.unknown_index, (SPEC,), 400, "invalid_request", "continuation_index"),
        (refusals.forgotten_parent, ("parent",), 410, "parent_forgotten", "continuation_of"),
    ],
)
def test_continuation_refusals_have_status_code_and_param(
    refuse: Callable[..., RequestRefused], given: tuple, status: int, code: str, param: str
) -> None:
    refused = refuse(*given)
    assert (status_of(refused), refused.code, refused.param) == (status, code, param)
    assert "'parent'" in str(refused)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (None, "(its own parent failed)"),
        ("it was stopped", "(it was stopped)"),
        (FinishReason(type="abort"), "(its own parent failed)"),
        (FinishReason(type="abort", message="no memory"), "(no memory)"),
        (FinishReason(type="abort", message="continuation_of 'x': gone"), "(its own parent failed)"),
    ],
)
def test_refusal_states_reason_of_parent_failure(reason: FinishReason | str | None, said: str) -> None:
    assert said in str(refusals.failed_parent("parent", reason))


def test_refusals_include_index_and_result_count() -> None:
    assert "continuation_index is 3" in str(refusals.fewer_results(SPEC, 2))
    assert "found 2 sequences" in str(refusals.fewer_results(SPEC, 2))
    assert "continuation_index is 3" in str(refusals.unknown_index(SPEC))
