"""The toy model, in this process and behind HTTP. The server remembers two finished requests, beside leased ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.entrypoints.engine import Engine
from tests.doubles.server_under_test import ServerUnderTest

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"


@pytest.fixture(scope="session")
def toy_engine() -> Iterator[Engine]:
    """Under fcfs, only what programs ask for is leased."""
    settings = {"max_total_tokens": 8192, "schedule_policy": "fcfs"}
    with Engine(model_path=str(TOY_MODEL), dtype="float32", device="cpu", **settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--api-key", "secret"]
    flags += ["--max-finished-requests", "2"]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as server:
        server.client.headers["Authorization"] = "Bearer secret"
        yield server.wait_ready()
