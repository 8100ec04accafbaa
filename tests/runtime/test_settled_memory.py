"""Memory that processes free at the end of their start."""

from __future__ import annotations

import contextlib
import gc
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from baton.entrypoints.engine import Engine
from baton.runtime import detokenizer, worker
from baton.runtime.channels import Endpoints
from baton.runtime.launcher.child_process import DetokenizerProcess
from baton.runtime.launcher.server_processes import DETOKENIZER_MODULE, WORKER_MODULE
from baton.runtime.settled_memory import keep_imports, pause_collection, return_free_memory, settle_memory
from baton.runtime.stop_signal import StopSignal
from tests.doubles.byte_tokenizer import write_byte_tokenizer

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone keeps memory between what is in use")
def test_memory_between_what_is_in_use_is_returned() -> None:
    blocks = [(np.ones(60_000, dtype=np.uint8), bytearray(1000)) for _ in range(2000)]
    kept = [small for _, small in blocks]
    del blocks
    before = psutil.Process().memory_info().rss
    return_free_memory()
    assert before - psutil.Process().memory_info().rss > 80 << 20 and len(kept) == 2000


def test_settled_process_has_no_garbage_and_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("baton.runtime.settled_memory.return_free_memory", lambda: calls.append("returned"))
    garbage: list = []
    garbage.append(garbage)
    del garbage
    try:
        settle_memory()
        assert gc.get_freeze_count() > 10_000 and calls == ["returned"]
        assert gc.collect() < 10
    finally:
        gc.unfreeze()


def test_worker_settles_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(worker, "settle_memory", lambda: calls.append("settled"))
    monkeypatch.setattr(worker.EventLoop, "run", lambda self, stop: calls.append("serving"))
    # The loop ends at once. Whether the engine notices before it is closed is a matter of chance.
    with contextlib.suppress(Exception), Engine(model_path=TOY_MODEL, device="cpu"):
        pass
    assert calls == ["settled", "serving"]


def test_detokenizer_settles_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(detokenizer, "settle_memory", lambda: calls.append("settled"))
    monkeypatch.setattr(detokenizer, "run_detokenizer", lambda *_: calls.append("serving"))
    process = DetokenizerProcess(
        endpoints=Endpoints.for_threads(),
        parent_pid=0,
        failure_fd=2,
        tokenizer_path=str(write_byte_tokenizer(tmp_path)),
    )
    detokenizer._main(process, StopSignal())
    assert calls == ["settled", "serving"]


def test_paused_collection_ends_with_the_start() -> None:
    try:
        before = gc.get_freeze_count()
        keep_imports()
        assert gc.isenabled() and gc.get_freeze_count() == before, "nothing is paused"
        pause_collection()
        assert not gc.isenabled()
        keep_imports()
        assert gc.get_freeze_count() > 10_000
        settle_memory()
        assert gc.isenabled()
        gc.disable()
        settle_memory()
        assert not gc.isenabled(), "what a user's program has chosen stays"
    finally:
        gc.enable()
        gc.unfreeze()


def test_child_starts_without_collection(tmp_path: Path) -> None:
    script = "import gc, sys; print(gc.isenabled(), sys.argv[1:], __name__); sys.exit(3)"
    (tmp_path / "child_of_this_test.py").write_text(script)
    command = [sys.executable, *WORKER_MODULE[:-1], "child_of_this_test", "a", "b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "False ['a', 'b'] __main__\n"), done.stderr
    assert WORKER_MODULE[-1] == "baton.runtime.worker" and DETOKENIZER_MODULE[-1] == "baton.runtime.detokenizer"
