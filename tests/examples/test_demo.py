"""`make demo` ends well on the toy model, and says what is wrong when it cannot."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_demo_shows_answers_and_cached_tokens() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "I found the value of port 48 in ./src/core/app.conf." in done.stdout
    assert "The server has shut down cleanly." in done.stdout
    rows = {
        label.strip(): [int(number) for number in numbers]
        for label, *numbers in re.findall(r"^  (\w[\w, ]+?) +(\d+) +(\d+) \(\d+%\) +(\d+) +(\d+)$", done.stdout, re.M)
    }
    assert rows["agent, turn 1"][1] == 0
    for row in ("agent, turn 2", "agent, turn 3"):
        prompt, cached, computed, _ = rows[row]
        assert cached > computed > 0 and cached + computed == prompt, row
    assert re.search(r"item 1 \| +-0\.\d+ +\d\d\.\d+%   \w+ \w+ +mystery novels +(<s_[abc]_\d+>){3}\n", done.stdout)
    assert "32 of 32 ids are in the catalogue of 320" in done.stdout
    computed, prompt = re.findall(r"stage 2 \| (\d+) of (\d+) prompt tokens computed; path handoff: ", done.stdout)[0]
    assert int(computed) <= 5 and int(prompt) > 100


def test_demo_fails_with_the_server_error(tmp_path: Path) -> None:
    done = run_demo("--model-path", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "DEMO FAILED" in done.stderr and "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_the_server_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    demo = subprocess.Popen([sys.executable, str(DEMO), "--log", str(log)], stdout=subprocess.DEVNULL)
    started: list[psutil.Process] = []
    try:
        while len(started := psutil.Process(demo.pid).children(recursive=True)) < 3:  # launcher, worker, detokenizer
            assert demo.poll() is None
            time.sleep(0.05)
        demo.terminate()
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left and demo.wait(60) == 130
    finally:
        for process in (demo, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        demo.wait()


def test_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = run_demo("--log", str(tmp_path / "nothing" / "log"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"cannot be started: [Errno 2] No such file or directory: '{tmp_path}/nothing/log'" in done.stderr
