"""How jobs are driven: what is said in each turn, what is counted, and what happens to those that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from benchmarks.agents import job_runner
from benchmarks.agents.job_runner import JobResult, Server, TurnResult, follows, run_jobs
from benchmarks.agents.workload import Job, Message, Turn

CALL = "```bash ls```"


class Scripted(Server):
    """Answers each prompt with a call of ``ls``; a word is a token. Fails for jobs, and never answers, as told."""

    def __init__(self, *, fails: str = "-", hangs: str = "-") -> None:
        super().__init__("http://nowhere", "key", plain=True, timeout_s=1)
        self.asked: list[tuple[str, bool, list[dict[str, str]]]] = []
        self._fails, self._hangs = fails, hangs

    async def answer(self, messages: list[Any], max_tokens: int, job_id: str, is_last: bool) -> tuple[str, TurnResult]:
        self.asked.append((job_id, is_last, [dict(message) for message in messages]))
        if job_id.endswith(self._fails):
            raise ConnectionError("gone")
        if job_id.endswith(self._hangs):
            await asyncio.sleep(3600)
        words = sum(len(message["content"].split()) for message in messages)
        return CALL, TurnResult(ttft=0.0, latency=0.0, prompt_tokens=words, output_tokens=2, cached_tokens=0)


def turn(words: str = "go", **fields: Any) -> Turn:
    return Turn(says=(Message("user", words),), **fields)


def run(server: Scripted, *jobs: Job, drain_s: float = 60.0) -> tuple[list[JobResult], int]:
    done = []
    results = asyncio.run(run_jobs(server, list(jobs), 0, drain_s, lambda: done.append(1)))
    return results, len(done)


def job(number: int, *turns: Turn, arrival: float = 0.0) -> Job:
    return Job(number=number, arrival=arrival, system="be brief", turns=turns)


def test_each_turn_resends_history_and_only_the_last_sets_is_last() -> None:
    server = Scripted()
    (result,), done = run(server, job(3, turn("a", command="ls", tool_s=0.02), turn("b", command="cat"), turn("c")))
    first, second, third = server.asked
    assert [is_last for _, is_last, _ in server.asked] == [False, False, True]
    assert first[0] == second[0] == third[0] and first[0].endswith("-0003")
    texts = [[message["content"] for message in messages] for _, _, messages in server.asked]
    assert texts == [
        ["be brief", "a"],
        ["be brief", "a", CALL, "b"],
        ["be brief", "a", CALL, "b", CALL, "c"],
    ]
    assert [message["role"] for message in third[2]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [each.followed for each in result.turns] == [True, False, False]
    assert [each.reusable_tokens for each in result.turns] == [0, 3 + 2 - 1, 6 + 2 - 1]
    assert done == 1 and result.duration is not None and result.service is not None
    assert result.turns[0].tool_s >= 0.02 and result.turns[1].tool_s == 0
    assert result.service == result.duration - result.turns[0].tool_s


def test_job_ids_are_unique_across_runs() -> None:
    server = Scripted()
    run(server, job(0, turn()), job(1, turn()))
    run(server, job(0, turn()))
    assert len({job_id for job_id, _, _ in server.asked}) == 3


def test_prompts_are_padded_to_the_planned_lengths() -> None:
    server = Scripted()
    (result,), _ = run(server, job(0, turn(prompt_tokens=100), turn(prompt_tokens=250), turn(new_tokens=50)))
    sizes = [each.prompt_tokens for each in result.turns]
    assert abs(sizes[0] - 100) <= 5 and abs(sizes[1] - 250) <= 5 and abs(sizes[2] - sizes[1] - 2 - 50) <= 5
    again = Scripted()
    run(again, job(0, turn(prompt_tokens=100), turn(prompt_tokens=250), turn(new_tokens=50)))
    assert [messages for _, _, messages in again.asked] == [messages for _, _, messages in server.asked]


def test_dropped_history_leaves_system_prompt_and_new_message() -> None:
    server = Scripted()
    (result,), _ = run(server, job(0, turn("a"), turn("b", drops_history=True)))
    assert [message["content"] for message in server.asked[1][2]] == ["be brief", "b"]
    assert result.turns[1].reusable_tokens == 0


def test_examples_stand_behind_the_system_prompt_and_count_in_the_planned_lengths() -> None:
    server = Scripted()
    examples = (Message("user", "now " * 20), Message("assistant", "then " * 20))
    turns = (turn("a", prompt_tokens=100), turn("b", prompt_tokens=200), turn("c", drops_history=True))
    given = Job(number=0, arrival=0.0, system="be brief", turns=turns, examples=examples, example_tokens=40)
    (result,), _ = run(server, given)
    assert all(
        messages[1:3] == [{"role": m.role, "content": m.text} for m in examples] for *_, messages in server.asked
    )
    assert [abs(each.prompt_tokens - wanted) <= 5 for each, wanted in zip(result.turns, (100, 200, 43))] == [True] * 3
    assert result.turns[0].reusable_tokens == result.turns[2].reusable_tokens == 0


@pytest.mark.parametrize(
    ("answer", "command", "is_followed"),
    [
        ("I run this:\n```bash\nls -la\n```", "ls -la", True),
        ("I run this:\n```bash\nls\n```", "ls -la", False),
        ("ls -la lists the files", "ls -la", False),
        ("I am done.", "", True),
        ("I am done.\n```bash\nls\n```", "", False),
    ],
)
def test_answers_follow_with_the_asked_call_or_with_none(answer: str, command: str, is_followed: bool) -> None:
    assert follows(answer, command) is is_followed


def test_failed_and_cut_off_jobs_have_no_duration() -> None:
    server = Scripted(fails="1", hangs="2")
    results, done = run(
        server, *(job(number, turn(), turn(), arrival=0.01 * number) for number in range(3)), drain_s=0.5
    )
    good, failed, cut_off = results
    assert good.duration is not None and good.error is None and len(good.turns) == 2
    assert failed.duration is None and failed.error == "ConnectionError: gone" and failed.turns == []
    assert cut_off.duration is cut_off.error is cut_off.service is None
    assert done == 2


def test_empty_plan_returns_no_results() -> None:
    assert run(Scripted()) == ([], 0)


def test_tool_message_carries_its_tool_call_id() -> None:
    server = Scripted()
    run(server, job(0, Turn(says=(Message("tool", "out"),))))
    assert server.asked[0][2][1] == {"role": "tool", "content": "out", "tool_call_id": "call"}


class Starting(Server):
    """A server: statuses of /v1/models, one per request; 0: no server."""

    def __init__(self, *statuses: int) -> None:
        super().__init__("http://here", "key", plain=True, timeout_s=1)
        left = list(statuses)

        def reply(request: httpx.Request) -> httpx.Response:
            status = left.pop(0)
            if not status:
                raise httpx.ConnectError("refused", request=request)
            model = {"id": "m", "object": "model", "created": 0, "owned_by": "us"}
            return httpx.Response(status, json={"object": "list", "data": [model]} if status == 200 else {"error": {}})

        client: Any = httpx.AsyncClient(transport=httpx.MockTransport(reply))
        self._client = openai.AsyncOpenAI(base_url="http://here/v1", api_key="key", max_retries=0, http_client=client)


def test_runner_waits_for_loading_server_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_runner, "LOADING_POLL_S", 0.0)
    assert asyncio.run(Starting(503, 503, 200)._first_model()) == "m"
    assert capsys.readouterr().out == "http://here is still loading; waiting\n"
    monkeypatch.setattr(job_runner, "LOADING_TRIES", 2)
    with pytest.raises(SystemExit, match="http://here was still loading after"):
        asyncio.run(Starting(503, 503, 200)._first_model())


@pytest.mark.parametrize(("status", "said"), [(0, "no server answers at http://here"), (401, "answers 401")])
def test_unreachable_server_exits_with_one_line(status: int, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        asyncio.run(Starting(status)._first_model())


def test_a_url_needs_a_scheme() -> None:
    server = Server("localhost:1", "key", plain=True, timeout_s=1)
    with pytest.raises(SystemExit, match="--url localhost:1 has no scheme: write http://localhost:1"):
        asyncio.run(server._first_model())


@pytest.mark.parametrize(("status", "told"), [(200, {"object": "list"}), (404, {}), (0, {})])
def test_settings_come_from_the_server_if_available(status: int, told: dict[str, str]) -> None:
    assert told.items() <= asyncio.run(Starting(status).settings()).items()
