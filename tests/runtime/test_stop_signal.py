"""A stop signal runs its actions when it is set."""

from __future__ import annotations

from baton.runtime.stop_signal import StopSignal


def test_set_runs_every_action_once_set() -> None:
    stop, seen = StopSignal(), []
    stop.on_set(lambda: seen.append(("a", stop.is_set())))
    stop.on_set(lambda: seen.append(("b", stop.is_set())))
    assert seen == []
    stop.set()
    assert seen == [("a", True), ("b", True)]


def test_action_added_after_set_runs_at_once() -> None:
    stop, seen = StopSignal(), []
    stop.set()
    stop.on_set(lambda: seen.append("late"))
    assert seen == ["late"]


def test_action_may_add_another_while_set_runs() -> None:
    stop, seen = StopSignal(), []
    stop.on_set(lambda: stop.on_set(lambda: seen.append("inner")))
    stop.set()
    assert seen == ["inner"]
