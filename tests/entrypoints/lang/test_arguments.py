"""How a program is called: which keyword is an option and which an argument, arguments set ahead, and misspelt ones."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from baton.entrypoints.lang import ProgramState, function, gen, select, set_default_backend
from tests.doubles.example_programs import two_stages
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


@function
def samples(s: ProgramState, question: str, n: int, seed: int = 1) -> tuple[int, int]:
    s += question + gen("x")
    return n, seed


def test_keyword_matching_a_parameter_is_an_argument() -> None:
    backend = FakeBackend()
    assert samples.run(question="q", n=3, seed=4, backend=backend).ret_value == (3, 4)
    assert samples.run_batch([{"question": "q", "n": 5}], backend=backend)[0].ret_value == (5, 1)
    assert [call["sampling_params"] for call in backend.calls] == [{}, {}]
    # The parameter has its value already: the keyword is the option.
    state = samples.run("q", 7, 8, n=2, seed=9, backend=backend)
    assert state.ret_value == (7, 8) and state["x"] == ["[2]0", "[2]1"]
    assert backend.calls[-1]["sampling_params"] == {"n": 2, "seed": 9}
    bound = samples.bind(n=1)
    assert bound.run("q", n=3, backend=backend).ret_value == (1, 1)
    assert backend.calls[-1]["sampling_params"] == {"n": 3}


def test_run_options_are_defaults_for_every_gen() -> None:
    backend = FakeBackend()

    @function
    def two(s: ProgramState) -> None:
        s += "a" + gen("x", return_logprob=False, stop="|") + gen("y")

    details = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True, "logprob_start_len": 1}
    two.run(backend=backend, stop=["."], use_thread=False, stop_regex=[], **details)
    first, second = backend.calls
    assert {name: first[name] for name in details} == {**details, "return_logprob": False}
    assert {name: second[name] for name in details} == details
    assert [call["sampling_params"] for call in backend.calls] == [{"stop": "|"}, {"stop": ["."]}]
    two.run(backend=backend, stop_regex="a+")
    assert [call["sampling_params"] for call in backend.calls[2:]] == [
        {"stop": "|", "stop_regex": "a+"},
        {"stop_regex": "a+"},
    ]


def test_batch_items_may_set_their_own_options() -> None:
    backend = FakeBackend()
    two_stages.run_batch([{"question": "q", "temperature": 0.25}], backend=backend, temperature=0.5, seed=3)
    assert backend.calls[0]["sampling_params"] == {"temperature": 0.25, "seed": 3, "max_new_tokens": 8, "stop": "|"}


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_arguments_are_refused_before_running(stream: bool) -> None:
    backend = FakeBackend()
    run = {"backend": backend, "stream": stream}
    with pytest.raises(
        TypeError, match=r"two_stages.run: 'temprature' is neither an option nor .*; did you mean 'temperature'\?"
    ):
        two_stages.run("q", temprature=0.5, **run)
    with pytest.raises(TypeError, match=r"'qestion' is neither an option nor a parameter; did you mean 'question'\?"):
        two_stages.run(qestion="q", **run)
    with pytest.raises(TypeError, match=r"two_stages.run: missing a required argument: 'question'"):
        two_stages.run(**run)
    with pytest.raises(TypeError, match=r"two_stages.run: too many positional arguments"):
        two_stages.run("q", "r", **run)
    assert not backend.calls


def test_invalid_batch_items_are_refused_before_running() -> None:
    backend = FakeBackend()
    for item, message in [({"qestion": "q"}, "did you mean 'question'"), (("a", "b"), "too many"), ({}, "missing")]:
        with pytest.raises(TypeError, match=f"two_stages.run_batch: .*{message}"):
            two_stages.run_batch([{"question": "good"}, item], backend=backend)
    with pytest.raises(TypeError, match=r"run_batch: temprature is not an option; did you mean 'temperature'\?"):
        two_stages.run_batch([("q",)], backend=backend, temprature=0)
    assert not backend.calls


def test_programs_may_accept_arbitrary_keywords() -> None:
    @function
    def anything(s: ProgramState, **names: Any) -> dict[str, Any]:
        return names

    assert anything.run(backend=FakeBackend(), a=1, temperature=0.5).ret_value == {"a": 1}


def test_bind_sets_arguments_ahead() -> None:
    backend = FakeBackend()

    @function
    def add(s: ProgramState, a: int, b: int, c: int = 3) -> tuple[int, int, int]:
        return a, b, c

    bound = add.bind(b=2).bind(c=4)
    assert bound.run(1, backend=backend).ret_value == (1, 2, 4)
    assert [state.ret_value for state in bound.run_batch([{"a": 5}, (6,)], backend=backend)] == [(5, 2, 4), (6, 2, 4)]
    assert add.run(1, 7, backend=backend).ret_value == (1, 7, 3), "binding makes another program"
    with pytest.raises(TypeError, match="'b' is bound already, and given again"):
        bound.run(1, b=3, backend=backend)
    with pytest.raises(TypeError, match=r"bind: add has no parameter 'cc'; did you mean 'c'\?"):
        add.bind(cc=1)

    @function
    def outer(s: ProgramState) -> Any:
        return bound(s, 8)

    assert outer.run(backend=backend).ret_value == (8, 2, 4)


def test_decorator_with_parentheses_and_direct_call() -> None:
    @function()
    def echo(s: ProgramState, text: str) -> None:
        s += text + gen("x")

    set_default_backend(FakeBackend())
    try:
        assert echo("abc").text() == echo.run("abc").text() == "abc[4]"
    finally:
        set_default_backend(None)


# -- batches, one result after another ---------------------------------------------------------------------------------


def test_batch_results_are_generated_lazily() -> None:
    backend = FakeBackend()
    items = [{"question": "x" * i} for i in range(1, 30)]
    states = two_stages.run_batch(items, backend=backend, num_threads=3, generator_style=True)
    assert not backend.calls, "nothing runs before somebody reads"
    assert next(states)["thought"] == "[2]"
    assert [state["thought"] for state in states] == [f"[{i + 1}]" for i in range(2, 30)]
    assert not backend.leases


def test_closing_the_result_iterator_stops_the_batch() -> None:
    backend, second_is_ready, first_was_read = FakeBackend(hold=threading.Event()), threading.Event(), threading.Event()
    assert backend.hold is not None
    backend.hold.set()

    @function
    def endless(s: ProgramState, i: int) -> None:
        s += f"{i}" + gen("x")
        if i > 0:
            s.sync()
            second_is_ready.set()
            assert first_was_read.wait(60)
            s += gen("y")

    states = endless.run_batch([{"i": i} for i in range(9)], backend=backend, num_threads=2, generator_style=True)
    assert next(states)["x"] == "[2]" and second_is_ready.wait(60)
    backend.hold.clear()
    first_was_read.set()
    while not any("continuation_of" in call for call in backend.calls):
        time.sleep(0.001)
    states.close()
    assert backend.aborted and len(backend.calls) <= 6 and not backend.leases


def test_n_does_not_apply_to_select() -> None:
    @function
    def choose(s: ProgramState) -> None:
        s += "a" + select("x", ["b"])

    assert choose.run(backend=FakeBackend(), n=3)["x"] == "b", "n is for gens"
