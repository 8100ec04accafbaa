"""Programs seen while they run: streams, asyncio, batches, and how each of them is stopped."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from baton.entrypoints.lang import BackendError, ProgramError, ProgramState, function, gen
from baton.entrypoints.lang.interpreter import Interpreter
from tests.doubles.example_programs import two_stages
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


def test_stream() -> None:
    ticks = threading.Semaphore(3)  # the events of "hm", and the first of what follows
    backend = FakeBackend(lambda prompt, sampling: "hm|" if "stop" in sampling else "well yes", ticks=ticks)
    state = two_stages.run("why?", backend=backend, stream=True)
    pieces = []
    for piece in state.text_iter("answer"):
        pieces.append(piece)
        ticks.release()
    assert pieces == list("well yes"), "each piece is read before the next one is there"
    state.sync()  # what it leased is given back after its last piece
    backend.ticks = None
    state = two_stages.run("why?", backend=backend, stream=True)
    assert "".join(state.text_iter()) == "why?hm so well yes"
    state.sync()
    state = two_stages.run("why?", backend=backend, stream=True)
    assert "".join(state.text_iter("answer")) == "well yes"
    assert state["thought"] == "hm" and state.text() == "why?hm so well yes"
    with pytest.raises(KeyError):
        list(state.text_iter("nothing"))
    state.sync()
    assert not backend.leases


def test_stream_readers_get_errors() -> None:
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


def test_cancelled_task_aborts_its_request() -> None:
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
    deadline = time.monotonic() + 60
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
    with pytest.raises(TypeError, match="question is not an option"):
        two_stages.run_batch(items, backend=backend, question="q")


def test_first_failure_stops_a_batch() -> None:
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


def test_reading_state_waits_for_its_step() -> None:
    backend = FakeBackend()
    backend.hold = threading.Event()

    @function
    def waits(s: ProgramState) -> None:
        s += "a" + gen("x")
        threading.Timer(0.02, backend.hold.set).start()  # type: ignore[union-attr]
        assert s["x"] == "[2]"
        backend.hold.clear()  # type: ignore[union-attr]
        s += gen("y")
        threading.Timer(0.02, backend.hold.set).start()  # type: ignore[union-attr]
        assert s.error() is None and s.text() == "a[2][5]"

    waits.run(backend=backend)


def test_streaming_program_can_be_cancelled() -> None:
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


def test_ctrl_c_aborts_running_steps(monkeypatch: pytest.MonkeyPatch) -> None:
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
