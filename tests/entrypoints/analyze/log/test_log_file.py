"""Logs are read item by item, whatever is wrong with them, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest

from baton.entrypoints.analyze.log.log_file import Item, LogFile
from baton.entrypoints.analyze.log.logged_request import BadItem, LogError

MIB = 1 << 20


def read(path: Path, max_bytes: int = MIB) -> list[Item]:
    with LogFile(str(path)) as file:
        return list(file.items(max_bytes))


def written(folder: Path, data: bytes) -> Path:
    path = folder / "log"
    path.write_bytes(data)
    return path


def good(items: list[Item]) -> list[object]:
    return [item for _, item in items if not isinstance(item, BadItem)]


def bad(items: list[Item]) -> dict[int, str]:
    return {number: str(item) for number, item in items if isinstance(item, BadItem)}


def test_bom_crlf_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": "\xc3\xa9\\ud83d\\ude00"}\n{"c": 3}'
    assert read(written(tmp_path, data)) == [(1, {"a": 1}), (4, {"b": "é😀"}), (5, {"c": 3})]


def test_broken_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b'{"a": 1', b"\xff\xfe", b"[" * 5000, b'"\xff"', b'{"a": 2}']
    items = read(written(tmp_path, b"\n".join(lines)))
    assert good(items) == [{"a": 1}, {"a": 2}]
    assert sorted(bad(items)) == [2, 3, 4, 5]
    assert "invalid JSON" in bad(items)[2] and bad(items)[4].startswith(("nested too deeply", "invalid JSON"))


def test_overlong_line_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n{"text": "')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'"}\n{"a": 2}\n' + b"y" * 3 * MIB)
    tracemalloc.start()
    try:
        items = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert good(items) == [{"a": 1}, {"a": 2}] and peak < 20 * MIB
    assert bad(items)[2] == f"longer than 1 MiB ({100 * MIB + 13} bytes); see --max-line-mb" and 4 in bad(items)


def test_line_at_the_length_limit_is_accepted(tmp_path: Path) -> None:
    line = json.dumps("x" * (MIB - 2)).encode()
    assert len(line) == MIB
    assert len(good(read(written(tmp_path, line + b"\n" + line)))) == 2
    assert len(bad(read(written(tmp_path, line + b" \n" + line)))) == 1


@pytest.mark.parametrize("size", [7, 1 << 20])
def test_array_is_read_element_by_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("baton.entrypoints.analyze.log.log_file._CHUNK", size)
    values = [{"a": [1, 2, {"b": 'é", ]}'}]}, 12345, "x\\y", None, [], {}, -1.5e3]
    for text in (json.dumps(values), json.dumps(values, indent=3, ensure_ascii=False), " \n[ ]"):
        expected = list(enumerate(json.loads(text), 1))
        assert read(written(tmp_path, text.encode())) == expected
    assert read(written(tmp_path, b"\xef\xbb\xbf[1, 2]")) == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("text", "count", "reason"),
    [
        ('[{"a": 1}, {"a": }, {"a": 3}]', 1, "invalid or incomplete JSON"),
        ('[{"a": 1}, {"a"', 1, "incomplete JSON"),
        ('[{"a": 1}', 1, "the file ends in the array"),
        ('[{"a": 1} {"a": 2}]', 1, "'{' where a comma should be"),
        ("[" * 50_000, 0, "nested too deeply"),
    ],
)
def test_broken_array_ends_at_the_broken_element(tmp_path: Path, text: str, count: int, reason: str) -> None:
    items = read(written(tmp_path, text.encode("utf-8", "surrogateescape")))
    assert len(good(items)) == count and reason in bad(items)[count + 1]


def test_invalid_utf8_spoils_only_one_element(tmp_path: Path) -> None:
    assert good(read(written(tmp_path, b'[1, "\xff", 2]'))) == [1, "\udcff", 2]


def test_large_array_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        file.write("[" + ",\n".join([json.dumps({"text": "word " * 2000})] * 4000) + "]")
    tracemalloc.start()
    try:
        with LogFile(str(path)) as file:
            count = sum(1 for _ in file.items(MIB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 4000 and path.stat().st_size > 35 * MIB and peak < 12 * MIB


def test_overlong_element_ends_the_array(tmp_path: Path) -> None:
    items = read(written(tmp_path, b'[1, "' + b"x" * 5 * MIB + b'", 2]'))
    assert good(items) == [1] and "longer than 1 MiB (--max-line-mb)" in bad(items)[2]


def test_gzip_and_stdin_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(b'{"a": 1}\n{"a": 2}\n')
    assert good(read(written(tmp_path, packed))) == [{"a": 1}, {"a": 2}]
    with pytest.raises(LogError, match="cannot be read beyond byte"):
        read(written(tmp_path, packed[:-9]))
    with pytest.raises(LogError, match="cannot be read beyond byte"):
        read(written(tmp_path, packed[:12] + b"\xff\xff" + packed[14:]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(packed)))
    with LogFile("-") as file:
        assert [item for _, item in file.items(MIB)] == [{"a": 1}, {"a": 2}]
        assert file.size is None and file.bytes_read == len(packed) and file.name == "standard input"


def test_unreadable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no-such cannot be read: No such file"):
        LogFile(str(tmp_path / "no-such"))
    with pytest.raises(LogError, match="Is a directory"):
        LogFile(str(tmp_path))
    assert read(written(tmp_path, b"")) == [] and read(written(tmp_path, b"\n \n")) == []
