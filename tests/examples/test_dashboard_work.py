"""The server takes the requests of `examples.dashboard_work`, with handoffs for its programs and agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.dashboard_work import Work
from tests.doubles.server_under_test import ServerUnderTest, free_port

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
FLAGS = ("--max-total-tokens", "8192", "--device", "cpu", "--dtype", "float32")


@pytest.mark.slow
def test_dashboard_work_runs_with_handoffs(tmp_path: Path) -> None:
    with ServerUnderTest(ROOT / "examples" / "toy_model", tmp_path, *FLAGS, behaviour=None) as server:
        server.wait_ready()
        work = Work(server.url).start()
        server.wait_until(lambda: work.errors or server.metric("leases_handed_off_total") >= 3, "a handoff", 60)
        work.stop()
        assert work.errors == [] and work.answers > 5


def test_unreachable_server_is_reported() -> None:
    command = [sys.executable, "-m", "examples.dashboard_work", "--url", f"http://127.0.0.1:{free_port()}"]
    done = subprocess.run([*command, "--seconds", "2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout.endswith("0 answers\n")
    assert "failed: agent 1: <urlopen error [Errno 111] Connection refused>" in done.stderr
