from __future__ import annotations

import msgspec
import pytest

from baton.entrypoints.simulate.arms import Arm, all_arms, arm_named
from baton.entrypoints.simulate.runs import Plan, make_simulation
from baton.entrypoints.simulate.simulation import Simulation


def test_arms_are_policies_with_extras() -> None:
    assert arm_named("fcfs") == Arm("fcfs", "", {}, pins=False, host=False)
    assert arm_named("lpm+pin+host") == Arm("lpm", "", {}, pins=True, host=True)
    assert "handoff+host" in all_arms(True) and not any(arm_named(name).host for name in all_arms(False))
    assert all_arms(True)[0] == "fcfs" and len(set(all_arms(True))) == len(all_arms(True))


def test_lmcache_like_is_fcfs_with_a_host_tier() -> None:
    assert arm_named("lmcache-like") == arm_named("fcfs+host")
    assert arm_named("lmcache-like+chat") == arm_named("fcfs+host+chat")


def test_an_arm_says_how_the_time_of_pins_is_chosen() -> None:
    assert arm_named("continuum@0.5+host").settings == {"pin_time": "fixed", "pin_seconds": 0.5}
    assert arm_named("continuum@cdf").settings == {"pin_time": "cdf"}


def test_an_arm_says_how_turns_are_sent() -> None:
    assert [arm_named(f"handoff{extra}").sender for extra in ("", "+chat", "+plain")] == ["generate", "chat", "plain"]


def test_a_variant_is_a_handoff() -> None:
    assert arm_named("oracle+host") == Arm("handoff", "oracle", {}, pins=False, host=True)


@pytest.mark.parametrize("wrong", ["best", "fcfs+", "fcfs+pins", "", "oracles@2"])
def test_what_is_no_policy_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not POLICY\[@TIME\].*handoff.*oracle"):
        arm_named(wrong)


@pytest.mark.parametrize("wrong", ["continuum@", "continuum@best", "continuum@-1", "continuum@inf", "continuum@nan"])
def test_what_is_no_time_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"neither a number of seconds nor a rule among .*gittins"):
        arm_named(wrong)


BUSY = Plan(arm="handoff", gpu="RTX6000", tools="heavy", pool=6000, rate=0.5, num_jobs=40, trim=0.0)


def played(arm: str, **changes: object) -> Simulation:
    simulation = make_simulation(msgspec.structs.replace(BUSY, arm=arm, **changes))
    simulation.run()
    return simulation


def mean_service(simulation: Simulation) -> float:
    return sum(record.service for record in simulation.records) / len(simulation.records)


def test_an_oracle_pins_what_comes_back_within_t_fill_and_nothing_else() -> None:
    simulation = played("oracle")
    scheduler = simulation.scheduler
    stats, t_fill = scheduler.stats(), scheduler._fill_time.seconds
    away = [turn.tool_s for record in simulation.records for turn in record.job.turns[:-1]]
    assert stats.leases_expired == 0, "it never waits in vain"
    soon = sum(seconds < t_fill / 2 for seconds in away), sum(seconds < 2 * t_fill for seconds in away)
    assert soon[0] <= stats.leases_granted <= soon[1] < len(away)
    assert stats.leases_handed_off > 0.9 * stats.leases_granted


def test_an_oracle_is_better_than_what_must_guess() -> None:
    assert mean_service(played("oracle")) < mean_service(played("handoff"))


def test_without_pins_nothing_is_leased() -> None:
    assert played("handoff-no-pins").scheduler.stats().leases_granted == 0
    assert played("handoff").scheduler.stats().leases_granted > 0


def test_each_part_matters_where_memory_is_short() -> None:
    """A part that is switched off changes what happens; by how much is for a study to say."""
    arms = ("handoff", "handoff-no-pins", "handoff-no-order", "handoff-no-retire")
    assert len({mean_service(played(arm)) for arm in arms}) == len(arms)


def test_an_oracle_needs_no_pin_where_the_host_has_a_copy() -> None:
    """One that is back at once may come before its copy has been promised."""
    kept = [played(arm, host_gb=50.0).scheduler.stats().leases_handed_off for arm in ("oracle", "oracle+host")]
    assert kept[1] < kept[0] / 10
