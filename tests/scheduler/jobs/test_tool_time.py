"""Estimates of the times of tools: bounded, saved and loaded, and the times to live that follow from them."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from baton.scheduler.jobs.calls import ToolCall, name_of
from baton.scheduler.jobs.history import MAX_TOOLS, OF_ALL, PER_TOOL, ToolHistory
from baton.scheduler.jobs.speed import Speed, by_rules
from baton.scheduler.jobs.tool_time import (
    BELIEF_WORTH,
    ENOUGH,
    LogNormalBelief,
    ToolTimes,
    best_ttl,
    longest_stay,
    student_t_quantile,
)


def call(command: str) -> tuple[ToolCall, ...]:
    return (ToolCall(command.split()[0], command),)


def times(**durations: list[float]) -> ToolTimes:
    found = ToolTimes()
    for tool, each in durations.items():
        for seconds in each:
            found.record_duration((ToolCall(tool),), seconds)
    return found


def test_names() -> None:
    assert name_of(()) == ""
    assert name_of((ToolCall("b", "b x"), ToolCall("a"), ToolCall("b"))) == "a+b"
    assert len(name_of(tuple(ToolCall(f"t{n}") for n in range(1000))).split("+")) == 8


def test_tool_history_is_bounded() -> None:
    history, rng = ToolHistory(), random.Random(1)
    for number in range(20_000):
        history.add_duration(f"tool{rng.randrange(3000)}", float(number))
    for _ in range(1000):
        history.add_duration("one", 1.0)
    assert len(history) == MAX_TOOLS == len(history.added) - 1
    assert len(history.durations_of("one")) == PER_TOOL and len(history.all_durations()) == OF_ALL
    assert (np.diff(history.all_durations()) >= 0).all()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_invalid_durations_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="a tool took"):
        ToolHistory().add_duration("ls", seconds)


def test_tool_times_survive_save_and_load() -> None:
    saved = times(ls=[0.1, 0.2], make=[30.0])
    loaded = ToolTimes()
    loaded.load(saved.save())
    assert loaded.history.durations_of("ls").tolist() == [0.1, 0.2] and loaded.history.all_durations().tolist() == [
        0.1,
        0.2,
        30.0,
    ]
    assert loaded.save() == saved.save()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "object"),
        (b'{"version": 2, "tools": {}}', "version is 2"),
        (b'{"version": 1, "tools": {"ls": [-1]}}', "'ls': a tool took -1"),
        (b'{"version": 1, "tools": {"ls": ["x"]}}', "float"),
        (b'{"version": 1, "tools": {}, "more": 1}', "more"),
        (b'{"version": 1, "tools": {"' + b"x" * 3000 + b'": [1]}}', "name has 3000 characters"),
    ],
)
def test_damaged_history_file_changes_nothing(data: bytes, words: str) -> None:
    known = times(ls=[0.5])
    with pytest.raises(ValueError, match=words):
        known.load(data)
    assert known.history.durations_of("ls").tolist() == [0.5]


def test_rarely_seen_tool_borrows_from_all_tools() -> None:
    known = times(ls=[0.1] * 100, make=[60.0])
    seconds, weights = known.expected((ToolCall("make"),))
    assert weights is not None and (np.diff(seconds) >= 0).all()
    assert weights[seconds == 60.0] == 1.0 and weights.sum() == pytest.approx(1.0 + BELIEF_WORTH)
    assert weights[seconds < 60.0].sum() > 1.0, "what is believed, after all tools"
    assert known.gittins_ttl((ToolCall("new"),), 9.0) == pytest.approx(0.1)
    assert ToolTimes().gittins_ttl((ToolCall("new"),), 9.0) is None is ToolTimes().predicted_s(())


def test_ttls_follow_the_history() -> None:
    known = times(ls=[0.1] * 40, make=[60.0] * 40)
    assert 0.1 < (known.gittins_ttl((ToolCall("ls"),), 9.0) or 0.0) < 2.0, (
        "a little longer than ever is still waited for"
    )
    assert known.gittins_ttl((ToolCall("make"),), 9.0) == 0.0
    assert known.fixed_ttl((ToolCall("make"),), 2.0) == 0.0 and known.fixed_ttl((ToolCall("ls"),), 2.0) == 2.0
    assert known.fixed_ttl((ToolCall("new"),), 2.0) == known.fixed_ttl(None, 2.0) == 2.0
    for _ in range(PER_TOOL + 5):
        known.record_duration((ToolCall("make"),), 0.3)  # it became fast, and the old times are forgotten
    assert 0.3 < (known.gittins_ttl((ToolCall("make"),), 9.0) or 0.0) < 3.0
    assert known.gittins_ttl((ToolCall("make"),), 0.1) == 0.0, "another time to break even"


@pytest.mark.parametrize(
    ("command", "speed"),
    [
        ("ls -la", Speed.FAST), ("git status", Speed.FAST), ("git clone x", Speed.SLOW), ("pytest -x", Speed.SLOW),
        ("pip install torch", Speed.SLOW), ("pip list", Speed.UNCERTAIN), ("docker build .", Speed.SLOW),
        ("docker ps", Speed.UNCERTAIN), ("cat a | grep b", Speed.FAST), ("ls && make", Speed.SLOW),
        ("cat x | ./run", Speed.UNCERTAIN), ("get_weather", Speed.UNCERTAIN), ("git", Speed.UNCERTAIN),
    ],
)  # fmt: skip
def test_speed_rules_of_commands(command: str, speed: Speed) -> None:
    assert by_rules(call(command)) is speed


def test_slowest_of_several_tool_calls_decides_speed() -> None:
    assert by_rules((*call("ls"), *call("make"))) is Speed.SLOW
    assert by_rules(()) is Speed.UNCERTAIN


def test_speed_without_rule_is_taken_from_history() -> None:
    known = times(quick=[0.2] * 20, slow=[40.0] * 20, mixed=[0.1, 100.0] * 10)

    def speed(tool: str) -> Speed:
        return known.speed((ToolCall(tool),), fast_s=3.0, slow_s=8.0)

    assert [speed(tool) for tool in ("quick", "slow", "mixed", "new")] == [
        Speed.FAST, Speed.SLOW, Speed.UNCERTAIN, Speed.UNCERTAIN,
    ]  # fmt: skip
    assert speed("ls") is Speed.FAST and speed("make") is Speed.SLOW


def test_zero_break_even_time_gives_zero_ttl() -> None:
    known = times(ls=[0.1] * 40)
    assert known.gittins_ttl((ToolCall("ls"),), 9.0) and known.gittins_ttl((ToolCall("ls"),), 0.0) == 0.0
    assert known.gittins_ttl((ToolCall("ls"),), 0.0) == 0.0 and known.gittins_ttl((ToolCall("ls"),), 9.0)


def test_draws_are_reproducible() -> None:
    one, two = times(ls=[0.1, 3.0]), times(ls=[0.1, 3.0])
    draws = [one.drawn_ttl((ToolCall("ls"),)) for _ in range(5)]
    assert draws == [two.drawn_ttl((ToolCall("ls"),)) for _ in range(5)] and len(set(draws)) == 5


@pytest.mark.parametrize("count", [1, 3, 50])
def test_gittins_ttl_exceeds_longest_seen_duration(count: int) -> None:
    known, run = times(run=[5.0] * count), (ToolCall("run"),)
    ttl = known.gittins_ttl(run, 9.0)
    assert ttl is not None and 5.1 < ttl < 30.0
    assert known.cdf_ttl(run, 9.0) == 5.0, "which goes by the durations alone"


def gain(law: np.ndarray, ttl: float | None, break_even: float) -> float:
    assert ttl is not None
    return float(np.mean(law <= ttl) - np.minimum(law, ttl).mean() / break_even)


def test_prior_reduces_loss_with_few_durations() -> None:
    """Lost gain against the best time to live of the true law, with one to eight durations, several kinds of tools."""
    rng = np.random.default_rng(4)
    laws = {
        "list": lambda n: rng.lognormal(np.log(0.1), 0.3, n), "test": lambda n: rng.uniform(2.0, 5.0, n),
        "build": lambda n: rng.lognormal(np.log(8.0), 0.8, n), "wait": lambda n: rng.lognormal(np.log(60.0), 1.2, n),
    }  # fmt: skip
    past = {name: law(60).tolist() for name, law in laws.items()}
    break_even, lost, lost_alone = 9.0, 0.0, 0.0
    for law in laws.values():
        true = np.sort(law(10_000))
        best = gain(true, best_ttl(true, break_even), break_even)
        for count in (1, 2, 4, 8):
            seconds = law(count)
            known = times(**past, run=seconds.tolist())
            lost += best - gain(true, known.gittins_ttl((ToolCall("run"),), break_even), break_even)
            lost_alone += best - gain(true, best_ttl(np.sort(seconds), break_even), break_even)
    assert 0.0 <= lost < lost_alone / 2


def test_arguments_of_other_tools_are_not_read_as_commands() -> None:
    assert by_rules((ToolCall("lookup", "make; ls"),)) is Speed.UNCERTAIN
    assert by_rules((ToolCall("pytest", '{"path": "ls"}'),)) is Speed.SLOW


def test_commands_are_kept_only_when_learning() -> None:
    known = times(ls=[0.1])
    assert b"commands" not in known.save()
    loaded = ToolTimes()
    loaded.load(b'{"version": 1, "tools": {}, "commands": [["ls -l", 0.5]]}')
    assert not loaded.history.commands


@pytest.mark.parametrize("pair", ['["ls", -1]', '["' + "x" * 513 + '", 1]', '["ls"]'])
def test_damaged_commands_are_refused(pair: str) -> None:
    known = times(ls=[0.5])
    with pytest.raises(ValueError, match=r"took|length 2"):
        known.load(b'{"version": 1, "tools": {}, "commands": [' + pair.encode() + b"]}")
    assert known.history.durations_of("ls").tolist() == [0.5]


@pytest.mark.parametrize("data", [b'{"version": 1, "x": ' + b"[" * 100_000, b'{"version": 1, "tools": {"ls": [NaN]}}'])
def test_hostile_history_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON"):
        ToolTimes().load(data)


def test_learned_model_resolves_uncertain_commands() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra [learned]")
    known = ToolTimes(learn=True)
    full, check = call("run --full"), call("run --check")

    def speeds(times: ToolTimes) -> list[Speed]:
        return [times.speed(calls, fast_s=3.0, slow_s=8.0) for calls in (full, check)]

    assert speeds(known) == [Speed.UNCERTAIN] * 2
    for _ in range(150):
        known.record_duration(full, 90.0)
        known.record_duration(check, 0.1)
    assert speeds(known) == [Speed.SLOW, Speed.FAST]
    loaded, plain = ToolTimes(learn=True), ToolTimes()
    loaded.load(known.save())
    plain.load(known.save())
    assert speeds(loaded) == [Speed.SLOW, Speed.FAST] and loaded.save() == known.save()
    assert speeds(plain) == [Speed.UNCERTAIN] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_predicted_time_is_the_median(count: int) -> None:
    durations = np.random.default_rng(count).exponential(size=count)
    times = ToolTimes()
    for seconds in durations:
        times.record_duration((ToolCall("ls"),), float(seconds))
    assert times.predicted_s((ToolCall("ls"),)) == pytest.approx(np.median(durations))


@pytest.mark.parametrize("rule", ["cdf_ttl", "gittins_ttl"])
def test_tool_ttl_uses_its_own_times_once_known(rule: str) -> None:
    """However many durations of others it went by until then."""
    known = times(ls=[0.2] * 200)
    ttl = getattr(known, rule)
    assert ttl(call("train"), 8.0) > 0.0, "nothing else is known"
    asked = []
    for _ in range(10):
        known.record_duration(call("train"), 200.0)
        asked.append(ttl(call("train"), 8.0))
    assert asked[-1] == 0.0, asked
    assert ttl(call("ls"), 8.0) > 0.0


@pytest.mark.parametrize("rule", ["cdf_ttl", "gittins_ttl"])
def test_forgotten_tool_starts_without_history(rule: str) -> None:
    known = times(train=[0.2] * PER_TOOL)
    ttl = getattr(known, rule)
    assert ttl(call("train"), 8.0) > 0.0
    for number in range(MAX_TOOLS):
        known.record_duration(call(f"tool{number}"), 200.0)
    assert not len(known.history.durations_of("train"))
    for _ in range(10):
        known.record_duration(call("train"), 200.0)
    assert ttl(call("train"), 8.0) == 0.0


SETS = [
    [1.0],
    [0.0],
    [0.0, 0.0, 5.0],
    [2.0, 2.0, 2.0],
    [0.1, 0.1, 60.0],
    [0.4, 8.0, 120.0, 0.3, 0.5, 300.0],
    *([random.Random(seed).lognormvariate(0.0, 2.0) for _ in range(2 + 5 * seed)] for seed in range(8)),
]


def slow_index(durations: list[float], age: float) -> float:
    """Gittins' index by its definition, over every τ at which the ratio can be greatest."""
    left = [d - age for d in durations if d > age]
    best = 0.0
    for tau in left:
        back = sum(d <= tau for d in left) / len(left)
        held = sum(min(d, tau) for d in left) / len(left)
        best = max(best, back / held)
    return best


class TestBestTTL:
    @pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
    @pytest.mark.parametrize("durations", SETS)
    def test_best_ttl_is_first_crossing_of_index_threshold(self, durations: list[float], break_even: float) -> None:
        ages = sorted({0.0, *durations})
        expected = next(age for age in ages if slow_index(durations, age) <= 1 / break_even)
        assert best_ttl(np.sort(np.array(durations)), break_even) == pytest.approx(expected)

    def test_index_stays_above_threshold_until_best_ttl(self) -> None:
        durations = np.sort(np.random.default_rng(5).lognormal(0.0, 1.5, 60))
        ttl = best_ttl(durations, 9.0)
        assert 0 < ttl < durations[-1]
        for age in np.linspace(0.0, ttl * 0.9999, 400):
            assert slow_index(durations.tolist(), float(age)) > 1 / 9.0

    @pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
    @pytest.mark.parametrize("durations", SETS)
    def test_best_ttl_has_greatest_gain(self, durations: list[float], break_even: float) -> None:
        def gain(tau: float) -> float:
            back = sum(d <= tau for d in durations) / len(durations)
            return back - sum(min(d, tau) for d in durations) / len(durations) / break_even if tau or back else 0.0

        ttl = best_ttl(np.sort(np.array(durations)), break_even)
        assert max(gain(ttl), 0.0) == pytest.approx(max(0.0, *map(gain, durations)))

    def test_weights_count_as_repetitions(self) -> None:
        durations, times = np.array([1.0, 1.5, 4.0, 9.0]), [4, 1, 2, 1]
        repeated, weights = np.repeat(durations, times), np.array(times, dtype=float)
        for break_even in (0.5, 3.0, 9.0):
            assert best_ttl(durations, break_even, weights) == best_ttl(repeated, break_even)

    def test_capped_durations_do_not_extend_best_ttl(self) -> None:
        durations = np.array([0.1] * 50 + [60.0] * 50)
        assert best_ttl(durations, 9.0) == 0.1
        assert slow_index(durations.tolist(), 59.9) > 1 / 9.0, "it rises again, after the first crossing"
        assert best_ttl(durations, 61.0) == 60.0

    def test_best_ttl_without_durations_is_zero(self) -> None:
        assert best_ttl(np.empty(0), 9.0) == 0.0

    def test_best_ttl_is_zero_at_zero_break_even(self) -> None:
        assert best_ttl(np.array([0.0, 1.0]), 0.0) == 0.0


class TestLogNormalBelief:
    @pytest.mark.parametrize(
        ("share", "freedom", "expected"),
        [(0.5, 4, 0.0), (0.9, 4, 1.5332), (0.95, 4, 2.1318), (0.99, 4, 3.7469), (0.9, 10, 1.3722), (0.975, 30, 2.0423)],
    )
    def test_student_t_quantiles_match_tables(self, share: float, freedom: float, expected: float) -> None:
        assert student_t_quantile(share, freedom) == pytest.approx(expected, rel=0.01, abs=1e-9)
        assert student_t_quantile(1 - share, freedom) == pytest.approx(-expected, rel=0.01, abs=1e-9)

    def test_belief_update_follows_formulas(self) -> None:
        belief = LogNormalBelief(mean=1.0, weight=2.0, shape=3.0, scale=4.0).after(np.exp([0.0, 2.0, 4.0]))
        assert belief.weight == 5.0 and belief.shape == 4.5
        assert belief.mean == pytest.approx((2 * 1.0 + 3 * 2.0) / 5)
        assert belief.scale == pytest.approx(4.0 + 8.0 / 2 + 2 * 3 * (2.0 - 1.0) ** 2 / (2 * 5))

    def test_batch_update_equals_sequential_updates(self) -> None:
        times = np.random.default_rng(1).lognormal(0.5, 1.0, 20)
        belief = LogNormalBelief()
        for time in times:
            belief = belief.after(np.array([time]))
        whole = LogNormalBelief().after(times)
        assert (belief.mean, belief.scale) == (pytest.approx(whole.mean), pytest.approx(whole.scale))

    def test_belief_converges_to_true_distribution(self) -> None:
        times = np.random.default_rng(2).lognormal(math.log(3.0), 0.7, 20_000)
        belief = LogNormalBelief().after(times)
        for share in (0.1, 0.5, 0.9):
            assert belief.quantile(share) == pytest.approx(float(np.quantile(times, share)), rel=0.05)
        rng = np.random.default_rng(3)
        drawn = [belief.draw(rng) for _ in range(4000)]
        assert float(np.median(drawn)) == pytest.approx(3.0, rel=0.1)

    def test_prior_weighs_as_much_as_a_few_durations(self) -> None:
        every = LogNormalBelief().after(np.full(1000, 0.1))
        prior = every.as_prior(2.0)
        assert prior.weight == 2.0 and prior.mean == pytest.approx(math.log(0.1), abs=0.01)
        assert prior.after(np.full(20, 30.0)).quantile(0.5) > 10.0

    def test_zero_and_huge_durations_stay_finite(self) -> None:
        assert LogNormalBelief().after(np.zeros(5)).quantile(0.5) < 0.1
        assert math.isfinite(LogNormalBelief(mean=1000.0).quantile(0.99))


def test_user_is_no_tool() -> None:
    """Tools say nothing about the user, and the user nothing about tools."""
    known = times(ls=[0.1] * 20)
    assert known.predicted_s(()) is None and known.gittins_ttl((), 100.0) is None and known.cdf_ttl((), 100.0) is None
    assert len(known.expected(())[0]) == 0 and known.belief(()) == LogNormalBelief()
    before = known.belief((ToolCall("make"),)), known.gittins_ttl((ToolCall("make"),), 100.0)
    for _ in range(50):
        known.record_duration((), 40.0)
    assert (known.belief((ToolCall("make"),)), known.gittins_ttl((ToolCall("make"),), 100.0)) == before
    assert known.history.all_durations().tolist() == [0.1] * 20
    assert known.predicted_s(()) == 40.0 and (known.gittins_ttl((), 100.0) or 0.0) >= 40.0
    assert known.posterior_ttl((), 0.8) > 30.0 > known.posterior_ttl((ToolCall("make"),), 0.8)


def test_only_user_is_known() -> None:
    known = ToolTimes()
    for _ in range(50):
        known.record_duration((), 40.0)
    assert known.predicted_s((ToolCall("ls"),)) is None and known.gittins_ttl((ToolCall("ls"),), 100.0) is None
    assert known.predicted_s(None) is None


def test_tool_without_name_is_not_the_user() -> None:
    known = ToolTimes()
    known.record_duration((ToolCall(""),), 1.0)
    known.record_duration((ToolCall("the user"),), 2.0)
    known.record_duration((), 3.0)
    loaded = ToolTimes()
    loaded.load(known.save())
    for each in (known, loaded):
        assert each.history.durations_of(name_of((ToolCall(""),))).tolist() == [1.0]
        assert each.history.durations_of("the user").tolist() == [2.0]
        assert each.history.durations_of(name_of(())).tolist() == [3.0]
        assert each.history.all_durations().tolist() == [1.0, 2.0]


def test_user_is_saved_by_readable_name() -> None:
    known = ToolTimes()
    known.record_duration((), 3.0)
    assert json.loads(known.save()) == {"version": 1, "tools": {}, "the user": [3.0]}


def test_older_histories_have_the_user_among_the_tools() -> None:
    loaded = ToolTimes()
    loaded.load(b'{"version": 1, "tools": {"": [20.0, 30.0], "ls": [0.1]}}')
    assert loaded.history.durations_of(name_of(())).tolist() == [20.0, 30.0]
    assert loaded.history.all_durations().tolist() == [0.1]
    assert json.loads(loaded.save())["the user"] == [20.0, 30.0]
    with pytest.raises(ValueError, match="the user"):
        loaded.load(b'{"version": 1, "tools": {}, "the user": [-1.0]}')


def test_many_tools_do_not_displace_the_user() -> None:
    history = ToolHistory()
    history.add_duration(name_of(()), 5.0)
    for number in range(2 * MAX_TOOLS):
        history.add_duration(f"tool{number}", 1.0)
    assert history.durations_of(name_of(())).tolist() == [5.0] and len(history) == MAX_TOOLS


def test_longest_stay_is_last_time_at_which_return_was_likely() -> None:
    """Six of ten return within 6 s, one after 50 s, and three never."""
    durations = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 50.0, 600.0, 600.0, 600.0])
    assert longest_stay(durations, 2.0, 0.25, 600.0) == 50.0, "one of the four that were away for 50 s"
    assert longest_stay(durations, 2.0, 0.26, 600.0) == 5.0, "two of six within 2 s; at 6 s it is one of five"
    assert longest_stay(durations, 2.0, 0.35, 600.0) == 4.0
    assert longest_stay(durations, 2.0, 0.9, 600.0) == 0.0
    assert longest_stay(durations, 2.0, 0.0, 600.0) == 50.0, "those that never returned do not count, however low"
    assert longest_stay(durations, 1000.0, 1.0, 600.0) == 0.0
    assert longest_stay(np.full(5, 600.0), 10.0, 0.0, 600.0) == 0.0


def test_longest_stay_needs_enough_returns() -> None:
    few, enough = times(ls=[1.0] * (ENOUGH - 1)), times(ls=[1.0] * ENOUGH)
    calls = (ToolCall("ls"),)
    assert few.stay_s(calls, 10.0, 0.1, 600.0) is None and few.chance(calls, 10.0) is None
    assert enough.stay_s(calls, 10.0, 0.1, 600.0) == 1.0
    assert enough.chance(calls, 10.0) == 1.0 and enough.chance(calls, 0.5) == 0.0
    assert enough.stay_s((), 10.0, 0.1, 600.0) is None, "the tools say nothing about the user"
