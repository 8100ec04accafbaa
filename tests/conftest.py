"""A table of how far fast paths are from their slow twins, printed last where a test recorded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

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

Parity = Callable[..., None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


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
