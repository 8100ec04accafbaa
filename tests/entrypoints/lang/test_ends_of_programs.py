"""Every program ends, and says why, whatever is done within it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.lang import BackendError, HttpBackend, ProgramError, ProgramState, function, gen, select
from baton.entrypoints.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


class Method(ChoicesSamplingMethod):
    """Does something within the step, and takes the first choice."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def __call__(self, *, choices: list[str], **_: Any) -> ChoicesDecision:
        self._action()
        return ChoicesDecision(choices[0])


def error_of_select(action: Callable[[ProgramState], object]) -> ProgramError:
    """The error of a program with a choices_method that does ``action``."""

    @function
    def program(s: ProgramState) -> str:
        s += "a "
        s += select("x", ["b", "c"], choices_method=Method(lambda: action(s)))
        return s["x"]

    with pytest.raises(ProgramError) as caught:
        program.run(backend=FakeBackend())
    return caught.value


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration])
def test_any_exception_in_a_step_is_reported(kind: type[BaseException]) -> None:
    def action(_: ProgramState) -> None:
        raise kind("mine")

    assert str(error_of_select(action)) == f"select('x'): {kind.__name__}: mine"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda s: s["x"], "'x' was read within a step of its own state"),
        (lambda s: s.meta("x"), "'x' was read within a step of its own state"),
        (lambda s: s.sync(), "cannot append to that state or wait for it"),
        (lambda s: s.text(), "cannot append to that state or wait for it"),
        (lambda s: s.fork(2), "cannot append to that state or wait for it"),
        (lambda s: s.__iadd__("more"), "cannot append to that state or wait for it"),
    ],
)
def test_reading_own_state_in_a_step_is_an_error(action: Callable[[ProgramState], object], words: str) -> None:
    assert words in str(error_of_select(action))


def test_step_can_cancel_its_program() -> None:
    assert error_of_select(lambda s: s.cancel()).code == "stopped"


def test_appending_after_the_end_keeps_variables_unchanged() -> None:
    @function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x")

    state = program.run(backend=FakeBackend())
    value = state["x"]
    with pytest.raises(ProgramError, match="has ended"):
        state += gen("x")
    with pytest.raises(ProgramError, match="has ended"):
        state += gen("y")
    assert state["x"] == value and "y" not in state


@function
def endless(s: ProgramState) -> None:
    while True:
        s += "a"
        s += gen("x")
        time.sleep(0.001)  # a program that only appends is far ahead of its steps


def test_cancel_ends_a_program_that_never_reads() -> None:
    state = endless.run(backend=FakeBackend(), stream=True)
    next(state.text_iter())
    state.cancel()
    error = state.error()
    assert error is not None and error.code == "stopped"


def test_task_cancellation_ends_the_program_thread() -> None:
    before = threading.active_count()

    async def main() -> None:
        task = asyncio.create_task(endless.run_async(backend=FakeBackend()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    while threading.active_count() > before:  # the test's time limit is theirs
        time.sleep(0.01)


def test_values_not_representable_in_json_are_named() -> None:
    backend = HttpBackend("http://127.0.0.1:1")
    for value, words in [
        (float("nan"), "Out of range float values are not JSON compliant"),
        ("\ud800", "surrogates not allowed"),
        (object(), "object is not a type of JSON"),
    ]:
        with pytest.raises(BackendError, match="the request cannot be written as JSON: .*" + words):
            backend.generate({"sampling_params": {"a": value}})
    with pytest.raises(BackendError, match="Connection refused"):
        backend.generate({"sampling_params": {"a": np.int64(3), "b": np.array([1, 2]), "c": np.float32(0.5)}})
