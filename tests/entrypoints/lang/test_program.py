"""What programs mean, on a server that writes down what it is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from fake_backend import FakeBackend

from baton.entrypoints.lang import (
    BackendError,
    Program,
    ProgramError,
    ProgramState,
    assistant,
    function,
    gen,
    select,
    set_default_backend,
    system,
    user,
    user_begin,
    user_end,
)
from baton.entrypoints.lang.interpreter import Interpreter

pytestmark = pytest.mark.timeout(30)


def program(body: Any) -> Program:
    return function(body)


@function
def two_stages(s: ProgramState, question: str) -> str:
    s += question
    s += gen("thought", max_tokens=8, stop="|")
    s += " so "
    s += gen("answer", temperature=0.5)
    return "returned"


def test_each_step_continues_the_one_before() -> None:
    backend = FakeBackend(lambda prompt, sampling: "hm|more" if "stop" in sampling else "yes")
    state = two_stages.run("why?", backend=backend)
    assert state["thought"] == "hm" and state["answer"] == "yes"
    assert state.text() == "why?hm so yes"
    assert state.ret_value == "returned"
    first, second = backend.calls
    assert first["text"] == "why?" and first["retain_ttl"] == 5.0
    assert first["sampling_params"] == {"max_new_tokens": 8, "stop": "|"}
    assert second["continuation_of"] == first["rid"] and second["continuation_suffix"] == " so "
    assert "text" not in second and "keep_parent" not in second
    assert second["sampling_params"] == {"temperature": 0.5}
    assert backend.computed == ["^why?", " so "]
    # The first lease went to the second step; the second one's was given up.
    assert backend.released == [second["rid"]] and not backend.leases
    assert state.meta("thought")["finish_reason"] == {"type": "stop", "matched": "|"}
    assert state.get_meta_info("answer")["prompt_tokens"] == len("^why?hm so ")
    assert "thought" in state and "x" not in state


def test_text_alone_asks_nothing() -> None:
    backend = FakeBackend()

    @function
    def silent(s: ProgramState) -> None:
        s += "a"
        s += "b"

    assert silent.run(backend=backend).text() == "ab"
    assert backend.calls == [] and backend.released == []


def test_gen_right_after_gen_and_without_a_name() -> None:
    backend = FakeBackend()

    @function
    def twice(s: ProgramState) -> None:
        s += "a" + gen() + gen("b")

    state = twice.run(backend=backend)
    assert "continuation_suffix" not in backend.calls[1]
    assert state.text() == "a[2][5]" and state["b"] == "[5]"
    with pytest.raises(KeyError, match=r"no step has the name 'c'; named steps so far: 'b'"):
        state["c"]


def test_run_sets_defaults_that_gen_overrides() -> None:
    backend = FakeBackend()
    two_stages.run("q", backend=backend, temperature=0.1, seed=3, max_new_tokens=5, retain_ttl=0.25)
    assert backend.calls[0]["sampling_params"] == {"temperature": 0.1, "seed": 3, "max_new_tokens": 8, "stop": "|"}
    assert backend.calls[1]["sampling_params"] == {"temperature": 0.5, "seed": 3, "max_new_tokens": 5}
    assert backend.calls[0]["retain_ttl"] == 0.25


def test_without_a_lease_nothing_is_released() -> None:
    backend = FakeBackend()
    two_stages.run("q", backend=backend, retain_ttl=0)
    assert len(backend.calls) == 2 and backend.released == []


def test_default_backend() -> None:
    with pytest.raises(ValueError, match="set_default_backend"):
        two_stages.run("q")
    backend = FakeBackend()
    set_default_backend(backend)
    try:
        assert two_stages.run("q")["thought"] == "[2]"
    finally:
        set_default_backend(None)
    with pytest.raises(TypeError, match="backend is 7; give an Engine, the URL"):
        two_stages.run("q", backend=7)


def test_samples() -> None:
    backend = FakeBackend()

    @function
    def several(s: ProgramState) -> None:
        s += "a" + gen("xs", n=3) + gen("y")

    state = several.run(backend=backend)
    assert state["xs"] == ["[2]0", "[2]1", "[2]2"] and len(state.meta("xs")) == 3
    assert state.text() == "a[2]0[6]", "the state goes on with the first"
    assert not backend.leases, "the leases of the others were given up"


# -- select ------------------------------------------------------------------------------------------------------------


def test_select_takes_the_best_mean_and_stands_on_it() -> None:
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


def test_select_after_gen_scores_behind_what_the_client_saw() -> None:
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


def test_select_on_nothing_is_refused() -> None:
    @function
    def choose(s: ProgramState) -> None:
        s += select("b", ["x"])

    with pytest.raises(ProgramError, match="select needs text before it"):
        choose.run(backend=FakeBackend())


def test_a_failed_select_leaves_no_lease() -> None:
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


def test_forks_share_what_stands_before_them() -> None:
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


def test_forks_run_beside_each_other() -> None:
    meet = threading.Barrier(3, timeout=10)

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


def test_forks_have_copies_and_take_lists_and_functions() -> None:
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


def test_a_fork_that_nobody_joins_is_finished_and_its_error_is_heard() -> None:
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


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_failed_step_is_heard_where_it_is_read_and_skips_the_rest() -> None:
    def script(prompt: str, sampling: dict) -> str:
        raise BackendError("max_new_tokens is -1; use 1 or more", status=400, code="invalid_request")

    backend = FakeBackend(script)
    read = []

    @function
    def reads(s: ProgramState) -> None:
        s += "a" + gen("x") + gen("y")
        try:
            s["x"]
        except ProgramError as error:
            read.append(error)
            raise

    with pytest.raises(ProgramError, match=r"gen\('x'\): max_new_tokens is -1; use 1 or more") as caught:
        reads.run(backend=backend)
    assert caught.value.status == 400 and caught.value.code == "invalid_request" and read == [caught.value]
    assert len(backend.calls) == 1

    with pytest.raises(ProgramError, match="use 1 or more"):
        two_stages.run("q", backend=backend)  # reads nothing itself


def test_an_error_of_the_program_aborts_and_releases() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()
    backend.hold.set()

    @function
    def fails(s: ProgramState) -> None:
        s += "a" + gen("x")
        assert s["x"] == "[2]"
        assert backend.hold is not None
        backend.hold.clear()
        s += gen("never") + gen("skipped")
        while len(backend.calls) < 2:
            time.sleep(0.001)
        raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError):
        fails.run(backend=backend)
    assert backend.calls[1]["rid"] in backend.aborted and len(backend.calls) == 2
    assert backend.calls[0]["rid"] in backend.released
    assert not backend.leases


def test_what_is_appended_after_the_end_is_refused() -> None:
    state = two_stages.run("q", backend=FakeBackend())
    with pytest.raises(ProgramError, match="the state has ended"):
        state += "more"
    assert state.text().startswith("q")


def test_a_forgotten_parent_is_replaced_by_all_ids() -> None:
    backend = FakeBackend(lambda prompt, sampling: "hm|" if "stop" in sampling else "ok")

    @function
    def long(s: ProgramState) -> None:
        s += "why?" + gen("a", stop="|") + " so " + gen("b")
        s.sync()
        backend.forget()
        s += " and " + gen("c")
        s.sync()
        backend.forget()
        s += select("d", ["x", "y"])
        s.sync()
        backend.forget()
        s += select("e", ["p", "q"]) + gen("f")

    state = long.run(backend=backend)
    assert state.text() == "why?hm so ok and okxpok"
    again = [call for call in backend.calls if "input_ids" in call]
    assert ["".join(map(chr, call["input_ids"])) for call in again] == [
        "^why?hm so ok and ",
        "^why?hm so ok and ok",
        "^why?hm so ok and okx",
    ]
    assert all("continuation_of" not in call for call in again)
    assert backend.records[backend.calls[-1]["rid"]] == ["^why?hm so ok and okxpok"]
    assert not backend.leases


# -- roles -------------------------------------------------------------------------------------------------------------


def test_roles_are_written_as_the_template_writes_them() -> None:
    backend = FakeBackend()

    @function
    def chat(s: ProgramState) -> None:
        s += system("be brief")
        s += user("a" + gen("odd"))
        with s.assistant():
            s += "I say " + gen("x")
        s.user("bye")
        s += user_begin()
        s += "b"
        s += user_end()
        s.role("tool", "t")

    state = chat.run(backend=backend)
    text = (
        "<system>be brief</system><user>a[32]</user><assistant>I say [60]</assistant><user>bye</user>"
        "<user>b</user><tool>t</tool>"
    )
    assert state.text() == text
    assert state.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a[32]"},
        {"role": "assistant", "content": "I say [60]"},
        {"role": "user", "content": "bye"},
        {"role": "user", "content": "b"},
        {"role": "tool", "content": "t"},
    ]
    # The template writes its special tokens itself: none are added.
    assert "".join(map(chr, backend.calls[0]["input_ids"])) == "<system>be brief</system><user>a"


def test_roles_fork() -> None:
    backend = FakeBackend()

    @function
    def chat(s: ProgramState) -> None:
        s += user("a")
        forks = s.fork(2)
        forks += lambda i: assistant(f"{i}" + gen("x"))
        forks.join()
        s += assistant("z")
        assert forks[1].messages()[-1] == {"role": "assistant", "content": "1[26]"}

    state = chat.run(backend=backend)
    assert state.messages()[-1] == {"role": "assistant", "content": "z"}


def test_misplaced_roles_are_refused() -> None:
    @function
    def nested(s: ProgramState) -> None:
        s += user("a" + system("b"))

    @function
    def ends(s: ProgramState) -> None:
        s += user_end()

    with pytest.raises(ValueError, match="a system message begins inside a user message"):
        nested.run(backend=FakeBackend())
    with pytest.raises(ValueError, match="a user message ends, but the open one is: none"):
        ends.run(backend=FakeBackend())


def test_a_template_that_refuses_is_heard() -> None:
    backend = FakeBackend(template="{{ raise_exception('roles must alternate') }}")

    @function
    def chat(s: ProgramState) -> None:
        s += user("a")

    with pytest.raises(ProgramError, match="user message: the chat template refuses these messages: roles"):
        chat.run(backend=backend)


# -- streams, asyncio, batches -----------------------------------------------------------------------------------------


def test_stream() -> None:
    ticks = threading.Semaphore(3)  # the events of "hm", and the first of what follows
    backend = FakeBackend(lambda prompt, sampling: "hm|" if "stop" in sampling else "well yes", ticks=ticks)
    state = two_stages.run("why?", backend=backend, stream=True)
    pieces = []
    for piece in state.text_iter("answer"):
        pieces.append(piece)
        ticks.release()
    assert pieces == list("well yes"), "each piece is read before the next one is there"
    backend.ticks = None
    state = two_stages.run("why?", backend=backend, stream=True)
    assert "".join(state.text_iter()) == "why?hm so well yes"
    state = two_stages.run("why?", backend=backend, stream=True)
    assert "".join(state.text_iter("answer")) == "well yes"
    assert state["thought"] == "hm" and state.text() == "why?hm so well yes"
    with pytest.raises(KeyError):
        list(state.text_iter("nothing"))
    state.sync()
    assert not backend.leases


def test_readers_of_a_stream_hear_of_errors() -> None:
    def script(prompt: str, sampling: dict) -> str:
        if "so" in prompt:
            raise BackendError("enough", status=500)
        return "hm|"

    state = two_stages.run("why?", backend=FakeBackend(script), stream=True)
    heard = []
    with pytest.raises(ProgramError, match="enough"):
        for piece in state.text_iter():
            heard.append(piece)
    assert "".join(heard) == "why?hm so "
    assert state["thought"] == "hm"
    with pytest.raises(ProgramError, match="enough"):
        state["answer"]
    with pytest.raises(ProgramError, match="enough"):
        state.sync()

    @function
    def broken(s: ProgramState) -> None:
        s += "a"
        raise ZeroDivisionError("oops")

    state = broken.run(backend=FakeBackend(), stream=True)
    with pytest.raises(ProgramError, match=r"the program failed: ZeroDivisionError\('oops'\)"):
        list(state.text_iter())


def test_asyncio() -> None:
    backend = FakeBackend()

    async def run() -> None:
        states = await asyncio.gather(*(two_stages.run_async(f"{i}", backend=backend) for i in range(20)))
        assert [state.text() for state in states[:2]] == ["0[2] so [9]", "1[2] so [9]"]
        state = two_stages.run("why?", backend=backend, stream=True)
        assert "".join([piece async for piece in state.text_async_iter()]) == "why?[5] so [12]"
        state = two_stages.run("why?", backend=backend, stream=True)
        assert "".join([piece async for piece in state.text_async_iter("answer")]) == "[12]"
        # The answer is there before the program has ended; the whole text ends with it.
        assert "".join([piece async for piece in state.text_async_iter()]) == "why?[5] so [12]"
        with pytest.raises(ValueError, match="text_async_iter"):
            await two_stages.run_async("q", backend=backend, stream=True)

    asyncio.run(run())
    assert not backend.leases


def test_a_cancelled_task_aborts() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(two_stages.run_async("q", backend=backend))
        while not backend.calls:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    deadline = time.monotonic() + 10
    while backend.calls[0]["rid"] not in backend.aborted:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    items = [{"question": "x" * i} for i in range(1, 30)]
    states = two_stages.run_batch(items, backend=backend, num_threads=4, progress_bar=True, temperature=0.0)
    assert [state["thought"] for state in states] == [f"[{i + 1}]" for i in range(1, 30)]
    assert "29/29" in capsys.readouterr().err
    assert two_stages.run_batch([("abc",)], backend=backend)[0]["thought"] == "[4]"
    assert two_stages.run_batch([], backend=backend) == []
    assert not backend.leases
    with pytest.raises(ValueError, match="num_threads is 0"):
        two_stages.run_batch(items, backend=backend, num_threads=0)
    with pytest.raises(TypeError, match="question is no option"):
        two_stages.run_batch(items, backend=backend, question="q")


def test_the_first_failure_stops_a_batch() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    @function
    def some(s: ProgramState, i: int) -> None:
        s += "a" + gen("x")
        if i == 1:
            raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError) as caught:
        some.run_batch([{"i": i} for i in range(50)], backend=backend, num_threads=2)
    assert caught.value.__notes__ == ["in program 1 of the batch: {'i': 1}"]
    assert len(backend.calls) <= 4 and not backend.leases


def test_state_is_read_by_waiting() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    @function
    def waits(s: ProgramState) -> None:
        s += "a" + gen("x")
        assert s.error() is None
        threading.Timer(0.02, backend.hold.set).start()  # type: ignore[union-attr]
        assert s["x"] == "[2]"

    waits.run(backend=backend)


def test_a_streaming_program_can_be_stopped() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()
    state = two_stages.run("q", backend=backend, stream=True)
    while not backend.calls:
        time.sleep(0.001)
    state.cancel()
    with pytest.raises(ProgramError, match=r"gen\('thought'\): aborted") as caught:
        list(state.text_iter())
    assert caught.value.code == "stopped" and len(backend.calls) == 1 and not backend.leases
    with pytest.raises(ProgramError):
        state["answer"]


def test_ctrl_c_while_the_last_steps_run_aborts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    def interrupted(self: Interpreter) -> None:
        while not backend.calls:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(Interpreter, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two_stages.run("q", backend=backend)
    assert backend.aborted and len(backend.calls) == 1


# -- what cannot be a program ------------------------------------------------------------------------------------------


def test_functions_that_cannot_be_programs() -> None:
    async def later(s: ProgramState) -> None: ...

    def nothing() -> None: ...

    def shadows(s: ProgramState, temperature: float) -> None: ...

    with pytest.raises(TypeError, match="later is async"):
        function(later)
    with pytest.raises(TypeError, match="takes no state"):
        function(nothing)
    with pytest.raises(TypeError, match=r"has the parameter temperature, which is an option of run\(\)"):
        function(shadows)
    with pytest.raises(TypeError, match="elsewhere use run"):
        two_stages("question")  # type: ignore[arg-type]


def test_programs_call_programs() -> None:
    @function
    def outer(s: ProgramState) -> None:
        s += "outer "
        assert two_stages(s, "inner") == "returned"

    assert outer.run(backend=FakeBackend()).text() == "outer inner[12] so [20]"


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), "5"])
def test_retain_ttl_is_checked(ttl: Any) -> None:
    with pytest.raises(ValueError, match="retain_ttl is"):
        two_stages.run("q", backend=FakeBackend(), retain_ttl=ttl)
