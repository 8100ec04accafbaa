from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from baton.runtime.config import RecordingConfig
from baton.runtime.recording import recorder
from baton.runtime.recording.lines import RecordedRequest
from baton.runtime.recording.recorder import RequestLog
from baton.scheduler.token_buffer import pack_ids


def request(number: int, length: int = 4) -> RecordedRequest:
    ids = pack_ids([number] * length)
    return RecordedRequest(
        rid=str(number), prompt_ids=ids, output_ids=(), time=0.0, seconds=0.0, finish="stop", cached_tokens=0
    )


def written(path: Path) -> list[int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["input_ids"][0] for line in lines if "input_ids" in line]


class Counts:
    """What was recorded, and what not."""

    def __init__(self) -> None:
        self.recorded = self.lost = 0
        self.changed = threading.Condition()

    def __call__(self, recorded: bool) -> None:
        with self.changed:
            self.recorded += recorded
            self.lost += not recorded
            self.changed.notify_all()

    def wait_for_losses(self, lost: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.lost >= lost, 60)

    def wait_for_all(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.all >= count, 60)

    @property
    def all(self) -> int:
        return self.recorded + self.lost


def test_close_writes_all_waiting_requests(tmp_path: Path) -> None:
    counts = Counts()
    log = RequestLog(RecordingConfig(record_requests=str(tmp_path / "log")), counts)
    for number in range(500):
        log.add_request(request(number))
    log.close()
    log.close()
    assert written(tmp_path / "log") == list(range(500)) and (counts.recorded, counts.lost) == (500, 0)
    log.add_request(request(0))
    assert counts.lost == 1, "after the end nothing is recorded, and that is counted"


def test_written_requests_make_room_for_more(tmp_path: Path) -> None:
    counts = Counts()
    path = tmp_path / "log"
    log = RequestLog(RecordingConfig(record_requests=str(path)), counts, max_waiting_bytes=2 * request(0).num_bytes)
    for number in range(50):
        log.add_request(request(number))
        counts.wait_for_all(number + 1)
    log.close()
    assert counts.lost == 0 and written(path) == list(range(50))


def test_a_hanging_disk_delays_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, free = Counts(), threading.Event()
    log = RequestLog(
        RecordingConfig(record_requests=str(tmp_path / "log")), counts, max_waiting_bytes=10 * request(0).num_bytes
    )
    write = os.write

    def slow(fd: int, data: memoryview) -> int:
        free.wait(60)
        return write(fd, data)

    monkeypatch.setattr(recorder.os, "write", slow)
    for number in range(100):
        log.add_request(request(number))
    assert 89 <= counts.lost <= 90, "ten wait, and one more may be on its way"
    free.set()
    log.close()
    assert counts.all == 100 and written(tmp_path / "log") == list(range(counts.recorded))


def test_a_full_disk_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    log = RequestLog(RecordingConfig(record_requests=str(tmp_path / "log")), counts)

    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patched:
            patched.setattr(recorder.os, "write", full)
            for number in range(20):
                log.add_request(request(number))
            counts.wait_for_losses(20)
        log.add_request(request(20))
        log.close()
    assert written(tmp_path / "log") == [20] and counts.recorded == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "No space left on device" in messages[0] and "again" in messages[1]


def test_a_request_that_cannot_be_encoded_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    log = RequestLog(RecordingConfig(record_requests=str(tmp_path / "log")), counts)
    line = log._lines.make_line
    monkeypatch.setattr(log._lines, "make_line", lambda one: line(one) if int(one.rid) % 2 else {}[one.rid])
    for number in range(6):
        log.add_request(request(number))
    log.close()
    assert written(tmp_path / "log") == [1, 3, 5] and (counts.recorded, counts.lost) == (3, 3)
    assert caplog.text.count("could not be recorded") == 1
