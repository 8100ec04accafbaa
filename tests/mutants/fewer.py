"""A pytest plugin for mutation runs: of tests that take many times as long as others, a few seeds and pages only.

Every mutant that survives pays for all tests that reach it.
"""

from __future__ import annotations

import re

import pytest

KEPT = {
    "tests/radix/eviction/test_order.py::test_100_000_leaves_go_in_order": "",
    "tests/radix/test_lease.py::test_leased_tokens_count_shared_pages_once_whatever_happens": "16|64",
    "tests/radix/test_lease_order.py::test_expiry_and_breaking_equal_a_look_at_all_leases": "0-.*",
    "tests/scheduler/beam/test_batches.py::test_abort_at_every_step_frees_everything": "plain-64|overlapped-16",
    "tests/scheduler/beam/test_batches.py::test_retraction_keeps_what_a_search_knows": "plain-16|overlapped-16",
    "tests/scheduler/beam/test_search.py::test_a_search_finds_what_its_tokens_alone_give": ".*-16",
    "tests/scheduler/continuation/test_continuations.py::test_chain_of_50_stages": "64-2",
    "tests/scheduler/continuation/test_continuations.py::test_fork_now_of_a_waiting_prefilling_or_running_parent": (
        ".-16-.*"
    ),
    "tests/scheduler/continuation/test_continuations.py::test_handoff_after_everything_evictable_is_gone": ".*-16-1",
    "tests/scheduler/continuation/test_failures.py::test_abort_of_parent_or_child_at_every_point": ".*-16-1",
    "tests/scheduler/continuation/test_failures.py::test_parents_and_children_are_retracted_and_say_the_same": "64-1",
    "tests/scheduler/continuation/test_leases.py"
    "::test_a_claim_that_breaks_before_its_child_is_admitted_is_reported_as_a_match": "1-1",
    (
        "tests/scheduler/memory/test_nonfinite_guard.py::test_a_prompt_ends_with_500_and_leaves_only_what_comes_before"
    ): ".*-16",
    "tests/scheduler/memory/test_nonfinite_guard.py::test_of_many_requests_exactly_the_spoiled_ones_fail": "0",
    "tests/scheduler/memory/test_shared_prefixes.py::test_the_answers_are_those_of_comparing_everything": "1-16|3-1",
    "tests/scheduler/test_fairness.py::TestDecodeShare"
    "::test_prompts_without_end_leave_running_requests_their_share": "1-1|2-8",
    "tests/scheduler/test_mixed_steps.py::TestMemory::test_every_single_failed_allocation_is_survived": "",
    "tests/scheduler/test_mixed_steps.py::TestMemory::test_retraction_changes_no_output": "plain-1|overlapped-64",
    "tests/scheduler/test_ranks.py::test_two_schedulers_on_one_message_log": "16-overlapped",
    "tests/scheduler/test_scheduler.py::test_every_single_failed_allocation_is_survived": "",
    "tests/scheduler/test_scheduler.py::test_output_is_the_models": "5-16-1|64-.*|1000-.*-2",
    "tests/scheduler/test_scheduler.py::test_retraction_changes_no_output": "16-2",
    "tests/scheduler/test_simulation.py::test_a_copy_of_a_copy_that_is_not_made_yet": "",
    "tests/scheduler/test_simulation.py::test_simulation": "0-64-overlapped|1-1-plain",
    "tests/scheduler/test_simulation.py::test_simulation_of_mixed_steps": "16-plain-faults|64-overlapped-faults",
    "tests/scheduler/test_simulation.py::test_simulation_of_steps_that_fail": "1-16-.*",
    "tests/scheduler/test_simulation.py::test_simulation_takes_every_path": "",
    "tests/scheduler/test_simulation.py::test_simulation_without_radix_cache": "1",
}
"""By the name of a test: which of its parameters stay (a regular expression for all that is between the brackets);
nothing, if the test is left out."""


def is_kept(test: str) -> bool:
    """test: its name, parameters in brackets. True too for tests of which nothing is said here."""
    name, _, parameters = test.partition("[")
    return name not in KEPT or bool(KEPT[name] and re.fullmatch(KEPT[name], parameters.removesuffix("]")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = [item for item in items if not is_kept(item.nodeid)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if is_kept(item.nodeid)]
