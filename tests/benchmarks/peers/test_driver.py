"""Calls to an engine in another process, and engines that do not answer as they should."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.driver import Driver, EngineFailed, wait_until
from benchmarks.peers.engines import DRIVERS

DOUBLES = Path(__file__).parents[2] / "doubles"
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Driver] = []

    def make(*, start_s: float = 60, **settings: Any) -> Driver:
        command = [sys.executable, str(DRIVERS / "serve.py"), "fake_peer", json.dumps(settings)]
        driver = Driver(command, {"PYTHONPATH": str(DOUBLES)}, tmp_path / "fake.log", start_s)
        started.append(driver)
        return driver

    yield make
    for driver in started:
        driver.close()


def generate(driver: Driver, limit_s: float = 60) -> Any:
    return driver.ask("generate", limit_s, requests=[{"ids": [1, 2], "tokens": 3}], stream=False)


def test_driver_ignores_library_output_on_stdout(start: Start, tmp_path: Path) -> None:
    driver = start()
    assert driver.about == {"version": "1.2.3"}
    assert generate(driver)["requests"][0]["ids"] == [7, 7, 7]
    assert driver.ask("press", 60) == {"tokens": 0}
    assert "greets on stdout" in (tmp_path / "fake.log").read_text()


def test_engine_error_is_raised_and_engine_stays_usable(start: Start) -> None:
    driver = start(at="beam", what="raise")
    with pytest.raises(EngineFailed, match="RuntimeError: no room for this") as failure:
        driver.ask("beam", 60, requests=[{"ids": [1]}], width=2, steps=3)
    assert any("in _misbehave" in line for line in failure.value.last_lines)
    assert generate(driver)["seconds"] == 0.5


def test_dead_engine_is_reported_with_its_last_lines(start: Start) -> None:
    driver = start(at="generate", what="die")
    with pytest.raises(EngineFailed, match="ended with status 3") as failure:
        generate(driver)
    assert failure.value.last_lines[-1] == "Segmentation fault of a kind"
    with pytest.raises(EngineFailed, match="ended with status 3"):
        generate(driver)


def test_hung_engine_is_killed_with_its_children(start: Start) -> None:
    before = children()
    driver = start(at="generate", what="hang")
    with pytest.raises(EngineFailed, match="no answer within 10 s") as failure:
        generate(driver, limit_s=10)  # its child has started by then, also beside neighbours
    assert children() == before
    (child,) = [line.split()[1] for line in failure.value.last_lines if line.startswith("child ")]
    assert wait_until(lambda: not runs(child), 10), "what it had started goes with it"


@pytest.mark.parametrize(("what", "said"), [("die", "ended with status 3"), ("raise", "ended with status 1")])
def test_engine_that_fails_to_start_is_reported(start: Start, what: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        start(at="start", what=what)


def test_startup_timeout_leaves_no_process(start: Start, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(EngineFailed, match="no answer within 2 s"):
        start(start_s=2, at="start", what="hang")
    assert children() == before


def test_missing_program_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="nothing-here: No such file"):
        Driver([str(tmp_path / "nothing-here")], {}, tmp_path / "log", 1)


def test_closed_driver_leaves_no_process(start: Start) -> None:
    before = children()
    driver = start()
    assert children() != before
    driver.close()
    assert children() == before


def test_wait_until_stops_at_its_timeout() -> None:
    assert not wait_until(lambda: False, 0.3)
    assert wait_until(lambda: True, 0)


def children() -> set[str]:
    """Processes of ours."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for file in lists for pid in file.read_text().split() if os.path.exists(f"/proc/{pid}")}


def runs(pid: str) -> bool:
    """A process that has not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
