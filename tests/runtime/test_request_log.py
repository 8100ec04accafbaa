"""The lines of --log-requests: what each level tells, and what no text can do to them."""

from __future__ import annotations

import json
import logging
import re

import pytest

from baton.runtime.messages import RequestError, TextOutput, TokenOutput
from baton.runtime.prompt import Prompt
from baton.runtime.request_log import SHOWN_CHARS, RequestLog
from baton.scheduler.outcome import FinishReason, FoundTokens
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.specs import make_spec

SECRET = 'my "password"\nis \u2028 hunter2' + "x" * SHOWN_CHARS


def play(level: int, caplog: pytest.LogCaptureFixture, text: str | None = SECRET) -> dict[str, dict]:
    """A request from its arrival to its end. Returns the lines' objects by event."""
    caplog.set_level(logging.INFO)
    log = RequestLog(level)
    spec = make_spec("r\n1", range(5), SamplingParams(max_new_tokens=7, n=2), job_id="job", adapter="sql")
    log.open_request(Prompt(spec=spec, group="g", text=text), spec)
    for index in (0, 1):
        log.record_output(TextOutput(output=TokenOutput(rid=spec.rid, index=index, new_ids=b"1234"), text=f"a{index}"))
        last = TokenOutput(
            rid=spec.rid,
            index=index,
            prompt_tokens=5,
            completion_tokens=2,
            finish=FinishReason(type="stop" if index else "length"),
            found=FoundTokens(3 if index == 0 else 5),
        )
        log.record_output(TextOutput(output=last, text=SECRET))
    log.end_request(spec.rid)
    log.end_request(spec.rid)
    found = {}
    for record in caplog.records:
        line = record.getMessage()
        assert "\n" not in line
        match = re.fullmatch(r"request (\w+): (\{.*\})", line)
        assert match is not None
        found[match[1]] = json.loads(match[2])
    caplog.clear()
    return found


def test_levels(caplog: pytest.LogCaptureFixture) -> None:
    for level in range(4):
        lines = play(level, caplog)
        assert lines.keys() == {"arrived", "ended"}
        arrived, ended = lines["arrived"], lines["ended"]
        assert (arrived["rid"], arrived["tokens"], arrived["job_id"], arrived["adapter"]) == ("r\n1", 5, "job", "sql")
        assert ended["finish"] == ["length", "stop"] and ended["cached_tokens"] == 3 and ended["completion_tokens"] == 4
        assert ("sampling_params" in arrived) == (level >= 1)
        assert ("text" in arrived) == ("text" in ended) == (level >= 2)
        if level == 2:
            assert arrived["text"] == SECRET[:SHOWN_CHARS] and ended["text"] == [
                f"a{index}{SECRET}"[:SHOWN_CHARS] for index in (0, 1)
            ]
        if level == 3:
            assert arrived["text"] == SECRET and ended["text"] == [f"a{index}{SECRET}" for index in (0, 1)]


def test_prompt_of_ids_is_logged_as_ids(caplog: pytest.LogCaptureFixture) -> None:
    assert "input_ids" not in play(1, caplog, text=None)["arrived"]
    assert play(2, caplog, text=None)["arrived"]["input_ids"] == [0, 1, 2, 3, 4]


def test_failed_request_ends_and_probes_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log, spec = RequestLog(0), make_spec("r", [1])
    log.open_request(Prompt(spec=spec, input_ids=[1]), spec)
    assert not caplog.records, "a probe of the server's own"
    log.open_request(Prompt(spec=spec, group="g", input_ids=[1]), spec)
    error = RequestError(rid="r", message="the text was: hunter2", code="queue_full")
    log.fail_request(error)
    log.fail_request(error)
    assert [record.getMessage() for record in caplog.records[1:]] == ['request failed: {"rid":"r","code":"queue_full"}']
