"""Agents' jobs on a real server, driven by OpenAI's client: tools are read, KV stays between steps, nothing is left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from benchmarks.agents.workload import Sizes, plan_jobs
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
SYSTEM = "You are a shell agent. Do not think aloud."
TASKS = {f"job {job.number}": [turn.says[0] for turn in job.turns] for job in plan_jobs("toy", Sizes(turns=5), 2, 0)}
"""By job, what is said before each of its answers: a question, or what the tool has found."""

BLOCK = re.compile(r"```bash\n(?:cd \w+ && )?(\w+)")
HELD_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "8192", "--schedule-policy", "continuum")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Agent:
    """One job. retain_ttl: seconds for which its steps are held in any case; None leaves it to the policy."""

    def __init__(self, client: openai.OpenAI, job_id: str, retain_ttl: float | None = None) -> None:
        self.job_id = job_id
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self._client = client
        self._extra = {} if retain_ttl is None else {"retain_ttl": retain_ttl}

    def step(self, role: str, words: str, *, is_last: bool = False, stream: bool = False) -> tuple[str, Any]:
        """The answer, and its usage."""
        said = {"role": role, "content": words} | ({"tool_call_id": "1"} if role == "tool" else {})
        self.messages.append(said)
        asked: dict[str, Any] = {"model": "toy", "messages": self.messages, "max_tokens": 60, "temperature": 0}
        asked["extra_body"] = {"job_id": self.job_id, "is_last_step": is_last, **self._extra}
        if stream:
            events = list(
                self._client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
            )
            text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
            usage = events[-1].usage
        else:
            answer = self._client.chat.completions.create(**asked)
            text, usage = answer.choices[0].message.content or "", answer.usage
        self.messages.append({"role": "assistant", "content": text})
        return text, usage


def job(server: ServerUnderTest, job_id: str) -> dict[str, Any]:
    answer = server.client.get(f"/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(server: ServerUnderTest, name: str) -> int:
    """A counter of the worker; at most a second old."""
    return int(server.metric(f"{name}_total"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_two_agent_jobs_keep_their_kv_pinned_between_turns(
    server: ServerUnderTest, client: openai.OpenAI, stream: bool
) -> None:
    ids = {name: f"{name} {stream}" for name in TASKS}
    agents = {name: Agent(client, ids[name]) for name in TASKS}
    pinned = dict.fromkeys(TASKS, 0)
    parsed = 0
    before = {name: counted(server, name) for name in ("pins", "pin_hits", "pins_expired")}
    for turn in range(5):
        for name, agent in agents.items():
            said = TASKS[name][turn]
            text, usage = agent.step(said.role, said.text, is_last=turn == 4, stream=stream)
            assert usage.prompt_tokens_details.cached_tokens >= pinned[name], "what was pinned is not computed again"
            known = job(server, ids[name])
            assert known["turns"] == turn + 1 and known["open_requests"] == []
            if turn == 4:
                assert known["is_over"] and known["pins"] == [] and known["pinned_tokens"] == 0
                continue
            block = BLOCK.match(text)
            assert known["last_calls"] == ([block[1]] if block else []), text
            parsed += block is not None
            (pin,) = known["pins"]
            assert pin["tokens"] == known["pinned_tokens"] > pinned[name] and not known["is_over"]
            # The last token of an answer is sampled and not computed.
            assert usage.prompt_tokens <= pin["tokens"] < usage.prompt_tokens + usage.completion_tokens
            pinned[name] = pin["tokens"]
    assert parsed >= 5

    def ended() -> dict[str, int]:
        return {name: counted(server, name) - count for name, count in before.items()}

    # On a machine that stalls for seconds some run out before the next step takes them over.
    server.wait_until(lambda: ended()["pin_hits"] + ended()["pins_expired"] == 8, "the end of 8 pins")
    assert ended()["pins"] == 8 and ended()["pin_hits"] > 0
    # The last step has been answered, but may not have given its rows back.
    server.wait_until(
        lambda: server.metric("leased_tokens") == server.metric("kv_cache_usage_perc") == 0, "no KV in use"
    )


def test_pins_appear_in_metrics_and_end_with_their_job(server: ServerUnderTest, client: openai.OpenAI) -> None:
    first, second = (Agent(client, f"held {number}", HELD_S) for number in range(2))
    first.step("user", "How long is notes.txt?")
    alone = job(server, first.job_id)["pinned_tokens"]
    server.wait_until(lambda: server.metric("leased_tokens") == alone, f"{alone} leased tokens")
    _, usage = second.step("user", "Check notes.log for errors.")
    shared = usage.prompt_tokens_details.cached_tokens
    both = alone + job(server, second.job_id)["pinned_tokens"] - shared
    server.wait_until(lambda: server.metric("leased_tokens") == both, f"{both} leased tokens")
    assert server.metric("kv_cache_usage_perc") == pytest.approx(both / 8192)

    ended = server.client.delete(f"/jobs/{first.job_id}").json()
    assert ended["released_tokens"] == alone and ended["aborted"] == []
    left = both - alone + shared
    server.wait_until(lambda: server.metric("leased_tokens") == left, f"{left} leased tokens")
    assert server.client.get(f"/jobs/{first.job_id}").status_code == 404
    second.step("tool", "12: error 40 in web", is_last=True)
    server.wait_until(lambda: server.metric("leased_tokens") == 0, "no leased tokens")
    assert server.metric("kv_cache_usage_perc") == 0


def test_calls_after_reasoning_are_read_without_chat_template(server: ServerUnderTest) -> None:
    system = "<|im_start|>system\nYou are a shell agent. Think first.<|im_end|>\n"
    task = f"{system}<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
    fields = {"job_id": "native", "sampling_params": {"temperature": 0, "max_new_tokens": 60}, "retain_ttl": HELD_S}
    text = server.generate(text=task, **fields).json()["text"]
    assert text.startswith("<think>") and "wc" in text.split("</think>")[1]
    assert job(server, "native")["last_calls"] == ["wc"]
    assert server.client.delete("/jobs/native").status_code == 200


def test_call_is_read_from_a_truncated_step(server: ServerUnderTest) -> None:
    task = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0, "max_new_tokens": 60, "stop": "\n```"}
    text = server.generate(text=task, sampling_params=params, job_id="cut", retain_ttl=HELD_S).json()["text"]
    assert text.startswith("```bash\nwc") and not text.endswith("```")
    assert job(server, "cut")["last_calls"] == ["wc"]
    assert server.client.delete("/jobs/cut").status_code == 200


def test_job_with_any_name_can_be_looked_up_and_ended(server: ServerUnderTest) -> None:
    params = {"temperature": 0, "max_new_tokens": 1}
    names = ["line", "line\n", "\n", "two\nlines", "a/../b", "//", "a?b#c%2F", "日本 \x00"]
    for name in names:
        assert server.generate(text="hello", sampling_params=params, job_id=name).status_code == 200
    for name in reversed(names):
        path = f"/jobs/{quote(name, safe='')}"
        assert job(server, quote(name, safe=""))["job_id"] == name
        assert server.client.delete(path).json()["job_id"] == name
        assert server.client.get(path).status_code == 404
