"""Agents' chats on a model that was really trained: `make test-real`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.transcripts import TRANSCRIPTS, play

FOLDER = Path(os.environ.get("BATON_REAL_MODEL", "build/models/SmolLM2-135M-Instruct"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason=f"{FOLDER} is not there; run make real-model"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
    with ServerUnderTest(FOLDER, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready(180)


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_every_turn_after_the_first_is_a_handoff(server: ServerUnderTest, name: str) -> None:
    first, *others = turns = play(server, TRANSCRIPTS[name])
    assert first.path is None and [turn.path for turn in others] == ["handoff"] * 4
    assert all(turn.recomputed <= 1 for turn in others)
    assert all(turn.cached >= before.prompt for before, turn in zip(turns, others))
    assert all(len(turn.text) > 5 for turn in turns)
