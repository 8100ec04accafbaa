"""The owner of tool times: what it answers with no, few and many durations, and how what it knows is renewed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.history import MAX_TOOLS, PRIOR_EVERY
from baton.scheduler.jobs.posterior import LogNormal
from baton.scheduler.jobs.speed import Speed
from baton.scheduler.jobs.tool_time import ENOUGH, PSEUDO, ToolTimes
from baton.scheduler.jobs.ttl import Durations, gittins_ttl

LS, MAKE, RUN, OTHER = ((ToolCall(name, f"{name} x"),) for name in ("ls", "make", "run", "other"))


def seen(*observed: tuple[tuple[ToolCall, ...], float], times: int = 1) -> ToolTimes:
    tool_times = ToolTimes()
    for _ in range(times):
        for calls, seconds in observed:
            tool_times.observe(calls, seconds)
    return tool_times


def test_with_no_history_at_all_the_default_holds() -> None:
    times = ToolTimes()
    assert times.fixed_ttl(RUN) == times.cdf_ttl(RUN, 5.0) == times.gittins_ttl(RUN, 9.0) == 2.0
    assert times.posterior_ttl(RUN, 0.9) == 2.0 and times.gittins_ttl(RUN, 9.0, default_s=3.0) == 3.0
    assert times.predicted_s(RUN) is None and len(times.samples(RUN)) == 0
    assert times.speed(RUN) is Speed.UNCERTAIN and times.gittins_rate(RUN, 1.0) > 0.0


def test_what_is_known() -> None:
    times = seen((RUN, 3.0), (RUN, 1.0), (RUN, 1.5))
    assert times.samples(RUN).tolist() == [1.0, 1.5, 3.0] and times.predicted_s(RUN) == 1.5
    with pytest.raises(ValueError, match="read-only"):
        times.samples(RUN)[0] = 0.0


def test_fixed_rule_goes_by_the_mean() -> None:
    times = seen((RUN, 0.1), (RUN, 0.1), (RUN, 8.0))
    assert times.fixed_ttl(RUN) == 0.0 and times.fixed_ttl(RUN, threshold_s=3.0) == 3.0
    assert times.fixed_ttl(OTHER) == 2.0  # never seen


@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_little_longer_than_ever_is_still_waited_for(count: int) -> None:
    times = seen((RUN, 5.0), times=count)
    assert 5.1 < times.gittins_ttl(RUN, 9.0) < 30.0 and times.gittins_rate(RUN, 5.05) > 1.0 / 9.0
    assert times.gittins_ttl(RUN, 9.0) == times.cdf_ttl(RUN, 9.0) and times.cdf_ttl(RUN, 9.0, price=50.0) == 0.0
    assert times.gittins_rate(RUN, 1e6) == 0.0  # but not for ever


def test_zero_seconds_are_a_duration() -> None:
    times = seen((RUN, 0.0), times=20)
    assert times.predicted_s(RUN) == 0.0 and 0.0 < times.gittins_ttl(RUN, 9.0) < 0.01
    assert times.posterior_ttl(RUN, 0.9) < 0.01


def test_with_many_samples_they_decide() -> None:
    samples = np.random.default_rng(0).exponential(0.3, 256) + 0.1 * (np.arange(256) % 3 > 0) * 300.0
    times = ToolTimes()
    for seconds in samples:
        times.observe(RUN, float(seconds))
    expected = gittins_ttl(Durations.of(samples), 9.0)
    assert expected < 3.0 and times.gittins_ttl(RUN, 9.0) == pytest.approx(expected, rel=0.2)


def test_a_tool_never_seen_is_like_all_others() -> None:
    quick, slow = seen((RUN, 0.2), times=100), seen((RUN, 200.0), times=100)
    assert 0.2 < quick.gittins_ttl(OTHER, 9.0) < 2.0 and slow.gittins_ttl(OTHER, 9.0) == 0.0
    assert quick.posterior_ttl(OTHER, 0.5) == pytest.approx(0.2, rel=0.1)
    assert quick.predicted_s(OTHER) is None and quick.speed(OTHER) is Speed.UNCERTAIN


def test_somebody_who_answers_without_a_tool_is_kept_apart() -> None:
    times = seen(((), 60.0), (LS, 0.1), times=30)
    assert times.predicted_s(()) == 60.0 and times.speed(()) is Speed.SLOW
    assert times.gittins_ttl((), 9.0) == 0.0 < times.gittins_ttl(LS, 9.0)


def test_calls_never_seen_together_are_as_slow_as_the_slowest() -> None:
    times = seen((LS, 0.1), (RUN, 20.0), times=30)
    assert times.predicted_s(LS + RUN) == times.predicted_s(RUN + LS) == 20.0
    assert times.predicted_s(LS + OTHER) is None
    times.observe(LS + RUN, 7.0)
    assert times.predicted_s(RUN + LS) == 7.0


def gain(law: Durations, ttl: float, benefit_s: float) -> float:
    longer, occupied = law.at_age(ttl)
    return (1.0 - longer) * benefit_s - occupied


def test_few_samples_mislead_less_than_they_would_alone() -> None:
    """Lost gain against the best TTL of the true law, for tools of several kinds, from one to eight samples."""
    rng = np.random.default_rng(4)
    laws = {
        "list": lambda n: 0.1 * np.exp(rng.normal(0.0, 0.3, n)),
        "test": lambda n: rng.uniform(2.0, 5.0, n),
        "build": lambda n: 8.0 * np.exp(rng.normal(0.0, 0.8, n)),
        "wait": lambda n: 60.0 * np.exp(rng.normal(0.0, 1.2, n)),
    }
    past = [(name, float(seconds)) for name, law in laws.items() for seconds in law(60)]
    t_fill, lost, lost_alone = 9.0, 0.0, 0.0
    for law in laws.values():
        true = Durations.of(law(10_000))
        best = gain(true, gittins_ttl(true, t_fill), t_fill)
        for count in (1, 2, 4, 8):
            samples = law(count)
            times = seen(*(((ToolCall(name),), seconds) for name, seconds in past))
            for seconds in samples:
                times.observe(RUN, float(seconds))
            lost += best - gain(true, times.gittins_ttl(RUN, t_fill), t_fill)
            lost_alone += best - gain(true, gittins_ttl(Durations.of(samples), t_fill), t_fill)
    assert 0.0 <= lost < lost_alone / 2.0


def test_mixture_weighs_as_described() -> None:
    times = seen((RUN, 4.0), times=3)
    known = times._know(RUN)
    posterior = LogNormal.prior(np.full(3, 4.0)).after(np.full(3, 4.0))
    assert known.posterior == posterior
    below = known.durations.at_age(0.999 * 4.0)[0] - known.durations.at_age(4.0)[0]
    assert below == pytest.approx(3.0 / (3.0 + PSEUDO), abs=PSEUDO / 32.0 / 5.0)


def test_estimates_follow_new_durations_and_the_prior() -> None:
    times = seen((RUN, 1.0), times=PRIOR_EVERY)
    before = times._know(RUN), times._know(OTHER)
    assert times._know(RUN) is before[0]  # kept while nothing changes
    times.observe(LS, 0.1)
    assert times._know(RUN) is before[0] and times._know(OTHER) is before[1]
    times.observe(RUN, 1.1)
    assert len(times._know(RUN).samples) == PRIOR_EVERY + 1 and times._know(OTHER) is before[1]
    for _ in range(PRIOR_EVERY):
        times.observe(LS, 50.0)
    assert times.posterior_ttl(OTHER, 0.5) > 1.5 > before[1].posterior.quantile(0.5)


def test_what_is_worked_out_is_bounded_too() -> None:
    times = ToolTimes()
    for number in range(3 * MAX_TOOLS):
        call = (ToolCall(f"tool{number}"),)
        times.gittins_ttl(call, 9.0)
        times.observe(call, 1.0)
        times.gittins_ttl(call, 9.0)
    assert len(times._known) <= MAX_TOOLS + 1


def test_draws_come_from_the_rng_alone() -> None:
    times = seen((RUN, 4.0), (RUN, 5.0))
    first, second = (np.random.default_rng(seed) for seed in (1, 1))
    draws = [times.draw_s(RUN, first) for _ in range(50)]
    assert draws == [times.draw_s(RUN, second) for _ in range(50)] and len(set(draws)) == 50
    assert math.log(4.5) == pytest.approx(np.mean(np.log(draws)), abs=0.5)


def test_rules_speak_until_durations_say_more() -> None:
    times = seen((MAKE, 0.3), times=ENOUGH - 1)
    assert times.speed(MAKE) is Speed.SLOW
    times.observe(MAKE, 0.3)
    assert times.speed(MAKE) is Speed.FAST
    clone = (ToolCall("git", "git clone x"),)
    assert seen(((ToolCall("git", "git status"),), 0.1), times=99).speed(clone) is Speed.SLOW  # says more than "git"


def test_durations_speak_where_no_rule_does() -> None:
    assert seen((RUN, 0.1), times=5).speed(RUN) is Speed.FAST
    assert seen((RUN, 90.0), times=5).speed(RUN) is Speed.SLOW
    assert seen((RUN, 5.0), times=99).speed(RUN) is Speed.UNCERTAIN  # neither fast nor slow, however sure
    assert seen((RUN, 0.1), (RUN, 90.0), times=20).speed(RUN) is Speed.UNCERTAIN
    assert seen((MAKE, 0.1), (MAKE, 90.0), times=20).speed(MAKE) is Speed.SLOW  # unclear durations leave it to the rule


def test_save_and_load() -> None:
    times = seen((RUN, 1.0), (LS, 0.25), times=10)
    loaded = seen((RUN, 99.0))
    loaded.gittins_ttl(RUN, 9.0)
    loaded.load(times.save())
    assert loaded.save() == times.save() and b"x" not in times.save()  # no commands where nothing learns from them
    for calls in (RUN, LS, OTHER):
        assert loaded.gittins_ttl(calls, 9.0) == times.gittins_ttl(calls, 9.0)
    before = loaded.save()
    with pytest.raises(ValueError, match="no tool history"):
        loaded.load(b'{"version": 1}')
    assert loaded.save() == before


def test_the_model_refines_what_is_uncertain() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra [learned]")
    times = ToolTimes(learned=True)
    full, check = (ToolCall("run", "run --full"),), (ToolCall("run", "run --check"),)
    assert times.speed(full) is Speed.UNCERTAIN
    for _ in range(150):
        times.observe(full, 90.0)
        times.observe(check, 0.1)
    assert (times.speed(full), times.speed(check)) == (Speed.SLOW, Speed.FAST)
    assert ToolTimes().speed(full) is Speed.UNCERTAIN
    loaded = ToolTimes(learned=True)
    loaded.load(times.save())
    assert (loaded.speed(full), loaded.speed(check)) == (Speed.SLOW, Speed.FAST) and loaded.save() == times.save()
