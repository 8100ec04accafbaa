from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from baton.runtime.recording import recorder
from baton.runtime.recording.recorder import LogFile, RecordingError


def opened(path: Path, max_bytes: int = 1000) -> LogFile:
    return LogFile(str(path), max_bytes, lambda: b"header\n")


def test_request_log_is_readable_by_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    path.chmod(0o644)
    for name in ("log", "new"):
        opened(tmp_path / name).close()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert path.read_text() == "old\nheader\n"


def test_request_log_follows_no_symlink(tmp_path: Path) -> None:
    """In a folder that others may write to, it could lead to any file of the server's user."""
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (tmp_path / "log").symlink_to(outside)
    with pytest.raises(RecordingError, match=r"log is a symbolic link; name the file itself"):
        opened(tmp_path / "log")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(RecordingError, match=r"symbolic link"):
        opened(tmp_path / "dangling")
    assert outside.read_text() == "mine\n" and not (tmp_path / "nothing").exists()


def test_rotated_request_log_follows_no_symlink(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    log = opened(tmp_path / "log", 50)
    for name in ("log.new", "log.1"):
        (tmp_path / name).symlink_to(outside)
    log.append_line(b"first line\n")
    with pytest.raises(OSError, match="symbolic link"):
        log.append_line(b"second line\n")
    log.append_line(b"third line\n")
    log.close()
    assert outside.read_text() == "mine\n", "neither written to nor made private"
    assert (tmp_path / "log").read_bytes() == b"header\nthird line\n"
    assert (tmp_path / "log.1").read_bytes() == b"header\nfirst line\n"


def test_truncated_line_spoils_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"input_ids": [1, 2')
    log = opened(path)
    log.append_line(b"line\n")
    log.close()
    assert path.read_text().splitlines() == ['{"input_ids": [1, 2', "header", "line"]


def test_rotated_logs_stay_within_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = opened(path, 200)
    lines = [b"%020d\n" % number for number in range(40)]
    for line in lines:
        log.append_line(line)
        kept = [each.read_bytes() for each in tmp_path.iterdir()]
        assert sum(map(len, kept)) <= 200
    log.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]
    before, now = (tmp_path / "log.1").read_bytes(), path.read_bytes()
    assert before.startswith(b"header\n") and now.startswith(b"header\n")
    written = [line for line in (before + now).splitlines(keepends=True) if line != b"header\n"]
    assert written == lines[-len(written) :] and len(written) > 4


def test_oversized_line_is_refused_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = opened(path, 100)
    log.append_line(b"first\n")
    with pytest.raises(ValueError, match="longer than half of --record-requests-gb"):
        log.append_line(b"x" * 60 + b"\n")
    log.append_line(b"second\n")
    log.close()
    assert path.read_bytes() == b"header\nfirst\nsecond\n"


def test_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log = opened(path)
    log.append_line(b"first\n")
    write = os.write

    def short_of_room(fd: int, data: memoryview) -> int:
        if len(data) > 3:
            return write(fd, data[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(recorder.os, "write", short_of_room)
        with pytest.raises(OSError, match="No space left"):
            log.append_line(b"second\n")
    log.append_line(b"third\n")
    log.close()
    assert path.read_bytes() == b"header\nfirst\nthird\n"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path / "no folder" / "log", "No such file or directory"),
        (lambda path: path, "Is a directory"),
        (lambda path: os.mkfifo(path / "fifo") or path / "fifo", "not a regular file"),
    ],
    ids=["no-folder", "folder", "fifo"],
)
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, make, reason: str) -> None:
    with pytest.raises(RecordingError, match=f"--record-requests .*{reason}"):
        opened(make(tmp_path))


def test_second_server_on_one_log_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path / "log")
    with pytest.raises(RecordingError, match="is being written by another server"):
        opened(tmp_path / "log")
    first.close()
    opened(tmp_path / "log").close()


def test_moved_request_log_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log = opened(path, 100)
    log.append_line(b"x" * 40 + b"\n")
    path.rename(tmp_path / "moved")
    log.append_line(b"y" * 40 + b"\n")
    assert path.read_bytes() == b"header\n" + b"y" * 40 + b"\n"
    with monkeypatch.context() as patched:  # the folder takes no new files for a while

        def refused(*_: object) -> int:
            raise OSError(13, "Permission denied")

        patched.setattr(recorder.os, "open", refused)
        with pytest.raises(OSError, match="Permission denied"):
            log.append_line(b"z" * 40 + b"\n")
    log.append_line(b"last\n")
    log.close()
    assert path.read_bytes() == b"header\nlast\n"


def test_full_disk_at_rotation_loses_no_earlier_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, is_full = tmp_path / "log", os.write, [False]

    def writing(fd: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(recorder.os, "write", writing)
    log = opened(path, 80)
    for number in range(3):
        log.append_line(b"line %03d\n" % number)
    is_full[0] = True
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            log.append_line(b"lost 000\n")
    assert path.read_bytes() == b"header\nline 000\nline 001\nline 002\n" and not (tmp_path / "log.1").exists()
    is_full[0] = False
    log.append_line(b"line 003\n")
    log.close()
    assert path.read_bytes() == b"header\nline 003\n"
    assert (tmp_path / "log.1").read_bytes() == b"header\nline 000\nline 001\nline 002\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
