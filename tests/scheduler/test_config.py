"""The settings of the scheduler bring what the command line says of them."""

from __future__ import annotations

import dataclasses

from baton.scheduler.config import SchedulerConfig, flag
from baton.scheduler.policies.registry import POLICIES


def test_flag_metadata_has_help_and_choices() -> None:
    made = flag(3, "how many", ["a", "b"])
    assert made.default == 3 and dict(made.metadata) == {"help": "how many", "choices": ("a", "b")}
    assert flag(3, "how many").metadata["choices"] == ()


def test_every_scheduler_flag_has_help_and_policy_choices() -> None:
    fields = {field.name: field for field in dataclasses.fields(SchedulerConfig)}
    assert all(field.metadata["help"] for field in fields.values())
    assert fields["schedule_policy"].metadata["choices"] == tuple(POLICIES)


def test_num_rows_covers_running_and_leased_sequences() -> None:
    assert SchedulerConfig(max_running_requests=5, max_leased_requests=3).num_rows == 8


def test_speculation_raises_max_sampled_tokens() -> None:
    assert SchedulerConfig(max_running_requests=5, disable_jump_forward=True).max_sampled_tokens == 5
    assert SchedulerConfig(max_running_requests=5).max_sampled_tokens == 64, "forced tokens are drafts"
    assert SchedulerConfig(max_running_requests=5, speculative_algorithm="NGRAM").max_sampled_tokens == 64
    assert SchedulerConfig(max_running_requests=100, speculative_algorithm="NGRAM").max_sampled_tokens == 100
    small = SchedulerConfig(max_running_requests=5, speculative_algorithm="NGRAM", chunked_prefill_size=16)
    assert small.max_sampled_tokens == 16
