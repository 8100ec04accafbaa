"""What is remembered of a trial, and what becomes of files that are damaged, stale, foreign or cannot be written."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.attention import cache_folder as folders
from baton.attention import processor, trial_results
from baton.attention.cache_folder import cache_folder
from baton.attention.trial_results import MOST_BYTES, TrialResults

KEY = {"shape": [64, 32], "dtype": "float32"}


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def find(key: dict[str, Any] = KEY, **changes: Any) -> str | None:
    return TrialResults(**changes).find("product", key, is_text)


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    trial_results._warn.cache_clear()


@pytest.fixture
def kept() -> Path:
    """The file of a result."""
    TrialResults().keep("product", KEY, "numba")
    (file,) = (cache_folder() / "trials").iterdir()
    return file


def test_a_result_is_found_at_the_next_start(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kept.name.startswith("product-") and kept.suffix == ".json"
    assert find() == "numba" and not caplog.records
    TrialResults().keep("product", KEY, "onednn")
    assert find() == "onednn", "the last one stays"
    assert len(list(kept.parent.iterdir())) == 1


def test_nothing_is_found_for_other_keys(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find(KEY | {"shape": [32, 64]}) is None and find(threads=77) is None
    assert TrialResults().find("dtype", KEY, is_text) is None
    assert not caplog.records, "a first start is no trouble"


@pytest.mark.parametrize("part", ["processor", "torch", "numba", "sources", "format"])
def test_another_processor_or_version_does_not_use_it(kept: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match part:
        case "processor":
            monkeypatch.setattr(processor, "fingerprint", lambda: "another")
        case "torch":
            monkeypatch.setattr(trial_results.torch, "__version__", "9.9")
        case "numba":
            monkeypatch.setattr(trial_results, "_version", lambda name: None)
        case "sources":
            monkeypatch.setattr(trial_results, "_sources_checksum", lambda: 1)
        case _:
            monkeypatch.setattr(trial_results, "FORMAT", 2)
    assert find() is None


def test_lowered_features_are_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = processor.fingerprint()
    processor.fingerprint.cache_clear()
    assert processor.fingerprint() == found, "equal on equal machines"
    for name, value in (("ONEDNN_MAX_CPU_ISA", "SSE41"), ("ATEN_CPU_CAPABILITY", "default")):
        processor.fingerprint.cache_clear()
        monkeypatch.setenv(name, value)
        assert processor.fingerprint() != found
        monkeypatch.delenv(name)
    processor.fingerprint.cache_clear()


def test_generation_and_caches_are_read_without_names(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    core = "processor\t: {}\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A (R) B\nstepping\t: 7\n\n"
    file.write_text(core.format(0) + core.format(1))
    assert processor._generation(file) == ["cpu family 6", "model 85", "stepping 7"]
    assert processor._generation(tmp_path / "none") == []
    (tmp_path / "index0").mkdir()
    (tmp_path / "index1").mkdir()
    for name, value in (("level", "1"), ("type", "Data"), ("size", "32K")):
        (tmp_path / "index0" / name).write_text(f"{value}\n")
    assert processor._cache_sizes(tmp_path) == ["1 Data 32K"], "the other one says nothing"


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"null", b"[1]", b"\xff\xfe", b'{"key": 1}', b"[" * 5000, b" " * (MOST_BYTES + 1), b"\0" * 100],
    ids=["empty", "cut", "null", "list", "bytes", "no value", "deep", "large", "zeros"],
)
def test_damaged_files_are_missing_and_replaced(kept: Path, contents: bytes, caplog: pytest.LogCaptureFixture) -> None:
    kept.write_bytes(contents)
    assert find() is None and find() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and f"{kept} is damaged or another's; trying again" in record.message
    TrialResults().keep("product", KEY, "numba")
    assert find() == "numba"


def test_values_without_meaning_and_foreign_keys_are_missing(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = json.loads(kept.read_text())
    for changes in ({"value": 3}, {"key": entry["key"] | {"threads": 99}}, {"key": None}):
        kept.write_text(json.dumps(entry | changes))
        assert find() is None
    assert "damaged or another's" in caplog.text


def test_a_folder_in_the_files_place_is_no_result(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.unlink()
    kept.mkdir()
    assert find() is None
    TrialResults().keep("product", KEY, "numba")
    assert "cannot read results of trials" in caplog.text and "cannot be kept" in caplog.text
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "no unfinished file stays"


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # permissions would not stop root
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path / "file"))
    results = TrialResults()
    for _ in range(3):
        results.keep("product", KEY, "numba")
    (record,) = caplog.records
    assert "results of trials cannot be kept" in record.message
    assert "set BATON_CACHE_DIR to a folder that can be written" in record.message
    assert find() is None


def test_servers_that_write_at_once_leave_whole_files() -> None:
    values, seen, start = [letter * 2000 for letter in "abcd"], set(), threading.Barrier(5)

    def write(value: str) -> None:
        results = TrialResults(threads=1)  # torch may use another number in a new thread
        start.wait()
        for _ in range(50):
            results.keep("product", KEY, value)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        seen.add(find(threads=1))
    for thread in threads:
        thread.join()
    assert seen <= {None, *values} and find(threads=1) in values
    assert len(os.listdir(cache_folder() / "trials")) == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(folders.VARIABLE, "/named")
    assert cache_folder() == Path("/named")
    monkeypatch.setenv(folders.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "baton"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match=r"home directory.*; set BATON_CACHE_DIR"):
        cache_folder()
    TrialResults().keep("product", KEY, "numba")
    assert find() is None
