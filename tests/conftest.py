"""What tests of fast paths share: GPU tests skip without a GPU, Triton kernels run in Triton's interpreter there, and a
table of how far fast paths are from their slow twins is printed last where a test recorded one. BATON_CPU_FEATURES
lowers the processor before a test uses it."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.attention import cache_folder, processor  # lowers torch, oneDNN, MKL and Numba, which it does not import

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParityRow:
    """The largest absolute error one comparison found, and what it allowed there."""

    name: str
    error: float
    atol: float
    rtol: float
    passed: bool


ROWS = pytest.StashKey[list[ParityRow]]()
SEEN = pytest.StashKey[dict[tuple[str, int], dict[str, int]]]()
"""By test and list of parameters: the number of each value, by its id."""

Parity = Callable[..., None]

# Triton reads this once, when something first imports it. Looked at without torch, which most tests need not import.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What one test finds out must not change another, nor be found in the user's home.
CACHES = tempfile.TemporaryDirectory(prefix="baton-cache-")
CACHE_NUMBERS = itertools.count()
os.environ[cache_folder.VARIABLE] = f"{CACHES.name}/shared"

# A shell starts what it runs in the background with SIGINT ignored, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str | None:
    lowered = processor.level()
    names = [name for name, level in processor.LEVELS.items() if level is lowered]
    return f"processor: lowered to {names[0]}" if names else None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS], config.stash[SEEN] = [], {}


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection: a full one would visit a million objects of theirs and of the
    libraries, in half a second."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_itemcollected(item: pytest.Item) -> None:
    """``one_in(n)`` leaves all but one in n combinations of a test's parameters, fixtures' included, to the slow tests.
    Those on a diagonal stay: each value of a list, if the other lists have n values together."""
    mark, callspec = item.get_closest_marker("one_in"), getattr(item, "callspec", None)
    if mark is None or callspec is None:
        return
    test = item.nodeid.removesuffix(f"[{callspec.id}]")
    places = [item.config.stash[SEEN].setdefault((test, place), {}) for place in range(len(callspec._idlist))]
    if sum(seen.setdefault(name, len(seen)) for seen, name in zip(places, callspec._idlist)) % mark.args[0]:
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that is made when something is kept."""
    monkeypatch.setenv(cache_folder.VARIABLE, f"{CACHES.name}/{next(CACHE_NUMBERS)}")


@pytest.fixture
def interpreter() -> None:
    """For tests that run Triton kernels on CPU tensors: the arithmetic of the kernels, without a GPU."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here; the tests marked gpu run the kernels there")


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """parity(name, found, expected, *, atol, rtol): tensors must be close, as torch.testing.assert_close has it but for
    the dtype; records the error under the name."""

    import torch  # here: most tests need none of it

    def compare(name: str, found: torch.Tensor, expected: torch.Tensor, *, atol: float, rtol: float) -> None:
        found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
        same_shape = found.shape == expected.shape
        # NaN against NaN counts as wrong, and as infinitely far.
        error = (found - expected).abs().nan_to_num(float("inf")).max().item() if same_shape and found.numel() else 0.0
        passed = same_shape and bool(torch.isclose(found, expected, atol=atol, rtol=rtol).all())
        request.config.stash[ROWS].append(ParityRow(name, error, atol, rtol, passed))
        torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}")

    return compare


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    yield  # pytest's own summary comes first
    if config.stash[ROWS]:
        print_table(terminalreporter, config.stash[ROWS])


def print_table(terminalreporter: pytest.TerminalReporter, rows: list[ParityRow]) -> None:
    worst: dict[str, tuple[ParityRow, int]] = {}
    for row in rows:
        seen, count = worst.get(row.name, (row, 0))
        # Of several comparisons under one name: a failed one, else the one with the largest error.
        worst[row.name] = max(seen, row, key=lambda each: (not each.passed, each.error)), count + 1
    width = max(len(name) for name in worst)
    terminalreporter.section("parity with the slow twins")
    terminalreporter.write_line(f"{'comparison':{width}s} {'max error':>10s} {'atol':>8s} {'rtol':>8s} {'times':>6s}")
    for row, count in worst.values():
        numbers = f"{row.error:10.2e} {row.atol:8.1e} {row.rtol:8.1e} {count:6d}"
        terminalreporter.write_line(f"{row.name:{width}s} {numbers}{'' if row.passed else '  FAILED'}")
