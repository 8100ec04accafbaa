"""What the manager has written down of the requests that pass through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.runtime.clients import SOLE_CLIENT
from baton.runtime.config import RecordingConfig
from baton.runtime.messages import RequestError
from baton.runtime.metrics import ServerMetrics
from baton.runtime.recording.lines import HEADER
from baton.runtime.recording.recorder import RequestRecorder, open_recorder
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import CacheReport, FinishReason, FoundTokens, MissedSpan, RequestRefused
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.manager_rig import Backend, check, child, prompt
from tests.doubles.prompts import make_prompt

LENGTH, ABORT = FinishReason("length"), FinishReason("abort")


def recorder_to(path: Path) -> tuple[RequestRecorder, ServerMetrics]:
    metrics = ServerMetrics("m")
    recorder = open_recorder(RecordingConfig(record_requests=str(path)), metrics)
    assert recorder is not None
    return recorder, metrics


def recorded(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert HEADER in lines[0]
    return lines[1:]


def test_recording_is_off_by_default(tmp_path: Path) -> None:
    assert open_recorder(RecordingConfig(), ServerMetrics("m")) is None


def test_prompt_and_outputs_are_recorded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recorder, metrics = recorder_to(tmp_path / "log")

    two = prompt("b", sampling=SamplingParams(n=2), namespace="s", job_id="j", state_points=(1,), retain_states=3)

    async def body(backend: Backend) -> None:
        call = await backend.manager.open_answer(SOLE_CLIENT, [prompt("a"), two], stream=True)
        await backend.output("a", "x")
        await backend.output("b", "q", LENGTH, index=0)
        spans = MissedSpan("evicted", 1, 3, 2.0), MissedSpan("evicted", 4, 1, 2.0, "x"), MissedSpan("required", 5, 1)
        await backend.output("a", "y", LENGTH, found=FoundTokens(device=1), cache_report=CacheReport(spans))
        await backend.output("b", "p", LENGTH, index=1, found=FoundTokens(device=2))
        call.close()

    check(tokenizer, body, recorder=recorder)
    first, second = recorded(tmp_path / "log")
    assert first["input_ids"] == [97, 98] and first["output_ids"] == list(b"xy") and first["cached_tokens"] == 1
    assert first["missed_tokens"] == {"evicted": 4, "required": 1} and "missed_tokens" not in second
    assert second["output_ids"] == [[ord("q")], [ord("p")]] and {"namespace", "job"} < second.keys()
    assert (second["state_points"], second["retain_states"]) == ([1], 3)
    assert not {"state_points", "retain_states"} & first.keys()
    assert second["cached_tokens"] == 0, "the second sample found what the first had computed"
    assert b"baton:recorded_requests_total" in metrics.render()
    assert metrics.registry.get_sample_value("baton:recorded_requests_total", {"model_name": "m"}) == 2


def test_continuation_is_recorded_with_whole_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recorder, _ = recorder_to(tmp_path / "log")

    async def body(backend: Backend) -> None:
        call = await backend.manager.open_answer(SOLE_CLIENT, [child("c", suffix_text="d")], stream=True)
        (sent,) = [each for each in backend.received() if isinstance(each, RequestSpec)]
        assert sent.returns_prompt
        await backend.output("c", "x", prompt_ids=pack_ids([1, 2, 100]))
        await backend.output("c", "", LENGTH)
        with call:
            (output,) = await call.outputs()
        assert output.prompt_ids == b"", "it did not ask for them"

    check(tokenizer, body, recorder=recorder)
    (line,) = recorded(tmp_path / "log")
    assert line["input_ids"] == [1, 2, 100] and line["output_ids"] == [ord("x")] and "continuation_of" in line


def test_requests_without_cache_use_are_not_recorded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recorder, _ = recorder_to(tmp_path / "log")

    async def body(backend: Backend) -> None:
        manager = backend.manager
        probe = make_prompt("health-1", input_ids=[0])
        assert not probe.group
        call = await manager.open_answer(
            SOLE_CLIENT, [probe, prompt("refused"), child("early"), prompt("open")], stream=True
        )
        await backend.output("health-1", "x", LENGTH)
        await backend.send(RequestError(rid="refused", message="full"))
        await backend.output("early", "", ABORT, prompt_ids=pack_ids([7]))
        call.close()

    check(tokenizer, body, recorder=recorder)
    assert recorded(tmp_path / "log") == [] and not recorder._open


def test_refused_call_leaves_no_open_recording(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recorder, _ = recorder_to(tmp_path / "log")

    async def body(backend: Backend) -> None:
        try:
            await backend.manager.open_answer(SOLE_CLIENT, [prompt("twice"), prompt("twice")], stream=True)
        except RequestRefused:
            assert not recorder._open
        else:
            raise AssertionError("taken")

    check(tokenizer, body, recorder=recorder)


def test_aborted_request_is_recorded_with_partial_output(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recorder, _ = recorder_to(tmp_path / "log")

    async def body(backend: Backend) -> None:
        call = await backend.manager.open_answer(SOLE_CLIENT, [prompt("a")], stream=True)
        await backend.output("a", "x")
        call.close()
        await backend.output("a", "y", ABORT)

    check(tokenizer, body, recorder=recorder)
    (line,) = recorded(tmp_path / "log")
    assert line["finish"] == "abort" and line["output_ids"] == list(b"xy")
