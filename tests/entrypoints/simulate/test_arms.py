from __future__ import annotations

from functools import cache

import msgspec
import pytest

from baton.entrypoints.simulate.arms import VARIANTS, Arm, all_arms, arm_named
from baton.entrypoints.simulate.runs import Plan, make_simulation
from baton.entrypoints.simulate.simulation import Simulation
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.policies.job_policies import MAX_PIN_S, Continuum
from tests.doubles.job_scene import finished, tools


def test_arm_names_are_policies_with_options() -> None:
    assert arm_named("fcfs") == Arm("fcfs", "", {}, pins=False, host=False)
    assert arm_named("lpm+pin+host") == Arm("lpm", "", {}, pins=True, host=True)
    assert "handoff+host" in all_arms(True) and not any(arm_named(name).host for name in all_arms(False))
    assert all_arms(True)[0] == "fcfs" and len(set(all_arms(True))) == len(all_arms(True))


def test_lmcache_like_is_fcfs_with_a_host_tier() -> None:
    assert arm_named("lmcache-like") == arm_named("fcfs+host")
    assert arm_named("lmcache-like+chat") == arm_named("fcfs+host+chat")


def test_arm_name_sets_the_pin_time() -> None:
    assert arm_named("continuum@0.5+host").settings == {"pin_time": "fixed", "pin_seconds": 0.5}
    assert arm_named("continuum@cdf").settings == {"pin_time": "cdf"}


def test_arm_name_sets_the_sender() -> None:
    senders = [arm_named(f"handoff{extra}").sender for extra in ("", "+chat", "+plain", "+bare")]
    assert senders == ["generate", "chat", "plain", "bare"]


@pytest.mark.parametrize("wrong", ["fcfs+chat+plain", "handoff+bare+plain", "lpm+host+chat+bare"])
def test_arm_with_two_senders_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"sent in one way only; keep one of \+"):
        arm_named(wrong)


def test_oracle_arm_is_a_handoff_variant() -> None:
    assert arm_named("oracle+host") == Arm("handoff", "oracle", {}, pins=False, host=True)


@pytest.mark.parametrize("wrong", ["best", "fcfs+", "fcfs+pins", "", "oracles@2"])
def test_unknown_arm_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not POLICY\[@TIME\].*handoff.*oracle"):
        arm_named(wrong)


@pytest.mark.parametrize("wrong", ["continuum@", "continuum@best", "continuum@-1", "continuum@inf", "continuum@nan"])
def test_invalid_pin_time_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"neither a number of seconds nor a rule among .*gittins"):
        arm_named(wrong)


READINGS = ("continuum", "continuum-always", "continuum-freeing", "continuum-always-freeing")


def test_readings_of_continuum_differ_in_slow_tools_and_in_finished_jobs() -> None:
    """``crawl`` takes 60 s on average, so the plain reading does not pin it."""
    known = tools(pin_seconds=3.0)
    for _ in range(40):
        known.times.record_duration((ToolCall("crawl"),), 60.0)
    made = [Continuum(known), *(VARIANTS[name].make(known, {}) for name in READINGS[1:])]
    assert [policy.ttl(finished("crawl"), 100.0) for policy in made] == [0.0, 3.0, 0.0, 3.0]
    assert [policy.ttl(finished("new"), 100.0) for policy in made] == [3.0] * 4
    assert [policy.retires_jobs for policy in made] == [False, False, True, True]
    assert {arm_named(name).policy for name in READINGS} == {"continuum"}


def test_continuum_always_heeds_the_time_of_its_arm() -> None:
    forever, ruled = tools(pin_seconds=1e9), tools(pin_time="cdf")
    for _ in range(40):
        ruled.times.record_duration((ToolCall("crawl"),), 60.0)
    make = VARIANTS["continuum-always"].make
    assert make(forever, {}).ttl(finished("new"), 100.0) == MAX_PIN_S
    assert make(ruled, {}).ttl(finished("crawl"), 100.0) == 0.0
    assert make(tools(provisional_s=0.7), {}).ttl(finished(read=False), 100.0) == 0.7


BUSY = Plan(arm="handoff", gpu="RTX6000", tools="heavy", pool=6000, rate=0.5, num_jobs=40, trim=0.0)


@cache
def played(arm: str, **changes: object) -> Simulation:
    """One that has ended, for tests that only look."""
    simulation = make_simulation(msgspec.structs.replace(BUSY, arm=arm, **changes))
    simulation.run()
    return simulation


def mean_service(simulation: Simulation) -> float:
    return sum(record.service for record in simulation.records) / len(simulation.records)


def test_oracle_pins_only_turns_returning_within_fill_time() -> None:
    simulation = played("oracle")
    scheduler = simulation.scheduler
    stats, t_fill = scheduler.stats(), scheduler._fill_time.seconds
    away = [turn.tool_s for record in simulation.records for turn in record.job.turns[:-1]]
    assert stats.leases_expired == 0, "it never waits in vain"
    soon = sum(seconds < t_fill / 2 for seconds in away), sum(seconds < 2 * t_fill for seconds in away)
    assert soon[0] <= stats.leases_granted <= soon[1] < len(away)
    assert stats.leases_handed_off > 0.9 * stats.leases_granted


def test_oracle_beats_handoff() -> None:
    assert mean_service(played("oracle")) < mean_service(played("handoff"))


def test_no_pins_arm_grants_no_leases() -> None:
    assert played("handoff-no-pins").scheduler.stats().leases_granted == 0
    assert played("handoff").scheduler.stats().leases_granted > 0


def test_each_ablation_changes_results_when_memory_is_short() -> None:
    """A part that is switched off changes what happens; by how much is for a study to say."""
    arms = ("handoff", "handoff-no-pins", "handoff-no-order", "handoff-no-retire")
    assert len({mean_service(played(arm)) for arm in arms}) == len(arms)


def test_each_reading_of_continuum_changes_results_when_memory_is_short() -> None:
    assert len({mean_service(played(arm)) for arm in READINGS}) == len(READINGS)


def test_oracle_rarely_pins_with_a_host_tier() -> None:
    """One that is back at once may come before its copy has been promised."""
    kept = [played(arm, host_gb=50.0).scheduler.stats().leases_handed_off for arm in ("oracle", "oracle+host")]
    assert kept[1] < kept[0] / 10
