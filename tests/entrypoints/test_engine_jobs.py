"""Jobs through the Engine: what is kept, what is written down, and what the next start knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.entrypoints.engine import Engine, EngineError
from baton.runtime.job_records import RecordsError

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
RESULT = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 40}


def engine(**settings) -> Engine:
    return Engine(model_path=TOY, device="cpu", max_total_tokens=4096, schedule_policy="handoff", **settings)


def test_job_is_tracked_and_tool_history_survives_restart(tmp_path: Path) -> None:
    history, trace = tmp_path / "tools.json", tmp_path / "trace.jsonl"
    with engine(tool_history=str(history), scheduler_trace=str(trace)) as running:
        said = running.generate(TASK, GREEDY, job_id="one", cache_salt="mine")["text"]
        assert running.jobs() == [] and running.end_job("one") is None, "it is of another namespace"
        (job,) = running.jobs(cache_salt="mine")
        assert (job["job_id"], job["turns"], job["last_calls"]) == ("one", 1, ["wc"])
        answer = running.generate(TASK + said + RESULT, GREEDY, job_id="one", cache_salt="mine")
        assert answer["meta_info"]["cached_tokens"] > 20
        ended = running.end_job("one", cache_salt="mine")
        assert ended is not None and ended["aborted"] == []
        assert running.jobs(cache_salt="mine") == []
    assert list(json.loads(history.read_text())["tools"]) == ["wc"]
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert lines[1].keys() == {"event", "time", "tokens", "page_size", "bytes_per_token"}
    assert lines[1]["tokens"] == 4096 and lines[1]["time"] > lines[0]["time"]
    events = [line["event"] for line in lines]
    assert events[:3] == ["start", "pools", "arrival"] and {
        "departure",
        "pinned",
        "called",
        "returned",
        "unpinned",
    } <= {*events}
    with engine(tool_history=str(history)) as running:
        running.generate(TASK, GREEDY, job_id="two")
        (job,) = running.jobs()
        assert job["returns_in_s"] is not None, "how long wc takes is known from before"
        running.generate(TASK, GREEDY, conversation_id="three")
        running.generate(TASK, GREEDY, routing_key="four")
        two, three, unnamed = (job["job_id"] for job in running.jobs())
        assert (two, three) == ("two", "conversation-id:three") and "four" not in unnamed


def test_unusable_record_files_abort_startup(tmp_path: Path) -> None:
    broken = tmp_path / "tools.json"
    broken.write_text("[]")
    with pytest.raises((EngineError, RecordsError), match="holds no history of tools"):
        engine(tool_history=str(broken))
    with pytest.raises((EngineError, RecordsError), match=r"--scheduler-trace .* cannot be written"):
        engine(scheduler_trace=str(tmp_path / "missing" / "trace"))
