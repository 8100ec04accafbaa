"""A seed fixes the workload of agents."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, median

import pytest

from benchmarks.agents.job_runner import follows
from benchmarks.agents.workload import (
    DEFAULT_TURNS,
    EXAMPLE_TOKENS,
    EXAMPLES,
    MAX_TOOL_S,
    MINI_CONTEXTS,
    WORKLOADS,
    Sizes,
    arrivals,
    heavy_tool,
    mixed_tool,
    plan,
    plan_jobs,
)

SIZES = Sizes(turns=8)


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(random.Random(1), 4.0, 2000.0))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times)]
    assert min(gaps) > 0 and times[-1] < 2000.0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    spread = fmean((gap - 0.25) ** 2 for gap in gaps) ** 0.5
    assert spread == pytest.approx(0.25, rel=0.05), "exponential: as far apart as long"
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.1353, abs=0.01)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_jobs_depend_only_on_the_seed(workload: str) -> None:
    jobs = plan(workload, SIZES, jps=2.0, duration=20.0, seed=7)
    assert jobs == plan(workload, SIZES, jps=2.0, duration=20.0, seed=7)
    assert jobs != plan(workload, SIZES, jps=2.0, duration=20.0, seed=8)
    assert [job.turns for job in plan_jobs(workload, SIZES, 3, 7)] == [job.turns for job in jobs[:3]]
    more = plan(workload, SIZES, jps=4.0, duration=20.0, seed=7)
    assert len(more) > len(jobs) and [job.turns for job in more[:3]] == [job.turns for job in jobs[:3]]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_job_has_planned_turns_and_no_tool_after_the_last(workload: str) -> None:
    for turns in (1, 3, DEFAULT_TURNS[workload]):
        for job in plan_jobs(workload, Sizes(turns=turns), 20, 0):
            fewest = turns - 3 if workload == "mixed" and turns > 4 else turns
            assert fewest <= len(job.turns) <= turns and job.turns[-1].tool_s == 0
            assert all(0 < turn.tool_s <= MAX_TOOL_S for turn in job.turns[:-1])
            assert all(turn.says for turn in job.turns)


def test_mini_matches_published_contexts_and_has_one_slow_tool() -> None:
    (job,) = plan_jobs("mini", Sizes(turns=10), 1, 0)
    tokens = [turn.prompt_tokens for turn in job.turns]
    assert tuple(tokens[:8]) == MINI_CONTEXTS
    assert tokens[9] - tokens[8] == pytest.approx(tokens[8] - tokens[7], abs=1)
    slow = [number for number, turn in enumerate(job.turns) if turn.tool_s > 0.3]
    assert slow == [4] and 2 <= job.turns[4].tool_s <= 5 and "pytest" in job.turns[4].command
    assert f"```bash\n{job.turns[4].command}\n```" in job.turns[4].says[-1].text


def test_time_and_token_scales_are_applied() -> None:
    (whole,), (small,) = (plan_jobs("mini", Sizes(turns=8, time=each, tokens=each), 1, 0) for each in (1.0, 0.1))
    for turn, scaled in zip(whole.turns, small.turns):
        assert scaled.tool_s == pytest.approx(turn.tool_s / 10)
        assert scaled.prompt_tokens == round(turn.prompt_tokens / 10)


def test_heavy_tool_times_are_long_tailed() -> None:
    rng = random.Random(3)
    drawn = [heavy_tool(rng)[1] for _ in range(20_000)]
    assert 0.45 < median(drawn) < 1.5
    assert sum(seconds > 100 for seconds in drawn) / len(drawn) == pytest.approx(0.12 * (30 / 100) ** 1.2, abs=0.01)
    assert max(drawn) == MAX_TOOL_S


def test_coding_jobs_grow_each_turn_and_some_drop_history() -> None:
    jobs = plan_jobs("coding", Sizes(turns=11), 300, 0)
    turns = [turn for job in jobs for turn in job.turns]
    assert all(1000 <= turn.new_tokens <= 2000 and 150 <= turn.max_tokens <= 450 for turn in turns)
    drops = [sum(turn.drops_history for turn in job.turns) for job in jobs]
    assert max(drops) == 1 and fmean(drops) == pytest.approx(0.1, abs=0.05)
    assert not any(job.turns[0].drops_history for job in jobs)
    assert all(job.system_tokens == 2000 for job in jobs)


def test_toy_jobs_alternate_tools_and_users() -> None:
    for job in plan_jobs("toy", SIZES, 20, 0):
        assert job.turns[0].says[0].role == "user"
        for turn, following in zip(job.turns, job.turns[1:]):
            assert following.says[0].role == ("tool" if turn.command else "user")


def test_mixed_tools_have_two_speeds_a_tail_and_a_liar() -> None:
    rng = random.Random(5)
    times: dict[str, list[float]] = {}
    for command, seconds in (mixed_tool(rng) for _ in range(4000)):
        times.setdefault(command, []).append(seconds)
    lying = times["cat log.txt"]
    assert sum(seconds > 1 for seconds in lying) / len(lying) == pytest.approx(0.25, abs=0.05)
    assert median(lying) == 0.1
    assert {len(job.turns) for job in plan_jobs("mixed", SIZES, 60, 0)} == {5, 6, 7, 8}


def test_mixed_jobs_quote_each_answer_and_end_without_a_call() -> None:
    for question, answer in pairwise(EXAMPLES):
        assert answer.role == "user" or question.text.endswith(f":\n{answer.text}"), "an example repeats the quote"
    jobs = plan_jobs("mixed", Sizes(turns=8, tokens=0.25), 40, 0)
    for job in jobs:
        assert (job.examples, job.example_tokens) == (EXAMPLES, EXAMPLE_TOKENS)
        assert [turn.prompt_tokens - EXAMPLE_TOKENS for turn in job.turns[:3]] == [23, 117, 203]
        assert [turn.command == "" for turn in job.turns] == [False] * (len(job.turns) - 1) + [True]
        assert all(follows(turn.says[0].text, turn.command) for turn in job.turns), "repeating the message is enough"
    firsts = {job.turns[0].says[0].text.partition("Say")[0] for job in jobs}
    assert len(firsts) == len(jobs), "jobs share the examples only"
