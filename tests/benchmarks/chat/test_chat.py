"""The benchmark of chats, in small: turns are handed over where they should be, and the pictures are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"


@pytest.mark.slow
@pytest.mark.process
def test_chat_turns_compare_continuation_lookup_and_replay(tmp_path: Path) -> None:
    sizes = ("--agents", "1", "--turns", "2", "--rounds", "1", "--answer", "4")
    done = run_benchmark("chat", "--model", str(TOY_MODEL), *sizes, "--plot", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chat.json").read_text())
    found = {way: rounds[0][0] for way, rounds in report["rounds"].items()}
    assert [turn["path"] for turn in found["goes on"]] == [None, "handoff"]
    assert [turn["path"] for turn in found["looks up"]] == [None, None]
    assert found["looks up"][1]["cached"] > found["replays"][1]["cached"] == 0
    assert all(turn["first"] - turn["sent"] == turn["ttft"] > 0 for turns in found.values() for turn in turns)
    assert all((tmp_path / f"chat_{name}.png").stat().st_size > 0 for name in ("ttft", "timeline"))
    assert "handed over: 1 of 1 turns" in done.stdout
