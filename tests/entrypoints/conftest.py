"""The server that the tests of the HTTP API share, one for each file: the worker is a double, all else is real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.server_under_test import ServerUnderTest

pytest.register_assert_rewrite("http_calls")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-body-mb", "4", "--served-model-name", "echo", "--cors-origin", "https://example.org"]
    behaviour = {"step_s": 0.002, "refuse": ["too-large"]}
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour=behaviour) as running:
        yield running.wait_ready()
