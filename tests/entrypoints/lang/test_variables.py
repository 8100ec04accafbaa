"""Variables that no gen made: set by the program, parts of the text, copies, and what is known of a stream so far."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from baton.entrypoints.lang import (
    BackendError,
    ProgramError,
    ProgramState,
    flush_cache,
    function,
    gen,
    get_server_info,
    set_default_backend,
    user,
)
from tests.doubles.example_programs import two_stages
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


def test_programs_set_variables() -> None:
    backend = FakeBackend()

    @function
    def sets(s: ProgramState) -> None:
        s.set_var("a", {"any": "value"})
        s["b"] = None
        s += "text" + gen("c")
        s["c"] = s["c"].upper() + "!"
        assert "a" in s and s["a"] == {"any": "value"} and s.get_var("b") is None
        assert s.get_meta_info("a") is None

    state = sets.run(backend=backend)
    assert state["c"] == "[5]!" and state.text() == "text[5]", "a variable is not the text"
    state["d"] = 4
    assert state["d"] == 4, "also once the program has ended"


def test_var_scope_captures_its_text() -> None:
    backend = FakeBackend()

    @function
    def scopes(s: ProgramState) -> None:
        s += "a"
        with s.var_scope("outer"):
            s += "b" + gen("x")
            with s.var_scope("inner"):
                s += user("c")
            s += "d"
        s += "e"
        assert s["inner"] == "<user>c</user>"

    state = scopes.run(backend=backend)
    assert state["outer"] == "b[3]<user>c</user>d" and state.text() == "ab[3]<user>c</user>de"
    assert state.get_meta_info("outer") is None
    streamed = scopes.run(backend=backend, stream=True)
    assert "".join(streamed.text_iter("outer")) == "b[3]<user>c</user>d"


def test_var_scope_with_failed_step_raises_its_error() -> None:
    def script(prompt: str, sampling: dict[str, Any]) -> str:
        raise BackendError("no", status=500)

    @function
    def fails(s: ProgramState) -> None:
        with s.var_scope("part"):
            s += "a" + gen("x")
        with pytest.raises(ProgramError, match=r"gen\('x'\): no"):
            s["part"]
        assert isinstance(s.error(), ProgramError)

    with pytest.raises(ProgramError, match="no"):
        fails.run(backend=FakeBackend(script))


def test_var_scope_contains_forks() -> None:
    @function
    def scopes(s: ProgramState) -> None:
        with s.var_scope("part"):
            s += "a"
            forks = s.fork(2)
            forks += lambda i: f"{i}"
            s += "b"
        with forks[0].var_scope("own"):
            forks[0] += gen("x")
        forks.join()

    state = scopes.run(backend=FakeBackend())
    assert state["part"] == "ab" and state["own"] == ["[3]"]


def test_copies() -> None:
    backend = FakeBackend()

    @function
    def copies(s: ProgramState) -> None:
        s += "a"
        s["kept"] = 1
        with s.copy() as other:
            other += "b" + gen("x")
            assert other["kept"] == 1
        assert s["x"] == ["[3]"]
        s += "c" + gen("y")
        with pytest.raises(ValueError, match="position_ids_offset is not supported"):
            s.fork(2, position_ids_offset=[1, 2])  # type: ignore[arg-type]

    state = copies.run(backend=backend)
    assert state.text() == "ac[3]" and not backend.leases
    assert backend.computed == ["^a", "b", "c"]


def test_error_waits_for_pending_steps() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    @function
    def waits(s: ProgramState) -> None:
        s += "a" + gen("x", max_tokens=1)
        threading.Timer(0.02, backend.hold.set).start()  # type: ignore[union-attr]
        assert s.error() is None and s._interpreter.variables["x"]._done.is_set()

    state = waits.run(backend=backend)
    assert str(state) == "ProgramState(a[)"


def test_stream_pieces_carry_meta_data() -> None:
    ticks = threading.Semaphore(1000)
    backend = FakeBackend(lambda prompt, sampling: "hm|" if "stop" in sampling else "well yes", ticks=ticks)

    async def read() -> list[tuple[str, Any]]:
        state = two_stages.run("why?", backend=backend, stream=True)
        with pytest.raises(ValueError, match="return_meta_data needs var_name"):
            _ = [piece async for piece in state.text_async_iter(return_meta_data=True)]
        return [item async for item in state.text_async_iter(var_name="answer", return_meta_data=True)]

    items = asyncio.run(read())
    assert "".join(piece for piece, _ in items) == "well yes"
    assert items[-1][1]["finish_reason"] == {"type": "length", "length": 8}
    assert items[-1][1]["completion_tokens"] == 8


def test_last_meta_data_arrives_without_new_text() -> None:
    class Quiet(FakeBackend):
        """Ends with an event that has no new text, as where the last token is a stop token."""

        def stream(self, fields: dict[str, Any]) -> Any:
            answer = self.generate(fields)
            yield {**answer, "meta_info": {"finish_reason": None}}
            reader.wait()
            yield answer

    reader = threading.Event()
    backend = Quiet()

    @function
    def one(s: ProgramState) -> None:
        s += "a" + gen("x")

    async def read() -> list[tuple[str, Any]]:
        items = []
        async for item in one.run(backend=backend, stream=True).text_async_iter("x", return_meta_data=True):
            items.append(item)
            reader.set()
        return items

    first, last = asyncio.run(read())
    assert first == ("[2]", {"finish_reason": None})
    assert last[0] == "" and last[1]["finish_reason"] == {"type": "length", "length": 3}

    async def plain() -> list[str]:
        pieces = []
        async for piece in one.run(backend=backend, stream=True).text_async_iter("x"):
            pieces.append(piece)
            reader.set()
        return pieces

    reader.clear()
    assert asyncio.run(plain()) == ["[2]"], "without meta there are no empty pieces"


def test_module_functions_call_the_default_backend() -> None:
    class Flushable(FakeBackend):
        flushed = 0

        def flush_cache(self) -> None:
            self.flushed += 1

        def get_server_info(self) -> dict[str, Any]:
            return {"flushed": self.flushed}

    backend = Flushable()
    for call in (flush_cache, get_server_info):
        with pytest.raises(ValueError, match="no backend"):
            call()
        with pytest.raises(TypeError, match=rf"FakeBackend has no method {call.__name__}\(\)"):
            call(FakeBackend())
    flush_cache(backend)
    set_default_backend(backend)
    try:
        flush_cache()
        assert get_server_info() == {"flushed": 2}
    finally:
        set_default_backend(None)
