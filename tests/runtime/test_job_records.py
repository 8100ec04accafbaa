"""Files of jobs: what is written, what is read again, and what a bad disk does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.runtime.job_records import SAVE_S, JobRecords, JobTraceFile, RecordsError, ToolHistoryFile
from baton.runtime.pool_sizes import PoolSizes
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.tool_time import ToolTimes

LS = (ToolCall("ls"),)


def history(path: Path, times: ToolTimes) -> ToolHistoryFile:
    return ToolHistoryFile(str(path), times.load, times.save)


def test_job_trace_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for start in range(2):
        file = JobTraceFile(str(path), now=float(start))
        file.write([{"event": "arrival", "job_id": "ü"}])
        file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "arrival", "start", "arrival"]
    assert lines[1]["job_id"] == "ü" and lines[2]["time"] == 1.0


def test_job_trace_has_the_sizes_of_what_there_is(tmp_path: Path) -> None:
    file = JobTraceFile(str(tmp_path / "trace.jsonl"), now=1.0)
    file.write_pools(PoolSizes(tokens=64, page_size=1, bytes_per_token=0, states=8, bytes_per_state=96), now=2.0)
    file.close()
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[1]) == {
        "event": "pools",
        "time": 2.0,
        "tokens": 64,
        "page_size": 1,
        "bytes_per_token": 0,
        "states": 8,
        "bytes_per_state": 96,
    }


def test_unwritable_job_trace_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"--scheduler-trace .* No such file"):
        JobTraceFile(str(tmp_path / "missing" / "trace"), now=0.0)


def test_job_trace_follows_no_symlink(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (tmp_path / "trace").symlink_to(outside)
    with pytest.raises(RecordsError, match=r"--scheduler-trace .*trace is a symbolic link; name the file itself"):
        JobTraceFile(str(tmp_path / "trace"), now=0.0)
    assert outside.read_text() == "mine\n"


def test_tool_history_replaces_symlink(tmp_path: Path) -> None:
    path, outside, times = tmp_path / "tools.json", tmp_path / "outside", ToolTimes()
    times.record_duration(LS, 0.25)
    outside.write_bytes(times.save())
    path.symlink_to(outside)
    file = history(path, times)
    times.record_duration(LS, 0.5)
    file.save(0.0)
    assert not path.is_symlink() and path.read_bytes() == times.save() != outside.read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_full_disk_ends_only_the_job_trace(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = JobTraceFile(str(tmp_path / "trace"), now=0.0)
    assert file._file is not None
    file._file.close()
    file._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    file.write([{"event": "arrival"}])
    file.write([{"event": "arrival"}])
    assert [record.message for record in caplog.records] == [
        f"the trace {tmp_path / 'trace'} ends here, as it cannot be written: [Errno 28] No space left on device"
    ]


def test_tool_history_survives_restart(tmp_path: Path) -> None:
    path, first, second = tmp_path / "tools.json", ToolTimes(), ToolTimes()
    file = history(path, first)
    assert not path.exists(), "there is nothing to save"
    first.record_duration(LS, 0.25)
    file.save(0.0)
    history(path, second)
    assert second.history.durations_of("ls").tolist() == [0.25]
    assert list(tmp_path.iterdir()) == [path], "no unfinished file is left"


def test_tool_history_is_saved_periodically_and_at_close(tmp_path: Path) -> None:
    path, times = tmp_path / "tools.json", ToolTimes()
    records = JobRecords(list, None, history(path, times))
    records.heartbeat(0.0)
    times.record_duration(LS, 1.0)
    records.heartbeat(SAVE_S / 2)
    assert not path.exists()
    records.heartbeat(SAVE_S)
    saved = path.read_bytes()
    times.record_duration(LS, 2.0)
    records.close(SAVE_S + 1)
    assert path.read_bytes() != saved


def test_foreign_history_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("dear reader")
    with pytest.raises(RecordsError, match="holds no history of tools: it is no JSON"):
        history(path, ToolTimes())
    assert path.read_text() == "dear reader"
    with pytest.raises(RecordsError, match="there is no folder"):
        history(tmp_path / "missing" / "tools.json", ToolTimes())
    with pytest.raises(RecordsError, match="cannot be read: Is a directory"):
        history(tmp_path, ToolTimes())


def test_failed_history_save_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, times = tmp_path / "folder", ToolTimes()
    folder.mkdir()
    file = history(folder / "tools.json", times)
    folder.rmdir()
    for seconds in (1.0, 2.0):
        times.record_duration(LS, seconds)
        file.save(0.0, at_once=True)
    assert len(caplog.records) == 1
    folder.mkdir()
    file.save(0.0, at_once=True)
    assert (folder / "tools.json").exists()


def test_a_line_that_a_full_disk_cut_off_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    times = ToolTimes()
    file = history(tmp_path / "tools.json", times)
    times.record_duration(LS, 0.25)
    monkeypatch.setattr(os, "replace", full)
    file.save(0.0)
    assert not list(tmp_path.iterdir()), "it is tried again once a minute: each try would leave a file"
