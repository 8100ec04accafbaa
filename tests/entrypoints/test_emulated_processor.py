"""A server on a processor of 2013 (Haswell: AVX2), played by qemu: all its processes run emulated.

Slow: compiling takes qemu minutes. Needs ``qemu-x86_64`` (Debian: qemu-user)."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("numba")

QEMU = shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(QEMU is None or platform.machine() != "x86_64", reason="needs qemu-x86_64 on x86-64"),
]

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
START_S = 1500
PROMPTS = [[5, 17, 300, 41, 9, 1001, 3], list(range(40, 120)), [1699, 88, 12, 12, 700, 60]]
LAUNCH = "import sys; sys.executable = {!r}; from baton.entrypoints.command import main; main()"


@contextmanager
def server(folder: Path, caches: Path, command: list[str], *flags: str) -> Iterator[str]:
    """Its address. command: starts Python. folder: for its log, which a failure shows."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shim = folder / "python"  # starts the processes
    shim.write_text("#!/bin/sh\nexec " + " ".join(command) + ' "$@"\n')
    shim.chmod(0o755)
    variables = {"NUMBA_CACHE_DIR": str(caches / "numba"), "BATON_CACHE_DIR": str(caches / "trials")}
    arguments = ["serve", "--model-path", str(TOY), "--port", str(port), "--attention-backend", "numba", *flags]
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(shim), "-c", LAUNCH.format(str(shim)), *arguments],
            env=os.environ | variables,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while not _is_ready(url):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=120)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def tokens(url: str) -> list[list[int]]:
    body = {
        "input_ids": PROMPTS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    return [each["output_ids"] for each in answer.json()]


@pytest.mark.parametrize("flags", [(), ("--quantization", "int8")], ids=["float32", "int8"])
def test_haswell_gives_the_tokens_of_this_processor(flags: tuple[str, ...], tmp_path: Path) -> None:
    """With caches that this processor has filled: code and trials of another one must not be taken."""
    assert QEMU is not None
    caches = tmp_path / "caches"
    with server(tmp_path / "here", caches, [sys.executable], *flags) as url:
        expected = tokens(url)
    compiled = set(caches.rglob("*.nbc"))
    with server(tmp_path / "haswell", caches, [QEMU, "-cpu", "Haswell", sys.executable], *flags) as url:
        assert tokens(url) == expected
    assert all(len(each) == 16 for each in expected)
    assert compiled and compiled < set(caches.rglob("*.nbc"))


def test_a_level_above_the_emulated_processor_runs_its_own_instructions() -> None:
    """Numba compiles for what it is told, without asking whether the processor has it."""
    script = """
import numba
import numpy as np
import torch
from baton.attention import processor

@numba.njit
def clamp(values):
    for place in range(values.shape[0]):
        values[place] = values[place] if values[place] > 2 else np.float32(3)

values = np.ones(1000, np.float32)
clamp(values)
print(torch.backends.cpu.get_cpu_capability(), values.sum(), "zmm" in next(iter(clamp.inspect_asm().values())))
"""
    assert QEMU is not None
    done = subprocess.run(
        [QEMU, "-cpu", "Haswell", sys.executable, "-c", script],
        env=os.environ | {"BATON_CPU_FEATURES": "avx512"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == ["AVX2", "3000.0", "False"], done.stderr
