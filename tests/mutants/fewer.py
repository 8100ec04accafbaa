"""A pytest plugin for mutation runs: of tests that take many times as long as others, a few seeds and pages only.

Every mutant that survives pays for all tests that reach it.
"""

from __future__ import annotations

import re

import pytest

KEPT = {
    "tests/radix/eviction/test_order.py::test_100_000_leaves_are_popped_in_order": "",
    "tests/radix/test_lease.py::test_leased_tokens_count_shared_pages_once": "16|64",
    "tests/radix/test_lease_order.py::test_expiry_and_break_order_equal_full_scan": "0-.*",
    "tests/scheduler/beam/test_batches.py::test_abort_at_every_step_frees_everything": "plain-64|overlapped-16",
    "tests/scheduler/beam/test_batches.py::test_retracted_search_resumes_with_same_results": "plain-16|overlapped-16",
    "tests/scheduler/beam/test_search.py::test_search_matches_reference_from_tokens_alone": ".*-16",
    "tests/scheduler/continuation/test_continuations.py::test_chain_of_50_stages": "64-2",
    "tests/scheduler/continuation/test_continuations.py::test_fork_now_of_a_waiting_prefilling_or_running_parent": (
        ".-16-.*"
    ),
    "tests/scheduler/continuation/test_continuations.py::test_handoff_survives_eviction_of_everything_else": ".*-16-1",
    "tests/scheduler/continuation/test_failures.py::test_abort_of_parent_or_child_at_any_step_leaks_nothing": ".*-16-1",
    "tests/scheduler/continuation/test_failures.py::test_retraction_of_parents_and_children_changes_no_output": "64-1",
    "tests/scheduler/continuation/test_leases.py::test_lease_broken_before_child_admission_is_no_handoff": "1-1",
    (
        "tests/scheduler/memory/test_nonfinite_guard.py::test_nonfinite_prompt_fails_with_500_and_keeps_sound_prefix"
    ): ".*-16",
    "tests/scheduler/memory/test_nonfinite_guard.py::test_exactly_the_nonfinite_requests_fail": "0",
    "tests/scheduler/memory/test_shared_prefixes.py::test_will_be_cached_matches_full_comparison": "1-16|3-1",
    "tests/scheduler/test_fairness.py::TestDecodeShare::test_endless_prompts_do_not_starve_decodes": "1-1|2-8",
    "tests/scheduler/test_mixed_steps.py::TestMemory::test_any_single_allocation_failure_is_survived": "",
    "tests/scheduler/test_mixed_steps.py::TestMemory::test_retraction_changes_no_output": "plain-1|overlapped-64",
    "tests/scheduler/test_ranks.py::test_two_schedulers_with_same_calls_decide_the_same": "16-overlapped",
    "tests/scheduler/test_scheduler.py::test_any_single_allocation_failure_is_survived": "",
    "tests/scheduler/test_scheduler.py::test_output_matches_the_model": "5-16-1|64-.*|1000-.*-2",
    "tests/scheduler/test_scheduler.py::test_retraction_changes_no_output": "16-2",
    "tests/scheduler/test_simulation.py::test_lease_is_copied_while_its_own_copies_are_pending": "",
    "tests/scheduler/test_simulation.py::test_simulation": "0-64-overlapped|1-1-plain",
    "tests/scheduler/test_simulation.py::test_simulation_of_mixed_steps": "16-plain-faults|64-overlapped-faults",
    "tests/scheduler/test_simulation.py::test_simulation_of_failing_steps": "1-16-.*",
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
