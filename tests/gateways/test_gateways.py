"""Gateways of others in front of two servers: requests and streams pass, one key has one server, and a request that is
refused takes no server out. docs/gateways.md shows the commands."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.gateway_under_test import GatewayUnderTest, outputs_of
from tests.doubles.server_under_test import ServerUnderTest, free_port

pytestmark = [pytest.mark.gateways, pytest.mark.slow]

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
GREEDY = {"temperature": 0, "max_new_tokens": 12}
TALK = [{"role": "user", "content": "How many lines are in manual.md?"}]
CHAT = {"model": "toy", "messages": TALK, "temperature": 0, "max_tokens": 12}
CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KINDS = ("smg", "sglang-router", "vllm-router")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerUnderTest]]:
    running: list[ServerUnderTest] = []
    try:
        for _ in range(2):
            flags = ["--served-model-name", "toy", "--max-total-tokens", "16384", "--dtype", "float32"]
            flags += ["--device", "cpu", "--kv-events-endpoint", f"tcp://127.0.0.1:{free_port()}"]
            flags += ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{free_port()}"]
            running.append(ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None))
        yield [server.wait_ready() for server in running]
    finally:
        for server in running:
            server.__exit__()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which ends as it should."""
    lines = list[str]()
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines += [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_and_streams_pass_through_gateways(kind: str, servers: list[ServerUnderTest], tmp_path: Path) -> None:
    """Each answer is the one that a server gives by itself."""
    direct = servers[0].client
    with GatewayUnderTest(kind, servers, tmp_path, "--policy", "round_robin") as gateway:
        client = gateway.client
        for prompt in ({"text": "How many lines?"}, {"input_ids": [71, 72, 73, 74]}):
            body = prompt | {"sampling_params": GREEDY}
            expected = direct.post("/generate", json=body).json()
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == expected["output_ids"]
            assert events(client, "/generate", body)[-1]["text"] == expected["text"]
        answer = client.post("/v1/chat/completions", json=CHAT).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == direct.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events(client, CHATS, CHAT)]
        assert "".join(pieces) == text and len(pieces) > 2
        body = {"model": "toy", "prompt": "How many lines?", "temperature": 0, "max_tokens": 12}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in events(client, COMPLETIONS, body)) == text
        response = client.post(
            "/v1/responses", json={"model": "toy", "input": "List the files.", "max_output_tokens": 8}
        )
        assert response.json()["output"][0]["type"] == "message"
        if kind != "sglang-router":  # which has no such path
            message = client.post("/v1/messages", json={"model": "toy", "messages": TALK, "max_tokens": 8})
            assert message.json()["content"][0]["type"] == "text"
        assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
        assert client.post("/flush_cache").status_code == 200


KEYED = [
    ("smg", "consistent_hashing", "x-smg-routing-key"),
    ("smg", "manual", "x-smg-routing-key"),
    ("sglang-router", "manual", "x-smg-routing-key"),
    ("vllm-router", "consistent_hash", "x-session-id"),
    ("vllm-router", "consistent_hash", "x-user-id"),
    ("vllm-router", "sticky_least_loaded", "x-session-id"),
]


def home(servers: Sequence[ServerUnderTest], send: Callable[[], httpx.Response]) -> int:
    """Which server answered."""
    before = [outputs_of(server) for server in servers]
    answer = send()
    assert answer.status_code == 200, answer.text
    [served] = [n for n, server in enumerate(servers) if outputs_of(server) > before[n]]
    return served


@pytest.mark.parametrize(("kind", "policy", "header"), KEYED)
def test_requests_with_one_key_reach_one_server(
    kind: str, policy: str, header: str, servers: list[ServerUnderTest], tmp_path: Path
) -> None:
    with GatewayUnderTest(kind, servers, tmp_path, "--policy", policy) as gateway:

        def send(key: int, turn: int) -> httpx.Response:
            path, body = "/generate", {"text": f"turn {turn}", "sampling_params": {"max_new_tokens": 2}}
            if turn % 2:
                path, body = CHATS, CHAT | {"max_tokens": 2}
            return gateway.client.post(path, json=body, headers={header: f"key-{key}"})

        homes = {key: {home(servers, lambda k=key, t=turn: send(k, t)) for turn in range(4)} for key in range(16)}
        assert all(len(each) == 1 for each in homes.values()), homes
        assert set.union(*homes.values()) == {0, 1}, "all keys have the same server"


PREFIXED = [
    ("smg", "cache_aware", "/generate"),
    ("smg", "cache_aware", CHATS),
    ("sglang-router", "cache_aware", "/generate"),
    ("sglang-router", "cache_aware", CHATS),
    ("vllm-router", "cache_aware", COMPLETIONS),  # it does not look into the text of /generate
    ("vllm-router", "cache_aware", CHATS),
]


@pytest.mark.parametrize(("kind", "policy", "path"), PREFIXED)
def test_requests_with_one_prefix_reach_one_server(
    kind: str, policy: str, path: str, servers: list[ServerUnderTest], tmp_path: Path
) -> None:
    """First turns come at once: with one after the other, idle servers are all the same to most policies."""

    def send(key: int, turn: int) -> httpx.Response:
        rng = random.Random(key)
        text = " ".join(str(rng.randrange(1000)) for _ in range(120)) + f" turn {turn}"
        if path == CHATS:
            body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        elif path == COMPLETIONS:
            body = {"model": "toy", "prompt": text, "max_tokens": 2}
        else:
            body = {"text": text, "sampling_params": {"max_new_tokens": 2}}
        answer = gateway.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    for server in servers:
        server.wait_until(lambda server=server: server.client.post("/flush_cache").status_code == 200, "idle")
    with GatewayUnderTest(kind, servers, tmp_path, "--policy", policy) as gateway, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: send(key, 0), range(16)))
        answers = list[httpx.Response]()
        homes = [
            {home(servers, lambda k=key, t=turn: answers.append(send(k, t)) or answers[-1]) for turn in range(1, 4)}
            for key in range(16)
        ]
        found = [cached_tokens(answer.json()) for answer in answers]
        assert all(len(each) == 1 for each in homes) and min(found) > 100, (homes, found)
        assert set.union(*homes) == {0, 1}, "all prefixes have the same server"


def cached_tokens(answer: dict[str, Any]) -> int:
    if "meta_info" in answer:
        return answer["meta_info"]["cached_tokens"]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/generate", CHATS])
def test_kv_aware_router_sends_prompts_to_their_cached_blocks(
    path: str, servers: list[ServerUnderTest], tmp_path: Path
) -> None:
    """vllm-router, by the events of the servers: each prompt is computed on one server alone, without the router."""
    flags = ["--policy", "kv_aware", "--kv-event-model", "toy", "--kv-event-block-size", "16"]
    for server in servers:
        told = server.client.get("/server_info").json()["internal_states"][0]["kv_events"]
        flags += ["--kv-event-source", f"{server.url}={told['endpoint']}"]
        flags += ["--kv-event-replay-source", f"{server.url}={told['replay_endpoint']}"]
    for server in servers:
        server.wait_until(lambda server=server: server.client.post("/flush_cache").status_code == 200, "idle")
    with GatewayUnderTest("vllm-router", servers, tmp_path, *flags) as gateway:
        bodies = list[dict[str, Any]]()
        for key in range(16):
            text = f"story {key}, path {path}: " + f"{key} then {key * 31 % 97}, " * 30
            chat = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            plain = {"input_ids": [5 + (key * 131 + n * 17) % 900 for n in range(200)]}
            bodies.append(chat if path == CHATS else plain | {"sampling_params": {"max_new_tokens": 2}})
        for server in servers:  # events before the subscription are not heard
            mark = f"kv_index subscriber for {server.url} "
            server.wait_until(lambda mark=mark: mark in gateway.log, f"the router follows {server.url}")
        for key, body in enumerate(bodies):
            assert servers[key % 2].client.post(path, json=body).status_code == 200
        time.sleep(1)  # events pass through two processes, and nothing tells when the router has applied them
        for key, body in enumerate(bodies):
            for _ in range(2):
                assert home(servers, lambda body=body: gateway.client.post(path, json=body)) == key % 2, gateway.log[
                    -3000:
                ]


@pytest.mark.parametrize("kind", KINDS)
def test_refused_requests_do_not_eject_a_server(kind: str, servers: list[ServerUnderTest], tmp_path: Path) -> None:
    """sglang-router's circuit breaker counts each 4xx as a failure of the server, so it has to be switched off."""
    limits = ["--policy", "round_robin", "--health-failure-threshold", "1", "--health-check-interval-secs", "1"]
    limits += ["--disable-circuit-breaker"] if kind == "sglang-router" else ["--cb-failure-threshold", "2"]
    with GatewayUnderTest(kind, servers, tmp_path, *limits) as gateway:
        client = gateway.client
        long = {"model": "toy", "messages": [{"role": "user", "content": "x y " * 20_000}]}
        for _ in range(8):
            for path, body in (
                ("/generate", {"text": "a", "sampling_params": {"temperature": -5}}),
                ("/generate", {"text": "a " * 20_000, "sampling_params": {}}),
                ("/generate", {"input_ids": [10**6], "sampling_params": {}}),
                (CHATS, long),
                (CHATS, CHAT | {"stop": ["x"] * 500}),
            ):
                refused = client.post(path, json=body)
                assert refused.status_code in (400, 422), refused.text
        assert gateway.healthy_workers() == 2
        good = {"text": "a", "sampling_params": GREEDY}
        assert {home(servers, lambda: client.post("/generate", json=good)) for _ in range(8)} == {0, 1}
