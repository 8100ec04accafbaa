from __future__ import annotations

import pytest

from baton.entrypoints.simulate.arms.arm import Arm, all_arms, arm_named


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
