"""The Engine: threads instead of processes, the same answers, and ends that reach every caller."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.engine import Engine, EngineError
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.server_config import UsageError
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import WorkerConfig
from baton.runtime.stop_signal import StopSignal
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.fake_worker import run_fake_worker

LONG = {"max_new_tokens": 4000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def fake(**behaviour: Any) -> Callable:
    return lambda config, endpoints, stop: run_fake_worker(endpoints, stop, behaviour)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model_path=model, worker=fake(step_s=0.002)) as running:
        yield running


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_fields_without_effect_are_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        engine.generate("abc", {"max_new_tokens": 1, "repeat_last_n": 64})
    (line,) = [record.message for record in caplog.records if "has no effect" in record.message]
    assert "repeat_last_n" in line


def test_generate(engine: Engine) -> None:
    answer = engine.generate("abc", {"max_new_tokens": 4}, rid="mine")
    assert answer["text"] == "abca" and answer["meta_info"]["id"] == "mine"
    assert engine.generate(text="abc", sampling_params={"max_new_tokens": 4})["text"] == "abca"
    for ids in ([97, 98], (97, 98), np.array([97, 98])):
        assert engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 3})["text"] == "aba"
    assert engine.generate("ab", SamplingParams(max_new_tokens=2, logit_bias={1: 1.0}))["text"] == "ab"
    answers = engine.generate(["ab", "x"], {"n": 2, "max_new_tokens": 2})
    assert [answer["text"] for answer in answers] == ["ab", "ba", "xx", "xx"]


def test_stream(engine: Engine) -> None:
    texts = [output["text"] for output in engine.generate("né", {"max_new_tokens": 6}, stream=True)]
    assert texts[-1] == "néné" and all(texts[-1].startswith(text) for text in texts)
    last = {o["index"]: o["text"] for o in engine.generate(["a", "b"], {"max_new_tokens": 3}, stream=True)}
    assert last == {0: "aaa", 1: "bbb"}


def test_dropped_stream_is_aborted(engine: Engine) -> None:
    stream = engine.generate("abc", LONG, stream=True, rid="dropped")
    next(stream)
    del stream
    gc.collect()
    wait_until(lambda: engine.abort() == [], "the dropped stream is still open")


def test_asyncio(engine: Engine) -> None:
    async def run() -> None:
        answers = await asyncio.gather(*(engine.async_generate(f"<{i}>", {"max_new_tokens": 9}) for i in range(50)))
        assert [answer["text"] for answer in answers] == [(f"<{i}>" * 4)[:9] for i in range(50)]
        outputs = [output async for output in await engine.async_generate("abc", {"max_new_tokens": 3}, stream=True)]
        assert outputs[-1]["text"] == "abc"
        task = asyncio.create_task(engine.async_generate("abc", LONG, rid="cancelled"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_until(lambda: engine.abort() == [], "a cancelled call is still open")


def test_abort_ends_with_what_was_generated(engine: Engine) -> None:
    answers: list[dict] = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate("abc", LONG, rid="victim")))
    thread.start()
    wait_until(lambda: engine.abort("victim") == ["victim"], "the request never opened")
    thread.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_server_info_flush_encode_and_decode(engine: Engine) -> None:
    assert engine.get_server_info()["vocab_size"] == 257
    wait_until(lambda: engine.abort() == [], "something runs")
    engine.flush_cache()
    assert engine.decode(engine.encode("né <eos>")) == "né "
    assert engine.decode(engine.encode("<eos>"), skip_special_tokens=False) == "<eos>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "a", "text": "b"}, "given twice"),
        ({"prompt": "a", "sampling_params": {"temprature": 0}}, "did you mean"),
        ({"prompt": "\ud800"}, "not valid Unicode"),
        ({"input_ids": [1, 300]}, "300"),
        ({}, "both are missing"),
    ],
)
def test_refusals(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        engine.generate(**fields)


SURROGATE = "\ud800"
"""No UTF-8 says it. JSON is refused with it; in process, only the Engine sees it."""


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.delete_item_trie(5),
        lambda engine: engine.delete_item_trie(SURROGATE),
        lambda engine: engine.load_item_trie(5, np.array([[1, 2]])),
        lambda engine: engine.end_job(5),
        lambda engine: engine.end_job(SURROGATE),
        lambda engine: engine.release(SURROGATE),
        lambda engine: engine.get_cache_leases("a"),
        lambda engine: engine.get_cache_leases(2**64),
        lambda engine: engine.get_cache_leases(0, 0),
        lambda engine: engine.generate("a", rid=SURROGATE),
        lambda engine: engine.generate("a", job_id=SURROGATE),
        lambda engine: engine.generate("a", continuation_of=SURROGATE),
        lambda engine: engine.generate("a", {"stop": SURROGATE}),
        lambda engine: engine.generate("a", {"item_trie": SURROGATE}),
        lambda engine: engine.generate("a", {5: 6}),
        lambda engine: engine.generate("a", {"logit_bias": {5.5: 1}}),
        lambda engine: asyncio.run(engine.async_delete_item_trie(5)),
    ],
)
def test_unserializable_values_are_refused_and_engine_survives(
    engine: Engine, call: Callable[[Engine], object]
) -> None:
    """The wrong type in a message would end the worker that reads it."""
    with pytest.raises(RequestRefused) as caught:
        call(engine)
    assert status_of(caught.value) == 400
    assert engine.generate("ab", {"max_new_tokens": 2})["text"] == "ab"


def test_numpy_numbers_are_accepted(engine: Engine) -> None:
    sampling = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "stop_token_ids": np.array([1, 2])}
    assert engine.generate("ab", sampling | {"logit_bias": {np.int64(1): np.float32(1)}})["text"] == "aba"


def test_engines_draw_different_seeds_unless_given(model: Path) -> None:
    seeds: list[int | None] = []

    def worker(config: WorkerConfig, endpoints: Any, stop: StopSignal) -> None:
        seeds.append(config.scheduler.random_seed)
        run_fake_worker(endpoints, stop, {})

    for settings in ({}, {}, {"random_seed": 5}, {"random_seed": 5}):
        with Engine(model_path=model, worker=worker, **settings) as running:
            assert running.args.scheduler.random_seed == seeds[-1]
    assert None not in seeds and len(set(seeds[:2])) == 2 and seeds[2:] == [5, 5]


def test_invalid_engine_settings_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="did you mean page_size"):
        Engine(model_path=model, page_sise=1)
    with pytest.raises(ModelLoadError, match="no such folder"):
        Engine(model_path="/no/such/folder")


def test_worker_start_error_is_raised(model: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ModelLoadError, match="weights are missing"):
        Engine(model_path=model, worker=fake(start_error="weights are missing"))
    assert threading.active_count() == threads


def test_slow_worker_start_times_out(model: Path) -> None:
    with pytest.raises(EngineError, match=r"not ready within 0\.2 s"):
        Engine(model_path=model, worker=fake(start_hang=True), ready_timeout=0.2)


@pytest.mark.parametrize("behaviour", [{"crash_after": 3}, {"exit_after": 3}])
def test_worker_death_fails_open_and_later_calls(model: Path, behaviour: dict) -> None:
    with Engine(model_path=model, worker=fake(**behaviour)) as engine:
        reason = "caught fire" if "crash_after" in behaviour else "ended by itself"
        for _ in range(2):
            with pytest.raises(RequestRefused, match=reason) as caught:
                engine.generate("abc", LONG)
            assert status_of(caught.value) == 503 and caught.value.__cause__ is not None


def test_shutdown_fails_open_calls_and_leaves_no_thread(model: Path) -> None:
    threads = threading.active_count()
    engine = Engine(model_path=model, worker=fake(step_s=0.01))
    errors: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate("abc", LONG, rid="open")
        except RequestRefused as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: engine._manager.num_open == 1, "the request never opened")
    engine.shutdown()
    engine.shutdown()
    thread.join(60)
    assert [str(error) for error in errors] == ["the engine has been shut down"]
    assert threading.active_count() == threads
    with pytest.raises(EngineError, match="make a new one"):
        engine.generate("abc")


def test_dropped_engine_leaves_no_thread(model: Path) -> None:
    threads = set(threading.enumerate())

    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread not in threads}

    engine = Engine(model_path=model, worker=fake(step_s=0.01))
    stream = engine.generate("abc", LONG, stream=True)
    next(stream)
    del engine
    gc.collect()
    next(stream)
    assert ours(), "a stream that is open keeps its engine"
    del stream
    gc.collect()
    wait_until(lambda: not ours(), "the threads of a dropped engine go on")


def test_engine_calls_in_a_forked_process_are_refused(model: Path) -> None:
    """In a process of its own: this one has threads of which a fork could copy a held lock."""
    script = """
        import asyncio, gc, os, sys
        from pathlib import Path
        from tests.doubles.fake_worker import run_fake_worker
        from baton.entrypoints.engine import Engine, EngineError

        def worker(config, endpoints, stop):
            run_fake_worker(endpoints, stop, {"step_s": 0.005})

        with Engine(model_path=Path(sys.argv[1]), worker=worker) as engine:
            stream = engine.generate("abc", {"max_new_tokens": 4000}, stream=True)
            next(stream)
            engine._threads._crossing.acquire()  # as another thread may have it at this moment
            if not (child := os.fork()):
                calls = [
                    lambda: engine.generate("abc", {"max_new_tokens": 2}),
                    lambda: asyncio.run(engine.async_generate("abc", {"max_new_tokens": 2})),
                    lambda: next(engine.generate("abc", {"max_new_tokens": 2}, stream=True)),
                    lambda: next(stream),
                    engine.abort, engine.get_server_info, engine.flush_cache,
                ]
                for call in calls:
                    try:
                        call()
                    except EngineError as error:
                        assert f"belongs to process {os.getppid()} and has no threads in process" in str(error), error
                    else:
                        raise AssertionError("answered")
                assert engine.decode(engine.encode("abc")) == "abc"
                engine.shutdown()
                del engine, stream
                gc.collect()
                sys.exit(7)  # through the handlers of atexit
            engine._threads._crossing.release()
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
            next(stream)
            assert engine.generate("abc", {"max_new_tokens": 2})["text"] == "ab"
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(model)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,  # the call that hung here never ended
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_calls_during_shutdown_end(model: Path) -> None:
    """Threads and tasks that call on while the engine goes: answered, refused, or told that it is gone."""
    for _ in range(5):
        engine = Engine(model_path=model, worker=fake())
        ends: list[str] = []

        def call_on(engine: Engine = engine, ends: list[str] = ends) -> None:
            try:
                while True:
                    engine.generate("a", {"max_new_tokens": 1})
            except (RequestRefused, EngineError) as error:
                ends.append(str(error))

        async def call_together(engine: Engine = engine, ends: list[str] = ends) -> None:
            async def one() -> None:
                try:
                    while True:
                        await engine.async_generate("a", {"max_new_tokens": 1})
                except (RequestRefused, EngineError) as error:
                    ends.append(str(error))

            await asyncio.gather(*(one() for _ in range(6)))

        callers = [
            threading.Thread(target=call_on),
            threading.Thread(target=lambda run=call_together: asyncio.run(run())),
        ]
        for caller in callers:
            caller.start()
        time.sleep(0.05)
        engine.shutdown()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive(), "a call never ended"
        assert len(ends) == 7 and all("shut down" in end for end in ends), ends


def test_two_engines_run_in_one_process(model: Path) -> None:
    with Engine(model_path=model, worker=fake()) as one, Engine(model_path=model, worker=fake()) as two:
        assert one.generate("a", {"max_new_tokens": 2})["text"] == "aa"
        assert two.generate("b", {"max_new_tokens": 2})["text"] == "bb"
