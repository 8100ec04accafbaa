"""The other endpoints of the HTTP API: information, tokenizer, cache, profiles, metrics; keys and origins; idleness."""

from __future__ import annotations

import signal
import threading
import time
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.doubles.http_calls import error_of, events, generate, long
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

KEY = "s3cret"

# -- the other endpoints -----------------------------------------------------------------------------------------------


def test_information_endpoints_describe_the_server(server: ServerUnderTest) -> None:
    get = server.client.get
    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}
    assert get("/health_generate").json() == {"status": "ok"}
    assert get("/model_info").json() == get("/get_model_info").json()
    assert get("/model_info").json()["context_length"] == 4096
    info = get("/server_info").json()
    assert info["served_model_name"] == "echo" and info["max_body_mb"] == 4 and "api_key" not in info
    assert info["internal_states"][0]["vocab_size"] == 257
    assert info["max_total_num_tokens"] == info["internal_states"][0]["max_total_tokens"]
    assert get("/get_server_info").status_code == 200
    assert get("/cache/tiers").json() == info["internal_states"][0], "the worker's double answers every question alike"
    assert get("/v1/models").json()["data"][0]["id"] == "echo"


def test_tokenize_and_detokenize(server: ServerUnderTest) -> None:
    post = server.client.post
    assert post("/tokenize", json={"prompt": "hé"}).json() == {
        "tokens": [104, 195, 169],
        "count": 3,
        "max_model_len": 4096,
        "token_strs": None,
    }
    assert post("/tokenize", json={"prompt": ["a", "bc"], "model": "echo"}).json()["count"] == [1, 2]
    assert post("/detokenize", json={"tokens": [104, 195, 169, 256]}).json()["text"] == "hé"
    assert post("/detokenize", json={"tokens": [[97], [256]], "skip_special_tokens": False}).json()["text"] == [
        "a",
        "<eos>",
    ]
    assert error_of(post("/tokenize", json={"prompt": 5}), 400)["param"] == "prompt"
    assert error_of(post("/tokenize", json={"text": "a"}), 400)["code"] == "unknown_field"
    assert error_of(post("/tokenize", json={"prompt": "a", "model": "other"}), 404)["code"] == "model_not_found"
    for tokens in ("a", [1, "a"], [1, [2]], [-1], [257], [True], None):
        assert error_of(post("/detokenize", json={"tokens": tokens}), 400)["param"] == "tokens"


def test_tokenize_matches_vllm(server: ServerUnderTest) -> None:
    post = server.client.post
    got = post("/v1/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert got == {"tokens": [97, 98], "count": 2, "max_model_len": 4096, "token_strs": ["a", "b"]}
    assert post("/v1/tokenize", json={"prompt": ["a"], "return_token_strs": True}).json()["token_strs"] == [["a"]]
    assert post("/v1/detokenize", json={"tokens": [97]}).json() == {"text": "a", "prompt": "a"}
    messages = [{"role": "user", "content": "Hi"}]
    fields = {"messages": messages, "return_token_strs": True, "add_special_tokens": False}
    chat = post("/tokenize", json=fields).json()
    assert "".join(chat["token_strs"]) == "[user]Hi<eos>\n[assistant]" and chat["tokens"][0] == ord("[")
    usage = post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == len(chat["tokens"]) == usage["prompt_tokens"]
    refused = error_of(post("/tokenize", json={"messages": messages, "prompt": "a"}), 400)
    assert refused["param"] == "prompt"
    refused = error_of(post("/tokenize", json={"messages": messages, "temperature": 0}), 400)
    assert refused["code"] == "unknown_field"
    refused = error_of(post("/tokenize", json={"messages": messages, "add_special_tokens": True}), 400)
    assert refused["param"] == "add_special_tokens"
    refused = error_of(post("/tokenize", json={"messages": messages, "model": "other"}), 404)
    assert refused["code"] == "model_not_found"


def test_model_is_found_by_name(server: ServerUnderTest) -> None:
    get = server.client.get
    models = get("/v1/models").json()
    assert get("/v1/models/echo").json() == models["data"][0]
    assert (models["first_id"], models["last_id"], models["has_more"]) == ("echo", "echo", False)
    model = models["data"][0]  # OpenAI's and Anthropic's fields
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "echo")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    for name in ("other", "org/other", "echo/more", "%2Fecho"):
        assert error_of(get(f"/v1/models/{name}"), 404)["code"] == "model_not_found"


def test_version_and_ping(server: ServerUnderTest) -> None:
    assert server.client.get("/version").json() == {"version": server.client.get("/server_info").json()["version"]}
    for method in ("GET", "POST"):
        assert server.client.request(method, "/ping").json() == {"status": "ok"}


def test_loads(server: ServerUnderTest) -> None:
    server.wait_until(lambda: server.client.get("/get_load").json()[0]["num_reqs"] == 2, "nothing runs")
    with server.client.stream("POST", "/generate", json=long("busy", stream=True)) as response:
        chunks = response.iter_bytes()
        next(chunks)
        assert server.client.get("/get_load").json() == [
            {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 25}
        ]
        got = server.client.get("/v1/loads").json()
    load = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 25, "max_total_num_tokens": 100}
    load |= {"num_total_reqs": 3, "token_usage": 0.25, "cache_hit_rate": 0.25}
    load |= {"max_running_requests": 8, "utilization": 1 / 8}
    assert got["loads"] == [{"dp_rank": 0, **load}] and got["dp_rank_count"] == 1
    assert got["aggregate"] == {
        "total_running_reqs": 1, "total_waiting_reqs": 2, "total_reqs": 3, "avg_token_usage": 0.25,
    }  # fmt: skip
    assert got["timestamp"].startswith("2") and got["version"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/embed", "use /v1/embeddings"),
        ("/reranking", "use /v1/rerank"),
        ("/v1/audio/transcriptions", "takes text alone"),
        ("/update_weights_from_disk", "start another server"),
        ("/open_session", "continuation_of"),
        ("/v1/files/file-1/content", "keeps no files"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/completion", "use /v1/completions"),
    ],
)
def test_unimplemented_endpoints_are_refused_by_name(server: ServerUnderTest, path: str, words: str) -> None:
    form = server.client.post(path, files={"file": b"RIFF"})
    for response in (server.client.post(path, json={"input": "a"}), form, server.client.post(path)):
        error = error_of(response, 404)
        assert error["code"] == "not_implemented" and path in error["message"] and words in error["message"]
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        assert error_of(server.client.request(method, path), 404)["code"] == "not_implemented", method
    assert server.client.head(path).status_code == 404


def test_unknown_paths_are_404(server: ServerUnderTest) -> None:
    for path in ("/v1/nothing", "/v2/chat/completions", "/generate/x", "/v1/models/"):
        for method in ("GET", "POST", "DELETE"):
            assert server.client.request(method, path, json={}).status_code in (404, 405), (method, path)
    assert error_of(server.client.post("/v1/nothing", json={}), 404)["code"] == "not_found"


def test_errors_below_messages_have_anthropic_shape(server: ServerUnderTest) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages/nothing", 404, "not_found_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ):
        response = server.client.request(method, path)
        body = response.json()
        assert response.status_code == status and body["type"] == "error", path
        assert body["error"]["type"] == kind and set(body["error"]) == {"type", "message", "details"}
    assert "error" in server.client.get("/v1/messages_of_mine").json()
    assert "type" not in server.client.get("/v1/messages_of_mine").json()


def test_wrong_method_lists_allowed_methods(server: ServerUnderTest) -> None:
    for method, path, allowed in (
        ("PUT", "/ping", "GET, HEAD, POST"),
        ("POST", "/v1/responses/resp_x", "DELETE, GET"),
        ("GET", "/generate", "POST"),
        ("POST", "/v1/models", "GET"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ):
        response = server.client.request(method, path)
        error = error_of(response, 405)
        assert response.headers["allow"] == allowed and f"use {allowed}" in error["message"], path


def test_root_redirects_to_the_dashboard(server: ServerUnderTest) -> None:
    response = server.client.get("/", follow_redirects=False)
    assert response.status_code == 307 and response.headers["location"] == "dashboard"
    assert server.client.get("/", follow_redirects=True).headers["content-type"].startswith("text/html")
    head = server.client.head("/", follow_redirects=False)
    assert head.status_code == 200 and head.content == b""
    assert error_of(server.client.post("/", json={}), 405)["code"] == "method_not_allowed"


def test_pause_and_continue_generation(server: ServerUnderTest) -> None:
    post = server.client.post
    error = error_of(post("/pause_generation", json={"mode": "retract"}), 400)
    assert error["param"] == "mode" and "use in_place" in error["message"]
    assert error_of(post("/pause_generation", json={"mode": "now"}), 400)["param"] == "mode"
    assert server.client.get("/health_generate").status_code == 200, "what is refused pauses nothing"
    with server.client.stream("POST", "/generate", json=long("open", stream=True)) as response:
        chunks = response.iter_bytes()
        next(chunks)
        assert post("/pause_generation", json={"mode": "in_place"}).json()["aborted"] == []
        assert error_of(server.client.get("/health_generate"), 503)["code"] == "paused"
        assert server.client.get("/health").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            post("/generate", json={"text": "a"}, timeout=1.0)
        assert post("/continue_generation").json()["status"] == "ok"
        assert server.client.get("/health_generate").status_code == 200
        assert generate(server, text="ab")["text"] == "abab"
        assert post("/pause_generation").json()["aborted"] == ["open"]
        assert b'"abort"' in b"".join(chunks)
    assert post("/continue_generation").status_code == 200
    assert generate(server, text="ab")["text"] == "abab"


def test_shutdown_ends_a_pause(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, behaviour={"step_s": 0.001}) as server:
        server.wait_ready()
        assert server.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        answers: list[dict] = []
        thread = threading.Thread(target=lambda: answers.append(server.generate(text="ab").json()))
        thread.start()
        server.wait_until(lambda: httpx.get(f"{server.url}/get_load").json()[0]["num_reqs"] == 3, "it waits")
        server.process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
        assert server.process.wait(60) == 0


def test_flush_cache(server: ServerUnderTest) -> None:
    server.wait_until(lambda: server.running() == 0, "nothing runs")
    assert server.client.post("/flush_cache").json()["success"] is True
    assert error_of(server.client.post("/flush_cache", json={"timeout": 3}), 400)["code"] == "unknown_field"
    with server.client.stream("POST", "/generate", json=long("holds", stream=True)) as response:
        chunks = response.iter_bytes()  # kept: httpx closes the response with it
        next(chunks)
        assert error_of(server.client.post("/flush_cache"), 409)["message"] == "requests are running"


def test_profile(server: ServerUnderTest) -> None:
    assert server.client.post("/start_profile").json()["success"] is True
    assert server.client.post("/stop_profile").status_code == 200
    post = server.client.post
    assert post("/start_profile", json={"activities": ["CPU", "GPU"], "num_steps": None}).status_code == 200
    refused = error_of(post("/start_profile", json={"output_dir": "/tmp"}), 400)
    assert refused["code"] == "unsupported_field" and refused["param"] == "output_dir"
    assert error_of(post("/stop_profile", json={"steps": 3}), 400)["code"] == "unknown_field"


def test_metrics(server: ServerUnderTest) -> None:
    def values() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {name: float(v) for name, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    # The worker answers in order: what earlier tests aborted has been counted after this.
    server.wait_until(lambda: server.client.post("/flush_cache").status_code == 200, "nothing runs")
    before = values()
    generate(server, 5, text="abc")
    list(events(server.generate(text="abc", stream=True, sampling_params={"max_new_tokens": 5})))
    error_of(server.generate(text=""), 400)
    error_of(server.generate(text="a", stream=True, sampling_params={"temperature": -1}), 400)
    server.client.get("/nope")
    server.client.post("/health")  # probes are not counted
    after = values()

    def grew(name: str, labels: str = "", labels_after: str = "") -> float:
        key = f'baton:{name}{{{labels}model_name="echo"{labels_after}}}'
        return after[key] - before.get(key, 0)

    assert grew("num_requests_total") == 2 and grew("prompt_tokens_total") == 6
    assert grew("generation_tokens_total") == 10 and grew("cached_tokens_total") == 4
    assert grew("time_to_first_token_seconds_count") == 1
    assert grew("inter_token_latency_seconds_count") == 4
    assert grew("e2e_request_latency_seconds_count") == 2
    assert grew("request_success_total", 'finished_reason="length",') == 2
    assert grew("num_errors_total", labels_after=',status="400"') == 2
    assert grew("num_errors_total", labels_after=',status="404"') == 1
    assert after['baton:kv_cache_usage_perc{model_name="echo"}'] == 0.25, "evictable slots are not in use"


def test_cors(server: ServerUnderTest) -> None:
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = server.client.options("/generate", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://example.org"
    response = server.client.get("/nope", headers={"Origin": "https://example.org"})
    assert response.status_code == 404 and "access-control-allow-origin" in response.headers
    assert "access-control-allow-origin" not in server.client.get("/health", headers={"Origin": "https://evil"}).headers


def test_api_key(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--api-key", KEY, "--incremental-streaming-output", behaviour={}) as server:
        server.wait_ready()
        for given in (None, KEY.encode(), b"Bearer wrong", "Bearer é".encode()):
            headers = httpx.Headers([] if given is None else [(b"Authorization", given)])
            response = server.client.post("/generate", json={"text": "a"}, headers=headers)
            assert error_of(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(server.client.get("/server_info"), 401) and error_of(server.client.get("/cache/tiers"), 401)
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        assert server.generate(text="a").status_code == 200
        assert KEY not in server.client.get("/server_info").text
        # Here too: each event brings only what is new.
        got = events(server.generate(text="né", stream=True, sampling_params={"max_new_tokens": 6}))
        assert "".join(event["text"] for event in got) == "néné"
        assert [i for event in got for i in event["output_ids"]] == list("néné".encode())
        assert got[-1]["meta_info"]["completion_tokens"] == 6


def test_an_idle_server_sleeps(model: Path, tmp_path: Path) -> None:
    """Context switches say whether something spins, whatever else the machine does."""
    with ServerUnderTest(model, tmp_path, behaviour={}) as server:
        server.wait_ready()
        processes = {
            "http": server.process.pid,
            **{role: child.pid for role, child in server.children().items()},
        }

        def wakeups() -> dict[str, int]:
            return {
                role: sum(
                    int((thread / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
                    for thread in Path(f"/proc/{pid}/task").iterdir()
                )
                for role, pid in processes.items()
            }

        time.sleep(1)
        before = wakeups()
        time.sleep(1)
        per_second = {role: count - before[role] for role, count in wakeups().items()}
        assert all(rate < 60 for rate in per_second.values()), per_second


def test_ignored_fields_are_reported_in_a_header(server: ServerUnderTest) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for path, body in (
        ("/generate", {"text": "a", "model": "unknown", "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"model": "echo", **chat}),
    ):
        for stream in (False, True):
            body = body | {"stream": stream}
            plain = server.client.post(path, json=body)
            assert plain.status_code == 200 and "x-baton-warning" not in plain.headers, path
            warned = server.client.post(path, json=body | {"keep_alive": "5m"})
            assert warned.headers["x-baton-warning"] == "no effect: keep_alive: the model stays loaded", path
            assert error_of(server.client.post("/v1/completions", json={"prompt": "a", "colour": 1}), 400)
    assert server.log.count("a request's keep_alive has no effect") == 1
