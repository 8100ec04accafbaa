"""The check that pins hold."""

from __future__ import annotations

import re

import pytest

from benchmarks.agents.job_runner import TurnResult
from benchmarks.agents.verify_pin import Look, Step, hints, parse_arguments, problems

COST = TurnResult(ttft=0.1, latency=0.2, prompt_tokens=10, output_tokens=5, cached_tokens=0)
NOTHING = Look(0.0, 0.0)


def steps(*looks: list[Look]) -> list[Step]:
    return [
        Step(job=1, turn=number, is_last=number == len(looks), cost=COST, tools=None, looks=tuple(each))
        for number, each in enumerate(looks, 1)
    ]


def at(usage: float, leased: float | None = None) -> Look:
    return Look(usage, 1000 * usage if leased is None else leased)


GOOD = [[at(0.1)] * 3, [at(0.2)] * 3, [NOTHING]]
BAD = {
    "before job 1": (at(0.1), GOOD),
    "turn 2: .* usage did not rise": (NOTHING, [GOOD[0], [at(0.1, 200)] * 3, GOOD[2]]),
    "turn 1: .* usage did not rise": (NOTHING, [[at(0.0, 100)] * 3, *GOOD[1:]]),
    "turn 2: .* no more tokens are leased": (NOTHING, [GOOD[0], [at(0.2, 100)] * 3, GOOD[2]]),
    "turn 1: usage 0.000000 .* at look 3": (NOTHING, [[at(0.1), at(0.1), NOTHING], *GOOD[1:]]),
    "turn 2: usage 0.200000 and 199 tokens leased at look 2": (
        NOTHING,
        [GOOD[0], [at(0.2), at(0.2, 199), at(0.2)], GOOD[2]],
    ),
    "turn 3: usage 0.200000 .* after the last step": (NOTHING, [*GOOD[:2], [at(0.2)]]),
    "turn 3: usage 0.000000 and 1 tokens leased after the last step": (NOTHING, [*GOOD[:2], [at(0.0, 1)]]),
}


def test_held_pins_report_no_problem() -> None:
    assert problems(NOTHING, steps(*GOOD)) == []


def test_server_without_lease_gauge_is_judged_by_kv_usage() -> None:
    looks = [[Look(0.1, None)] * 2, [Look(0.2, None)] * 2, [Look(0.0, None)]]
    assert problems(Look(0.0, None), steps(*looks)) == []
    looks[0][1] = Look(0.05, None)
    assert len(problems(Look(0.0, None), steps(*looks))) == 1


@pytest.mark.parametrize("words", BAD)
def test_broken_pins_are_reported(words: str) -> None:
    start, looks = BAD[words]
    found = problems(start, steps(*looks))
    assert re.search(words, "\n".join(found)), found


def test_gap_too_short_for_two_looks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--url", "x", "--gap", "1.2"])
    assert "--gap is 1.2" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "said"), [("--jobs", "--jobs is 0; use 1"), ("--turns", "--turns is 0; use 2")])
def test_zero_jobs_or_turns_are_refused(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--url", "x", flag, "0"])
    assert said in capsys.readouterr().err


def test_hints_explain_servers_that_do_not_pin() -> None:
    assert "policy is fcfs, which pins nothing" in hints({"schedule_policy": "fcfs"})[0]
    assert "has a host cache" in hints({"schedule_policy": "handoff", "host_cache_gb": 1.0})[0]
    assert hints({"schedule_policy": "handoff", "host_cache_gb": 0.0}) == hints({}) == []
