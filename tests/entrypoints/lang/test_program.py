"""The meaning of programs, on a server that records its requests."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from baton.entrypoints.lang import (
    BackendError,
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
from tests.doubles.example_programs import two_stages
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


def test_each_step_continues_the_previous_one() -> None:
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


def test_text_alone_sends_no_request() -> None:
    backend = FakeBackend()

    @function
    def silent(s: ProgramState) -> None:
        s += "a"
        s += "b"

    assert silent.run(backend=backend).text() == "ab"
    assert backend.calls == [] and backend.released == []


def test_consecutive_and_unnamed_gens() -> None:
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
    with pytest.raises(TypeError, match="backend is 7; give an Engine, a Runtime, the URL"):
        two_stages.run("q", backend=7)


def test_n_samples_are_a_list_and_the_first_is_continued() -> None:
    backend = FakeBackend()

    @function
    def several(s: ProgramState) -> None:
        s += "a" + gen("xs", n=3) + gen("y")

    state = several.run(backend=backend)
    assert state["xs"] == ["[2]0", "[2]1", "[2]2"] and len(state.meta("xs")) == 3
    assert state.text() == "a[2]0[6]", "the state goes on with the first"
    assert not backend.leases, "the leases of the others were given up"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_failed_step_raises_on_read_and_skips_the_rest() -> None:
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


def test_program_error_aborts_requests_and_releases_leases() -> None:
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


def test_appending_after_the_end_is_refused() -> None:
    state = two_stages.run("q", backend=FakeBackend())
    with pytest.raises(ProgramError, match="the state has ended"):
        state += "more"
    assert state.text().startswith("q")


def test_forgotten_parent_is_replaced_by_full_input_ids() -> None:
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


def test_roles_are_rendered_by_the_template() -> None:
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


def test_messages_are_copied_to_forks() -> None:
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


def test_template_refusal_is_raised() -> None:
    backend = FakeBackend(template="{{ raise_exception('roles must alternate') }}")

    @function
    def chat(s: ProgramState) -> None:
        s += user("a")

    with pytest.raises(ProgramError, match="user message: the chat template refuses these messages: roles"):
        chat.run(backend=backend)


# -- what cannot be a program ------------------------------------------------------------------------------------------


def test_unsupported_functions_are_not_programs() -> None:
    async def later(s: ProgramState) -> None: ...

    def nothing() -> None: ...

    with pytest.raises(TypeError, match="later is async"):
        function(later)
    with pytest.raises(TypeError, match="takes no state"):
        function(nothing)
    with pytest.raises(ValueError, match="num_api_spec_tokens is not supported"):
        function(num_api_spec_tokens=64)  # type: ignore[arg-type]
    for method in (two_stages.trace, two_stages.cache):
        with pytest.raises(NotImplementedError, match=f"{method.__name__} is not supported"):
            method(backend=FakeBackend())


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
