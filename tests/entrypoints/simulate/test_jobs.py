"""Jobs: what their prompts hold, how they are made up from a seed, and what their tools take."""

from __future__ import annotations

import numpy as np
import pytest

from baton.entrypoints.simulate.work.job import EOS, ID_LIMIT, SYSTEM_IDS, Conversation, Job, Turn, numbered
from baton.entrypoints.simulate.work.tool_shapes import SHAPES
from baton.entrypoints.simulate.work.workloads import CONTEXTS, WORKLOADS, make_jobs, workload_named
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.speed import Speed, by_rules


def test_turn_prompt_extends_the_conversation() -> None:
    first, second = Turn(3, 4, 3, "ls", 1.0), Turn(9, 2, 1)
    (job,) = numbered([Job("a", 0.0, (first, second), 0, system=5)])
    talk = Conversation(job)
    prompt, said = talk.begin_turn(0)
    assert len(prompt) == first.prompt == 7 and said[-1] == EOS and len(said) == 3
    known = [*prompt.tolist(), *said[:-1]]
    after, said = talk.begin_turn(1)
    assert after.tolist()[:9] == known and len(after) == 11 and said == [EOS]
    assert len(set(after.tolist())) == 11 and first.known == 9


def test_jobs_share_only_their_system_prompt() -> None:
    turn = Turn(10, 20, 5)
    jobs = numbered([Job(name, 0.0, (turn,), 0, system) for name, system in (("a", 1), ("b", 1), ("c", 2))])
    a, b, c = (set(Conversation(job).begin_turn(0)[0].tolist()) for job in jobs)
    assert len(a & b) == 10 and not a & c and not b & c


def test_compacted_turn_keeps_only_its_declared_prefix() -> None:
    (job,) = numbered([Job("a", 0.0, (Turn(4, 10, 5), Turn(4, 6, 5)), 0)])
    talk = Conversation(job)
    before, _ = talk.begin_turn(0)
    after, _ = talk.begin_turn(1)
    assert after[:4].tolist() == before[:4].tolist()
    assert not {*after[4:].tolist()} & {*talk.ids[:0].tolist(), *before.tolist()}


def test_token_ids_wrap_around_at_the_limit() -> None:
    long = Turn(0, (ID_LIMIT - SYSTEM_IDS) // 2 + 1, 1)
    jobs = numbered([Job(str(number), 0.0, (long,), 0) for number in range(2)])
    assert [job.first_id for job in jobs] == [SYSTEM_IDS, SYSTEM_IDS]


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_gives_equal_jobs_at_any_rate(name: str) -> None:
    slow, fast = (make_jobs(WORKLOADS[name], SHAPES["heavy"], rate=rate, count=20, seed=3) for rate in (0.5, 2.0))
    assert [job.turns for job in slow] == [job.turns for job in fast]
    assert [job.arrival for job in slow] == pytest.approx([4 * job.arrival for job in fast])
    other = make_jobs(WORKLOADS[name], SHAPES["heavy"], rate=2.0, count=20, seed=4)
    assert [job.turns for job in other] != [job.turns for job in fast]


def test_one_shot_share_of_jobs_has_one_turn() -> None:
    options = {"rate": 1.0, "count": 400, "seed": 1}
    every, mixed = (make_jobs(WORKLOADS["chats"], SHAPES["people"], one_shots=share, **options) for share in (0.0, 0.4))
    short = [job for job in mixed if len(job.turns) == 1]
    assert 120 < len(short) < 200 and all(300 <= job.turns[0].new <= 900 for job in short)
    assert [job.arrival for job in mixed] == [job.arrival for job in every]
    left = [(job.turns, same.turns) for job, same in zip(mixed, every) if len(job.turns) > 1]
    assert all(turns == same for turns, same in left) and {len(turns) for turns, _ in left} == {5, 6, 7, 8}
    assert {turn.tool for turns, _ in left for turn in turns[:-1]} == {""}


def test_context_lengths_match_the_published_trace() -> None:
    jobs = make_jobs(WORKLOADS["agents"], SHAPES["shell"], rate=1.0, count=400, seed=0)
    means = np.mean([[turn.prompt for turn in job.turns] for job in jobs], axis=0)
    assert means == pytest.approx(CONTEXTS, rel=0.03)
    assert np.diff([job.arrival for job in jobs]).mean() == pytest.approx(1.0, rel=0.15)


def test_turns_keep_at_most_the_known_tokens() -> None:
    for name in WORKLOADS:
        jobs = make_jobs(WORKLOADS[name], SHAPES["heavy"], rate=1.0, count=60, seed=1)
        low, high = WORKLOADS[name].turns
        for job in jobs:
            assert low <= len(job.turns) <= high
            assert job.turns[-1].tool is None and all(turn.tool for turn in job.turns[:-1])
            assert all(now.kept <= before.known for before, now in zip(job.turns, job.turns[1:]))
        shorter = sum(any(now.kept < before.known for before, now in zip(j.turns, j.turns[1:])) for j in jobs)
        assert (shorter > 0) == (WORKLOADS[name].compacted > 0) and shorter < 20


def test_scaling_lengthens_prompts_but_not_outputs() -> None:
    plain, scaled = workload_named("coding-11"), workload_named("coding-11", 2.0)
    assert scaled.system == (2 * plain.system[0], 2 * plain.system[1]) and scaled.output == plain.output
    assert scaled.new[1] == (2 * plain.new[1][0], 2 * plain.new[1][1])
    with pytest.raises(ValueError, match="system prompt"):
        workload_named("coding-40", 20.0)


def test_shell_tool_times() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        calls = SHAPES["shell"].draw_job(7, rng)
        slow = [seconds for tool, seconds in calls if tool == "pytest"]
        assert len(calls) == 7 and len(slow) == 1 and 2.0 <= slow[0] <= 5.0
        assert all(0.05 <= seconds <= 0.2 for tool, seconds in calls if tool != "pytest")
    assert SHAPES["shell"].draw_job(0, rng) == []


def times_of(shape: str, tool: str, progress: float) -> np.ndarray:
    """float64 [n]: seconds of this tool's calls at one time of a run."""
    calls = SHAPES[shape].draw_job(5000, np.random.default_rng(1), progress)
    return np.array([seconds for name, seconds in calls if name == tool])


def test_drifting_tools_change_during_a_run() -> None:
    build, query, ls = (
        [np.median(times_of("drifting", tool, at)) for at in (0.0, 0.5, 1.0)] for tool in ("build", "query", "ls")
    )
    assert build == pytest.approx([0.6, 0.6 * 30**0.5, 18.0], rel=0.1)
    assert query == pytest.approx([18.0, 18 / 30**0.5, 0.6], rel=0.1)
    assert ls == pytest.approx([0.125] * 3, rel=0.1)


def test_drift_of_generated_jobs_follows_their_number() -> None:
    jobs = make_jobs(WORKLOADS["agents"], SHAPES["drifting"], rate=1.0, count=400, seed=0)
    early, late = (
        np.median([turn.tool_s for job in part for turn in job.turns if turn.tool == "build"])
        for part in (jobs[:40], jobs[-40:])
    )
    assert early < 1.0 and late > 12.0


def test_lying_tools_are_not_what_they_seem() -> None:
    fetch, grep = times_of("lying", "fetch", 0.0), times_of("lying", "grep", 0.0)
    assert np.median(fetch) == pytest.approx(1.0, rel=0.1) and 0.05 <= (fetch > 200).mean() <= 0.12
    assert grep.min() > 5.0 and by_rules((ToolCall("grep", "grep"),)) is Speed.FAST


def test_heavy_tool_times_have_a_long_tail() -> None:
    calls = SHAPES["heavy"].draw_job(20_000, np.random.default_rng(0))
    seconds = np.array([seconds for _, seconds in calls])
    assert 0.10 <= (seconds >= 100).mean() <= 0.13 and seconds.max() <= 900
    fast = seconds[seconds < 3]
    assert 0.62 <= len(fast) / len(seconds) <= 0.70 and np.median(fast) == pytest.approx(0.4, rel=0.1)
    slow = [s for tool, s in calls if tool == "pytest"]
    assert np.median(slow) == pytest.approx(8.0, rel=0.1)
