"""The requests of the units, the figures taken from the answers, and the checks of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.drivers.arrivals import step_times
from benchmarks.peers.plan import QUICK, Sizes, units
from benchmarks.peers.work import Decode, Prefill, Prompts, Steps, Throughput, TwoStages
from tests.doubles.fake_peer import Engine

PROMPTS = Prompts((1, 2), 1000)


class Asked:
    """An engine in this process, and what it was asked."""

    def __init__(self, **settings: Any) -> None:
        self._engine = Engine(**settings)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.changes: dict[str, Any] = {}
        """Instead of what the engine answers to a method: what is to change in it."""

    def __call__(self, do: str, **keywords: Any) -> Any:
        self.calls.append((do, keywords))
        return getattr(self._engine, do)(**keywords) | self.changes.get(do, {})

    def requests(self, place: int) -> list[dict[str, Any]]:
        return self.calls[place][1]["requests"]


def test_throughput_counts_prompt_and_output_tokens() -> None:
    ask = Asked()
    found = Throughput("all", requests=4, prompt=30, tokens=8)(ask, PROMPTS)
    assert found.figures == {"all": 4 * 38 / 0.5} and found.greedy == [[7] * 8] * 4
    assert [len(each["ids"]) for each in ask.requests(0)] == [30] * 4 and not ask.calls[0][1]["stream"]


def test_prompts_are_equal_for_engines_and_differ_between_rounds() -> None:
    def ids(prompts: Prompts) -> list[list[int]]:
        ask = Asked()
        Throughput("all", 2, 30, 1)(ask, prompts)
        return [each["ids"] for each in ask.requests(0)]

    assert ids(PROMPTS) == ids(PROMPTS) != ids(Prompts((1, 3), 1000))


def test_prefill_is_the_median_over_single_prompts() -> None:
    ask = Asked()
    found = Prefill("prefill", prompt=100, repeats=4)(ask, PROMPTS)
    assert found.figures == {"prefill": 200.0} and found.extra == {"seconds": [0.5] * 4}
    prompts = [ask.requests(place)[0]["ids"] for place in range(4)]
    assert len({tuple(ids) for ids in prompts}) == 4


def test_step_time_is_the_20th_percentile() -> None:
    ask = Asked()
    ask.changes["generate"] = {"steps_s": [0.002, 0.001, 0.003, 0.004, 0.010, 0.020]}
    found = Steps({1: "one", 2: "two"}, context=16, tokens=12)(ask, PROMPTS)
    assert found.figures == pytest.approx({"one": 2.0, "two": 2.0})
    assert found.extra["two"] == {"steps": 6, "median_ms": pytest.approx(3.5)}
    assert [len(keywords["requests"]) for _, keywords in ask.calls] == [1, 2] and len(found.greedy) == 3


def test_too_few_full_batch_steps_fail() -> None:
    ask = Asked()
    ask.changes["generate"] = {"steps_s": [0.002] * 2}
    with pytest.raises(EngineFailed, match="2 steps of the whole batch of 2 in 12 tokens"):
        Steps({2: "two"}, context=16, tokens=12)(ask, PROMPTS)


def test_too_few_generated_tokens_fail() -> None:
    with pytest.raises(EngineFailed, match=r"generated \[7, 7\] tokens where \[8, 8\]"):
        Throughput("all", 2, 30, 8)(Asked(at="generate", what="short"), PROMPTS)


def two_stages(**settings: Any) -> TwoStages:
    return TwoStages("ttft", at_once=2, groups=3, prompt=20, stage1=5, **settings)


def test_stage_2_prompt_extends_stage_1_output() -> None:
    ask = Asked()
    assert two_stages()(ask, PROMPTS).figures == {"ttft": 10.0}
    assert [do for do, _ in ask.calls] == ["generate"] * 6
    for place in (0, 2, 4):
        firsts, seconds = ask.requests(place), ask.requests(place + 1)
        assert all(each["keep"] and each["seed"] is not None for each in firsts)
        for first, second in zip(firsts, seconds, strict=True):
            assert second["ids"] == first["ids"] + [7] * 5 + second["suffix"]
            assert second["parent"] == "r" and len(second["suffix"]) == 3


@pytest.mark.parametrize("pressed", [0, 500])
def test_evicted_tokens_are_accounted_for(pressed: int) -> None:
    """Where nothing could be pressed out, stage 2 has a prompt that was never there."""
    ask = Asked()
    ask.changes["press"] = {"tokens": pressed}
    two_stages(evicted=True)(ask, PROMPTS)
    assert [do for do, _ in ask.calls] == ["generate"] * 3 + ["press"] + ["generate"] * 3
    for first, second in zip(ask.requests(0), ask.requests(4), strict=True):
        assert len(second["ids"]) == 28 and (second["ids"][:20] == first["ids"]) == bool(pressed)


def test_beam_search_of_wrong_width_fails() -> None:
    ask = Asked()
    assert two_stages(width=4)(ask, PROMPTS).figures == {"ttft": 100.0}
    assert ask.calls[1][0] == "beam" and ask.calls[1][1]["width"] == 4
    ask.changes["beam"] = {"sequences": [[[1, 2, 3]] * 4] * 2}
    with pytest.raises(EngineFailed, match="of width 4 found 1 sequences"):
        two_stages(width=4)(ask, PROMPTS)


def test_continuation_without_handoff_fails() -> None:
    ask = Asked()
    done = {"name": "r", "ids": [7] * 3, "first_s": 0.01, "path": "match"}
    with pytest.raises(EngineFailed, match=r"not handed off: \['match', None\]"):
        ask.changes["generate"] = {"requests": [{**done, "ids": [7] * 5}] * 2}
        second = Asked()
        second.changes["generate"] = {"requests": [done, {**done, "path": None}]}
        turns = iter([ask, second])
        two_stages()(lambda do, **keywords: next(turns)(do, **keywords), PROMPTS)


def test_step_times_come_from_the_request_that_started_last() -> None:
    early = [(0.1, 1), (0.2, 2), (0.9, 3), (1.4, 4)]
    late = [(0.4, 1), (0.5, 2), (0.7, 3), (1.3, 5)]
    assert step_times([early, late]) == pytest.approx([0.2, 0.3])


def test_step_times_stop_when_the_first_request_ends() -> None:
    early = [(0.1, 1), (0.45, 2), (0.8, 3)]
    late = [(0.4, 1), (0.5, 2), (0.7, 3), (0.75, 4), (0.9, 5), (1.0, 6)]
    assert step_times([early, late]) == pytest.approx([0.2, 0.05])


def test_unit_and_metric_names_are_unique() -> None:
    for sizes in (Sizes(), QUICK):
        names = [metric.name for unit in units(sizes).values() for metric in unit.metrics]
        assert len(names) == len(set(names))
    goals = {metric.name: (metric.goal, metric.more_is_better) for u in units(Sizes()).values() for metric in u.metrics}
    assert goals["32 × (512 + 64)"] == (1.0, True) and goals["step, batch 32, context 1024"] == (1.05, False)
    assert goals["decode, 8 streams"] == (0.952, True) and goals["resident memory"] == (None, False)
    assert len(goals) == 28


def test_decode_is_tokens_of_all_streams_by_the_clock() -> None:
    """Slow steps count: the figure is no percentile."""
    asked = Asked()
    asked.changes["generate"] = {"steps_s": [0.01, 0.01, 0.02, 0.04]}
    found = Decode({1: "one", 8: "eight"}, 64, 8)(asked, PROMPTS)
    assert found.figures == {"one": pytest.approx(50.0), "eight": pytest.approx(400.0)}
    assert [len(keywords["requests"]) for _, keywords in asked.calls] == [1, 8]
    assert {request["tokens"] for request in asked.calls[1][1]["requests"]} == {10}, "two steps of 256 prompt tokens"
    asked.changes["generate"] = {"steps_s": [0.01]}
    with pytest.raises(EngineFailed, match="1 steps of all 1 streams in 8 tokens"):
        Decode({1: "one"}, 64, 8)(asked, PROMPTS)
