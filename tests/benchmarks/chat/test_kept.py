"""The benchmark of what is kept of conversations, in small and by the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path

from tests.doubles.benchmark_runs import run_benchmark


def test_kept_conversations_survive_one_shot_flood(tmp_path: Path) -> None:
    sizes = ("--seeds", "1", "--policies", "fcfs", "handoff")
    done = run_benchmark("chat.kept", *sizes, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chat_kept.json").read_text())
    runs = {(run["policy"], run["way"]): run for run in report["runs"]}
    assert len(runs) == 4 and report["work"]["flood"] == 12000
    for (_, way), run in runs.items():
        assert run["later"][0] == run["later"][1] > 0, "what was returned to is all there"
        assert run["second"][0] == (run["second"][1] if way == "named" else 0)
    assert "handoff         named       100.0" in done.stdout
