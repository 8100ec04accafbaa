"""Jobs from a file of JSON lines in one of two formats; the first line tells which.

    {"job_id": "a", "arrival": 0.0, "system_tokens": 0, "turns":
        [{"prompt_tokens": 92, "output_tokens": 60, "tool": "ls", "tool_s": 0.1}, …]}         one job a line
    {"event": "arrival" | "departure" | "called" | …, "job_id": "a", "time": 1.5, …}        a server's scheduler trace

A prompt that is at least as long as the previous turn, output included, is assumed to begin with it; a shorter one is
assumed to share only the system prompt. Other fields and events are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ....runtime.pool_sizes import PoolSizes
from .job import Job, Turn, numbered


class TraceError(ValueError):
    """A trace cannot be read; the message names the line and the fault."""


class PlainTurn(msgspec.Struct):
    prompt_tokens: int
    output_tokens: int
    tool: str | None = None
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"prompt_tokens is {self.prompt_tokens} and output_tokens {self.output_tokens}; both are 1 or more"
            )
        if not 0.0 <= self.tool_s < float("inf"):
            raise ValueError(f"tool_s is {self.tool_s}; it should be 0 or more seconds")


class PlainJob(msgspec.Struct):
    job_id: str
    arrival: float
    turns: list[PlainTurn]
    system_tokens: int = 0
    """Leading tokens of the first prompt that all jobs share."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("turns is empty; a job has at least one")
        if self.system_tokens < 0:
            raise ValueError(f"system_tokens is {self.system_tokens}; it should be 0 or more")

    def make_job(self) -> Job:
        turns: list[Turn] = []
        for turn in self.turns:
            system = min(self.system_tokens, turn.prompt_tokens - 1)
            known = turns[-1].known if turns else system
            kept = known if known < turn.prompt_tokens else system
            turns.append(Turn(kept, turn.prompt_tokens - kept, turn.output_tokens, turn.tool, turn.tool_s))
        last = turns[-1]
        turns[-1] = Turn(last.kept, last.new, last.output)  # nothing follows its tool
        return Job(self.job_id, self.arrival, tuple(turns), 0)


class _Event(msgspec.Struct):
    event: str
    job_id: str = ""
    time: float = 0.0
    rid: str = ""
    index: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    tool: str | None = None
    reason: str = ""
    is_last_step: bool = False
    calls: list[dict[str, Any]] = []


@dataclass(slots=True)
class _Traced:
    """A job of a scheduler trace, up to the last event read."""

    arrival: float
    open: dict[str, _Event] = field(default_factory=dict)
    """Arrivals that have not departed."""
    gone: dict[str, set[int]] = field(default_factory=dict)
    """Indices of the outputs that have departed, by rid; of several (``n``) the first to end is played."""
    turns: list[PlainTurn] = field(default_factory=list)
    ended: float | None = None
    system: int = 0
    is_over: bool = False
    """Its last step has departed; an arrival with the same id begins another job."""

    def note_arrival(self, event: _Event) -> None:
        if self.ended is not None:
            self.turns[-1].tool_s = max(0.0, event.time - self.ended)
            self.ended = None
        self.open[event.rid] = event
        self.gone.pop(event.rid, None)

    def note_departure(self, event: _Event) -> None:
        """Raises ValueError if it had not arrived."""
        arrival = self.open.pop(event.rid, None)
        others = self.gone.setdefault(event.rid, set())
        if arrival is None and others and event.index not in others:
            others.add(event.index)
            return
        if arrival is None:
            raise ValueError(f"request {event.rid!r} of job {event.job_id!r} departs, but has not arrived")
        others.add(event.index)
        self.is_over |= event.is_last_step
        if event.reason == "abort":
            return
        if not self.turns:
            self.system = event.hit_tokens
        prompt = event.prompt_tokens or arrival.prompt_tokens
        self.turns.append(PlainTurn(prompt, max(1, event.output_tokens), event.tool))
        self.ended = event.time


def read_trace(path: Path) -> list[Job]:
    """The jobs of a file, in order of arrival, the first at 0 s. Raises TraceError."""
    lines = list(_lines(path))
    if not lines:
        raise TraceError(f"{path}: there is no line in it")
    number, first = lines[0]
    kind = _fields_of(path, number, first)
    if "event" in kind:
        found = _read_events(path, lines)
    elif "turns" in kind:
        found = _read_plain(path, lines)
    else:
        raise TraceError(f'{path}, line {number}: neither a job ("turns") nor an event ("event") of a scheduler trace')
    if not found:
        raise TraceError(f"{path}: no job in it has a turn that ended")
    found.sort(key=lambda job: job.arrival)
    start = found[0].arrival
    return numbered([Job(job.name, job.arrival - start, job.turns, 0) for job in found])


class _Pools(PoolSizes, kw_only=True, frozen=True):
    """The event ``pools``."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.page_size < 1 or min(msgspec.structs.astuple(self)) < 0:
            raise ValueError("tokens and page_size are 1 or more, and other sizes 0 or more")
        if self.window_tokens < self.window:
            raise ValueError(f"window_tokens is {self.window_tokens}, but window {self.window}")


def read_pools(path: Path) -> PoolSizes | None:
    """The sizes of the pools of the server that wrote a trace, at its last start; None where the file does not say.
    Raises TraceError."""
    found = None
    for number, line in enumerate(_content(path).splitlines(), 1):
        if b'"pools"' in line and _fields_of(path, number, line).get("event") == "pools":
            try:
                found = msgspec.json.decode(line, type=_Pools)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    return None if found is None else PoolSizes(**msgspec.structs.asdict(found))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    content = _content(path)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and not content.endswith(b"\n") and not _is_json(lines[-1][1]):
        print(f"{path}, line {lines[-1][0]} was cut off and is left out", file=sys.stderr)
        del lines[-1]
    return iter(lines)


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _fields_of(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}, line {number}: {error}") from error


def _read_plain(path: Path, lines: Sequence[tuple[int, bytes]]) -> list[Job]:
    decoder, jobs, seen = msgspec.json.Decoder(PlainJob), [], dict[str, int]()
    for number, line in lines:
        try:
            job = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if (before := seen.setdefault(job.job_id, number)) != number:
            raise TraceError(f"{path}, line {number}: job_id {job.job_id!r} is that of line {before}, too")
        jobs.append(job.make_job())
    return jobs


def _read_events(path: Path, lines: Sequence[tuple[int, bytes]]) -> list[Job]:
    decoder, jobs, made = msgspec.json.Decoder(_Event), dict[str, _Traced](), list[Job]()

    def close(name: str) -> None:
        traced = jobs.pop(name)
        if traced.turns:
            made.append(PlainJob(name, traced.arrival, traced.turns, traced.system).make_job())

    for number, line in lines:
        try:
            event = decoder.decode(line)
            known = jobs.get(event.job_id)
            if event.event == "arrival" and known is not None and known.is_over and not known.open:
                close(event.job_id)
            if event.event == "start":  # a restarted server knows no earlier jobs
                for name in list(jobs):
                    close(name)
            _note_event(jobs, event)
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
    for name in list(jobs):
        close(name)
    return made


def _note_event(jobs: dict[str, _Traced], event: _Event) -> None:
    match event.event:
        case "arrival":
            jobs.setdefault(event.job_id, _Traced(event.time)).note_arrival(event)
        case "departure":
            if event.job_id not in jobs:
                raise ValueError(f"job {event.job_id!r} departs, but has not arrived")
            jobs[event.job_id].note_departure(event)
        case "called":
            traced = jobs.get(event.job_id)
            if traced is not None and traced.turns:
                traced.turns[-1].tool = str(event.calls[0].get("tool")) if event.calls else ""
