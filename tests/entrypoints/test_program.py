"""How programs end, as the shell that started them sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(work: str) -> subprocess.CompletedProcess[str]:
    """Run a program's body whose output nothing reads."""
    reading, writing = os.pipe()
    os.close(reading)
    program = f"import sys; from baton.entrypoints.program import run_program; sys.exit(run_program('p', {work}))"
    try:
        return subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_closed_pipe_ends_a_program_without_a_traceback(size: int) -> None:
    """The shorter output is still in a buffer when the body returns."""
    done = run(f"lambda: print('x' * {size}) or 0")
    assert (done.returncode, done.stderr) == (1, "")


def test_interrupt_ends_a_program_without_a_traceback() -> None:
    done = run("lambda: __import__('os').kill(__import__('os').getpid(), 2) or __import__('time').sleep(60)")
    assert (done.returncode, done.stderr) == (130, "p: interrupted\n")
