"""The meaning of select and fork, and the text that they share, on a server that records its requests."""

from __future__ import annotations

import threading

import pytest

from baton.entrypoints.lang import BackendError, ProgramError, ProgramState, function, gen, select
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


# -- select ------------------------------------------------------------------------------------------------------------


def test_select_picks_the_best_mean_and_continues_it() -> None:
    scores = {"no": -3.0, "yes": -1.0, "perhaps": -2.0}
    backend = FakeBackend(score=lambda prompt, choice: scores[choice])

    @function
    def choose(s: ProgramState) -> None:
        s += "is it? " + select("answer", choices=list(scores)) + "!" + gen("more")

    state = choose.run(backend=backend)
    assert state["answer"] == "yes" and state.text() == "is it? yes![12]"
    meta = state.meta("answer")
    assert meta["normalized_prompt_logprobs"] == [-3.0, -1.0, -2.0] and meta["choices"] == list(scores)
    # The text is computed once, then each choice, then what is new after the winner.
    assert backend.computed == ["^is it? ", "no", "yes", "perhaps", "!"]
    assert not backend.leases
    assert backend.calls[-1]["continuation_of"] == backend.calls[2]["rid"]


def test_select_scores_follow_the_visible_text() -> None:
    seen = []

    def score(prompt: str, choice: str) -> float:
        seen.append((prompt, choice))
        return -1.0

    backend = FakeBackend(lambda prompt, sampling: "done|x", score=score)

    @function
    def choose(s: ProgramState) -> None:
        s += "go " + gen("a", stop="|") + select("b", ["left", "right"])

    assert choose.run(backend=backend)["b"] == "left", "the first of equals"
    assert seen == [("^go done", "left"), ("^go done", "right")]


def test_select_without_text_is_refused() -> None:
    @function
    def choose(s: ProgramState) -> None:
        s += select("b", ["x"])

    with pytest.raises(ProgramError, match="select needs text before it"):
        choose.run(backend=FakeBackend())


def test_failed_select_leaves_no_lease() -> None:
    def score(prompt: str, choice: str) -> float:
        if choice == "bad":
            raise BackendError("no", status=500)
        return -1.0

    backend = FakeBackend(score=score)

    @function
    def choose(s: ProgramState) -> None:
        s += "a" + select("b", ["good", "bad"])

    with pytest.raises(ProgramError, match=r"select\('b'\): no"):
        choose.run(backend=backend)
    assert not backend.leases


# -- forks -------------------------------------------------------------------------------------------------------------


def test_forks_share_their_prefix() -> None:
    backend = FakeBackend()

    @function
    def tips(s: ProgramState) -> None:
        s += "long prefix"
        forks = s.fork(3)
        for i in range(3):
            forks[i] += f" tip {i}:"
            forks[i] += gen("tip")
        forks.join()
        assert s["tip"] == ["[19]"] * 3 and len(s.meta("tip")) == 3
        s += " in short:" + gen("end")

    state = tips.run(backend=backend)
    assert state.text() == "long prefix in short:[22]"
    assert sorted(backend.computed) == sorted(["^long prefix", " tip 0:", " tip 1:", " tip 2:", " in short:"])
    settled = backend.calls[0]["rid"]
    assert {call["continuation_of"] for call in backend.calls[1:]} == {settled}
    assert [call.get("keep_parent") for call in backend.calls[1:]] == [True, True, True, None]
    assert not backend.leases


def test_forks_run_in_parallel() -> None:
    meet = threading.Barrier(3, timeout=60)

    def script(prompt: str, sampling: dict) -> str:
        if "go" in prompt:
            meet.wait()
        return "x"

    @function
    def parallel(s: ProgramState) -> None:
        s += "a" + gen("first")
        with s.fork(3) as forks:
            forks += "go" + gen("x")
        assert s["x"] == ["x"] * 3

    backend = FakeBackend(script)
    parallel.run(backend=backend)
    assert not backend.leases


def test_forks_copy_variables_and_accept_lists_and_functions() -> None:
    backend = FakeBackend()

    @function
    def copies(s: ProgramState) -> None:
        s += "a" + gen("x")
        forks = s.fork(2)
        forks += [gen("y"), "only text"]
        forks += lambda i: str(i)
        assert [fork["x"] for fork in forks] == ["[2]", "[2]"]
        assert forks[1].text() == "a[2]only text1"
        inner = forks[0].fork()
        inner[0] += "deep" + gen("z")
        inner.join()
        assert forks[0]["z"] == ["[13]"]
        forks.join()
        assert s["y"] == ["[5]"] and s["z"] == [["[13]"]]
        with pytest.raises(ValueError, match="1 expressions for 2 forks"):
            forks += ["a"]
        with pytest.raises(ProgramError, match="the state has ended"):
            forks[0] += "more"
        with pytest.raises(ValueError, match="size is 0"):
            s.fork(0)

    state = copies.run(backend=backend)
    assert state.text() == "a[2]" and not backend.leases


def test_unjoined_fork_is_finished_and_its_error_raised() -> None:
    def script(prompt: str, sampling: dict) -> str:
        if "bad" in prompt:
            raise BackendError("no such luck", status=400, code="x")
        return "fine"

    backend = FakeBackend(script)

    @function
    def careless(s: ProgramState, text: str) -> None:
        s += "a"
        s.fork(1)[0].__iadd__(text + gen("y"))

    careless.run("good", backend=backend)
    assert backend.computed == ["^a", "good"] and not backend.leases
    with pytest.raises(ProgramError, match=r"gen\('y'\): no such luck"):
        careless.run("bad", backend=backend)
    assert not backend.leases

    @function
    def careful(s: ProgramState) -> None:
        s += "a"
        fork = s.fork(1)[0]
        fork += "bad" + gen("y")
        with pytest.raises(ProgramError) as caught:
            fork["y"]
        assert caught.value.status == 400
        s += gen("z")

    assert careful.run(backend=backend)["z"] == "fine"
    assert not backend.leases
