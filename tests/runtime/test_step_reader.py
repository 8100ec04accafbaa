"""Which steps are read, and what is told of them."""

from __future__ import annotations

from typing import Any

from baton.runtime.messages import StepCalls, TextOutput, TokenOutput
from baton.runtime.prompt import Prompt
from baton.runtime.step_reader import StepReader
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.outcome import FinishReason
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams

STOP = FinishReason(type="stop")


class Sent:
    """Stands in for a Sender."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def reader() -> tuple[StepReader, Sent]:
    sent: Any = Sent()
    return StepReader(sent, lambda text: (ToolCall(text),)), sent


def prompt(forced: str = "", **fields: Any) -> Prompt:
    sampling = fields.pop("sampling", SamplingParams())
    return Prompt(spec=RequestSpec(**{"rid": "r", "job_id": "j", "sampling": sampling, **fields}), forced=forced)


def output(text: str, finish: FinishReason | None = None, index: int = 0, *, is_job_step: bool = True) -> TextOutput:
    step = finish is not None and is_job_step
    return TextOutput(output=TokenOutput(rid="r", index=index, finish=finish, is_job_step=step), text=text)


def test_tool_calls_are_read_from_whole_text_at_end() -> None:
    steps, sent = reader()
    steps.add_output(prompt("<tool>"), output("l"))
    steps.add_output(prompt("<tool>"), output("never", index=1))
    assert not sent.messages
    steps.add_output(prompt("<tool>"), output("s", STOP))
    assert sent.messages == [StepCalls(rid="r", index=0, calls=(ToolCall("<tool>ls"),))]


def test_outputs_without_a_next_job_step_are_not_read() -> None:
    steps, sent = reader()
    for each in (prompt(is_last_step=True), prompt(sampling=SamplingParams(beam_width=2))):
        steps.add_output(each, output("ls", STOP))
    steps.add_output(prompt(job_id=None), output("ls", STOP, is_job_step=False))
    steps.add_output(prompt(), output("ls", FinishReason(type="abort")))
    unused: Any = Sent()
    StepReader(unused, None).add_output(prompt(), output("ls", STOP))
    assert not sent.messages and not unused.messages


def test_step_of_job_that_worker_found_is_read() -> None:
    steps, sent = reader()
    steps.add_output(prompt(job_id=None), output("l"))
    steps.add_output(prompt(job_id=None), output("s", STOP))
    assert sent.messages == [StepCalls(rid="r", index=0, calls=(ToolCall("ls"),))] and not steps._texts["r"]


def test_forgotten_request_leaves_no_step_text() -> None:
    steps, _ = reader()
    steps.add_output(prompt(), output("l"))
    steps.forget_request("r")
    steps.forget_request("r")
    assert not steps._texts
