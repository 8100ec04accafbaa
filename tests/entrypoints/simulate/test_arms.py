from __future__ import annotations

import msgspec
import pytest

from baton.entrypoints.simulate.arms import Arm, all_arms, arm_named
from baton.entrypoints.simulate.runs import Plan, make_simulation
from baton.entrypoints.simulate.simulation import Simulation


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
    assert [arm_named(f"handoff{extra}").sender for extra in ("", "+chat", "+plain")] == ["generate", "chat", "plain"]


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


BUSY = Plan(arm="handoff", gpu="RTX6000", tools="heavy", pool=6000, rate=0.5, num_jobs=40, trim=0.0)


def played(arm: str, **changes: object) -> Simulation:
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


def test_oracle_rarely_pins_with_a_host_tier() -> None:
    """One that is back at once may come before its copy has been promised."""
    kept = [played(arm, host_gb=50.0).scheduler.stats().leases_handed_off for arm in ("oracle", "oracle+host")]
    assert kept[1] < kept[0] / 10
