"""A real server that records its requests."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--disable-cuda-graph")
SHORT = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def test_server_records_requests_as_complete_lines(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with ServerUnderTest(TOY_MODEL, tmp_path, *FLAGS, "--record-requests", str(log), behaviour=None) as server:
        server.wait_ready()
        asked = {"text": "How many lines are in manual.md?", "sampling_params": SHORT}
        first = server.generate(rid="secret-name", retain_ttl=60, **asked).json()
        more = {"continuation_of": "secret-name", "continuation_ids": [5, 6, 7], "sampling_params": SHORT}
        second = server.generate(**more).json()
        assert "prompt_token_ids" not in second
        server.generate(input_ids=[[9, 8, 7], [9, 8, 6]], sampling_params=SHORT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert text.endswith("\n") and "secret" not in text and "manual" not in text
    header, *lines = map(json.loads, text.splitlines())
    assert header["baton_request_log"] == 1 and len(lines) == 4
    parent, child = lines[:2]
    assert parent["output_ids"] == first["output_ids"] and child["output_ids"] == second["output_ids"]
    assert child["continuation_of"] == parent["rid"]
    assert child["input_ids"] == [*parent["input_ids"], *parent["output_ids"], 5, 6, 7]
    assert child["cached_tokens"] == second["meta_info"]["cached_tokens"] > 0
    assert sorted(line["input_ids"] for line in lines[2:]) == [[9, 8, 6], [9, 8, 7]]


def test_unwritable_request_log_aborts_startup(tmp_path: Path) -> None:
    log = tmp_path / "no folder" / "log"
    with ServerUnderTest(TOY_MODEL, tmp_path, *FLAGS, "--record-requests", str(log), behaviour=None) as server:
        assert server.process.wait(30) == 1
        assert f"--record-requests {log} cannot be written: No such file or directory" in server.log
