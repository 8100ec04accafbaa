"""What a server logs under load, of requests, and when it ends."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "4096", "--device", "cpu", "--log-interval", "0.5")


def run(folder: Path, *flags: str) -> str:
    """The log of a server that has answered one request and was ended."""
    with ServerUnderTest(TOY, folder, *FLAGS, *flags, behaviour=None) as server:
        server.wait_ready()
        sampling = {"max_new_tokens": 40, "ignore_eos": True}
        assert server.generate(text="my secret text", rid="mine", sampling_params=sampling).status_code == 200
        server.wait_until(lambda: "load: " in server.log, "a line about load")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        return server.log


def test_lines_of_load_and_requests(tmp_path: Path) -> None:
    log = run(tmp_path, "--log-requests", "--log-requests-level", "2")
    assert re.search(r"load: \d+ running, 0 waiting; \d+ prompt tokens/s, \d+ output tokens/s; cache hit rate", log)
    assert re.search(r"served: \d+ prompt tokens computed, \d+ output tokens, cache hit rate \d+ %", log)
    assert "--log-requests-level 2: prompts and answers are in the log" in log
    lines = {event: json.loads(body) for event, body in re.findall(r"request (arrived|ended): (\{.*\})", log)}
    assert lines["arrived"]["text"] == "my secret text" and lines["ended"]["completion_tokens"] == 40
    assert lines["arrived"]["rid"] == lines["ended"]["rid"] == "mine"
    assert len(re.findall("request arrived", log)) == 1, "the server's own warm-up is no request"


def test_no_request_is_logged_unasked(tmp_path: Path) -> None:
    log = run(tmp_path)
    assert "secret" not in log and "request arrived" not in log and "mine" not in log
