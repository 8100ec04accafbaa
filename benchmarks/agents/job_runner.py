"""Runs jobs on a server with OpenAI's chat API, with the requests of OpenAI's own client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from baton.entrypoints.step_calls.call_reader import CallReader
from benchmarks.agents.workload import Job, Message, Turn

WORDS = """
the file holds a list of names and numbers that were written by the last run of the program which reads every line
counts the words in it and prints what it has found to the log before it goes on with the next one
"""

_CALLS = CallReader()

LOADING_TRIES, LOADING_POLL_S = 300, 1.0
"""A large model takes minutes to load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """Times in seconds. cached_tokens: None where the server does not tell. reusable_tokens: those of the prompt that
    the job's last turn had already computed. tool_s: how long its tool really took. followed: see `follows`; None
    until the answer has been read."""

    ttft: float
    latency: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    reusable_tokens: int = 0
    tool_s: float = 0.0
    followed: bool | None = None


@dataclass(slots=True, kw_only=True)
class JobResult:
    """duration: from the arrival to the end of the last answer; None while there is none. error: why it failed."""

    number: int
    turns: list[TurnResult] = field(default_factory=list)
    duration: float | None = None
    error: str | None = None

    @property
    def service(self) -> float | None:
        """The duration less the time of its tools: what the server, and the wait for it, made of it."""
        return None if self.duration is None else self.duration - sum(turn.tool_s for turn in self.turns)


class Server:
    """A running server. plain: send only fields of OpenAI's API."""

    def __init__(self, url: str, api_key: str, *, plain: bool, timeout_s: float) -> None:
        self.url, self.api_key, self._plain = url.rstrip("/"), api_key, plain
        self._client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=timeout_s)
        self.model = ""
        self._tokens_per_word = self._tokens_around = 1.0

    async def __aenter__(self) -> Server:
        """Waits for a server that is still loading. Raises SystemExit with what to do if none answers."""
        self.model = await self._first_model()
        short, long = [await self._prompt_tokens(count) for count in (50, 150)]
        self._tokens_per_word = (long - short) / 100
        self._tokens_around = max(0.0, short - 50 * self._tokens_per_word)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def _first_model(self) -> str:
        if "://" not in self.url:
            raise SystemExit(f"--url {self.url} has no scheme: write http://{self.url}")
        for attempt in range(LOADING_TRIES):
            try:
                return (await self._client.models.list()).data[0].id
            except openai.APIConnectionError as error:
                raise SystemExit(f"no server answers at {self.url} ({error}): start one, or say --url") from error
            except openai.APIStatusError as error:
                if error.status_code != 503:
                    raise SystemExit(f"{self.url}/v1/models answers {error.status_code}: {error.message}") from error
                if attempt == 0:
                    print(f"{self.url} is still loading; waiting", flush=True)
            await asyncio.sleep(LOADING_POLL_S)
        raise SystemExit(f"{self.url} was still loading after {LOADING_TRIES * LOADING_POLL_S:g} s")

    async def settings(self) -> dict[str, Any]:
        """The settings of a Baton server; empty for other servers."""
        try:
            return await self._client.get(f"{self.url}/server_info", cast_to=dict[str, Any])
        except openai.APIError:
            return {}

    async def _prompt_tokens(self, words: int) -> int:
        message: dict[str, str] = {"role": "user", "content": " ".join(_some(words, 0))}
        _, cost = await self.answer([message], 1, f"words-{time.time_ns():x}", is_last=True)  # nothing stays of it
        return cost.prompt_tokens

    def words(self, tokens: int, seed: object) -> str:
        """Words that make a message some ``tokens`` long."""
        return self._filler("", tokens, seed)

    def _filler(self, text: str, tokens: float, seed: object) -> str:
        """Words that make a message with this text some ``tokens`` long."""
        own = self._tokens_around + 1.5 * self._tokens_per_word * len(text.split())
        return " ".join(_some(max(0, round((tokens - own) / self._tokens_per_word)), seed))

    def messages_of(self, turn: Turn, known: int, seed: str) -> list[dict[str, str]]:
        """The messages of a turn, padded to its length. known: tokens of the conversation so far."""
        *before, last = turn.says
        wanted = turn.prompt_tokens - known if turn.prompt_tokens else turn.new_tokens
        if wanted > 0 and (words := self._filler(last.text, wanted, seed)):
            last = Message(last.role, f"{words}\n{last.text}")
        # A result of a tool has to name the call; what it is called is of no interest to the template.
        return [
            {"role": each.role, "content": each.text} | ({"tool_call_id": "call"} if each.role == "tool" else {})
            for each in (*before, last)
        ]

    def beginning_of(self, job: Job) -> list[dict[str, str]]:
        """What all jobs of a workload begin with: the system prompt and the examples."""
        words = self._filler(job.system, job.system_tokens, "system") if job.system_tokens else ""
        system = {"role": "system", "content": f"{job.system}\n{words}".rstrip()}
        return [system, *({"role": each.role, "content": each.text} for each in job.examples)]

    async def answer(self, messages: list[Any], max_tokens: int, job_id: str, is_last: bool) -> tuple[str, TurnResult]:
        """(the answer's text, its times and token counts)."""
        extra = None if self._plain else {"job_id": job_id, "is_last_step": is_last}
        text, usage, first = "", None, None
        started = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        async for event in stream:
            for choice in event.choices:
                if choice.delta.content:
                    first = first or time.perf_counter()
                    text += choice.delta.content
            usage = event.usage or usage
        ended = time.perf_counter()
        if usage is None:
            raise RuntimeError("the server sent no usage at the end of the stream")
        details = usage.prompt_tokens_details
        return text, TurnResult(
            ttft=(first or ended) - started,
            latency=ended - started,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
        )


async def run_jobs(
    server: Server, jobs: list[Job], seed: int, drain_s: float, done: Callable[[], object]
) -> list[JobResult]:
    """All jobs, each from its arrival on. Those that have not ended ``drain_s`` after the last arrival are cut off.
    done: called as each one ends."""
    began = time.perf_counter()
    prefix = f"{seed:x}-{time.time_ns():x}"  # ids of another run may still be known to the server
    results = [JobResult(number=job.number) for job in jobs]

    async def one(job: Job, result: JobResult) -> None:
        await asyncio.sleep(max(0.0, began + job.arrival - time.perf_counter()))
        try:
            await _run_job(server, job, result, seed, f"{prefix}-{job.number:04d}")
            result.duration = time.perf_counter() - began - job.arrival
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"[:300]
        done()

    tasks = [asyncio.create_task(one(job, result)) for job, result in zip(jobs, results, strict=True)]
    last = jobs[-1].arrival if jobs else 0.0
    _, late = await asyncio.wait(tasks, timeout=last + drain_s) if tasks else ((), ())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return results


async def _run_job(server: Server, job: Job, result: JobResult, seed: int, job_id: str) -> None:
    beginning = server.beginning_of(job)
    messages, known, computed = list(beginning), job.example_tokens, 0
    for number, turn in enumerate(job.turns):
        if turn.drops_history:
            messages, known, computed = list(beginning), job.example_tokens, 0
        messages += server.messages_of(turn, known, f"{seed} {job.number} {number}")
        is_last = number == len(job.turns) - 1
        text, cost = await server.answer(messages, turn.max_tokens, job_id, is_last)
        messages.append({"role": "assistant", "content": text})
        slept = await _use_tool(turn.tool_s)
        followed = follows(text, turn.command)
        # The last token of an answer was not computed.
        result.turns.append(replace(cost, reusable_tokens=max(0, computed - 1), tool_s=slept, followed=followed))
        known = computed = cost.prompt_tokens + cost.output_tokens


def follows(answer: str, command: str) -> bool:
    """True if the server reads this command out of the answer, and nothing else; for "", if it reads no call."""
    return _CALLS.read_calls(answer) == _CALLS.read_calls(f"```bash\n{command}\n```" if command else "")


async def _use_tool(seconds: float) -> float:
    """Returns how long it took, which on a busy machine is a little longer."""
    if not seconds:
        return 0.0
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    return time.perf_counter() - started


def _some(count: int, seed: object) -> list[str]:
    return random.Random(str(seed)).choices(WORDS.split(), k=count)
