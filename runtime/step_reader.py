"""Parses the tool calls of a job's finished steps and sends them to the worker, which estimates the tool's duration.

A step's end is parsed before the client gets it, so the calls reach the worker before the job's next request.
"""

from __future__ import annotations

from collections.abc import Callable

from ..scheduler.jobs.calls import ToolCall
from .channels import Sender
from .messages import StepCalls, TextOutput
from .prompt import Prompt

ReadCalls = Callable[[str], tuple[ToolCall, ...]]
"""Finds the tool calls in the whole text of an answer. Never raises, and takes little time for any text."""


class StepReader:
    """Holds the text of open requests, by rid and index."""

    def __init__(self, sender: Sender, read: ReadCalls | None) -> None:
        """read: None without a tool-call parser; then nothing is sent, and a step's KV stays pinned only briefly."""
        self._sender = sender
        self._read = read
        self._texts: dict[str, dict[int, list[str]]] = {}

    def add_output(self, prompt: Prompt, update: TextOutput) -> None:
        """Add an update of an output. Last steps and beam searches are ignored, and so are requests that belong to no
        job, as the worker says at their end: it finds the jobs of requests that name none."""
        spec, output = prompt.spec, update.output
        if self._read is None or spec.is_last_step or prompt.sampling.beam_width is not None:
            return
        texts = self._texts.setdefault(spec.rid, {})
        texts.setdefault(output.index, [prompt.forced] if prompt.forced else []).append(update.text)
        if output.finish is None:
            return
        text = "".join(texts.pop(output.index))
        if output.is_job_step and output.finish.type != "abort":
            self._sender.send(StepCalls(rid=spec.rid, index=output.index, calls=self._read(text)))

    def forget_request(self, rid: str) -> None:
        """Drop the texts of a request that has ended."""
        self._texts.pop(rid, None)
