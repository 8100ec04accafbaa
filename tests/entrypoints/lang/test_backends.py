"""Backends: the same program over HTTP and in this process, and errors in the server's own words."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import (
    BackendError,
    EngineBackend,
    HttpBackend,
    ProgramError,
    ProgramState,
    assistant,
    beam,
    function,
    gen,
    select,
    system,
    user,
)
from baton.entrypoints.lang.backends import as_backend
from tests.doubles.server_under_test import ServerUnderTest, free_port


@function
def talk(s: ProgramState, task: str) -> None:
    s += system("You are a shell agent. Think first.") + user(task)
    s += "<|im_start|>assistant\n" + gen("thought", stop="</think>", max_tokens=40)
    s += "</think>\n" + select("way", ["```bash\n", "There is"]) + gen("rest", max_tokens=20) + "<|im_end|>\n"
    with s.fork(2) as forks:
        forks += lambda i: user(f"And {i}?") + assistant(gen("again", max_tokens=10))


TASK = "How many lines are in poem.txt?"


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers every path with what the test put under it: (status, bytes)."""

    answers: dict[str, tuple[int, bytes]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[tuple[HttpBackend, dict[str, tuple[int, bytes]]]]:
    answers: dict[str, tuple[int, bytes]] = {}
    handler = type("Handler", (Canned,), {"answers": answers})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield HttpBackend(f"http://127.0.0.1:{server.server_port}/"), answers
        server.shutdown()
        thread.join()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_http_errors_are_raised_with_the_server_message(canned: Any) -> None:
    backend, answers = canned
    answers["/generate"] = 410, b'{"error": {"message": "gone; send it all", "code": "parent_forgotten"}}'
    for call in (lambda: backend.generate({}), lambda: next(backend.stream({}))):
        answers["/server_info"] = 200, b'{"incremental_streaming_output": false}'
        with pytest.raises(BackendError, match="gone; send it all") as caught:
            call()
        assert caught.value.status == 410 and caught.value.code == "parent_forgotten"
    answers["/generate"] = 502, b"<html>bad gateway</html>"
    with pytest.raises(BackendError, match=r"status 502: .*bad gateway"):
        backend.generate({})
    answers["/generate"] = 200, b"not json"
    with pytest.raises(BackendError, match="/generate did not answer: JSONDecodeError"):
        backend.generate({})
    answers["/abort_request"] = 404, b'{"error": {"message": "not open", "code": "not_found"}}'
    backend.abort("gone already")
    answers["/abort_request"] = 500, b'{"error": {"message": "bug", "code": null}}'
    with pytest.raises(BackendError, match="bug"):
        backend.abort("x")
    with pytest.raises(BackendError, match="did not answer: URLError"):
        HttpBackend(f"http://127.0.0.1:{free_port()}").generate({})


def test_http_stream_increments_are_accumulated(canned: Any) -> None:
    backend, answers = canned
    answers["/server_info"] = 200, b'{"incremental_streaming_output": true}'
    rows = [[-0.5, 1, None]]
    first = event(text="a", output_ids=[1], meta_info={"finish_reason": None, "output_token_logprobs": rows})
    last = event(text="b", output_ids=[2], meta_info={"finish_reason": {}, "output_token_logprobs": rows})
    answers["/generate"] = 200, first + last + b"data: [DONE]\n\n"
    assert list(backend.stream({})) == [
        {"text": "a", "output_ids": [1], "meta_info": {"finish_reason": None, "output_token_logprobs": rows}},
        {"text": "ab", "output_ids": [1, 2], "meta_info": {"finish_reason": {}, "output_token_logprobs": rows * 2}},
    ]
    answers["/generate"] = 200, first
    with pytest.raises(BackendError, match="the stream ended before the answer did"):
        list(backend.stream({}))
    answers["/generate"] = 200, first + event(error={"message": "the worker died", "code": "x"})
    with pytest.raises(BackendError, match="the worker died"):
        list(backend.stream({}))


def test_chat_roles_without_template_are_refused(canned: Any) -> None:
    backend, answers = canned
    answers["/model_info"] = 200, b'{"chat_template": null, "special_tokens": {}}'

    @function
    def chat(s: ProgramState) -> None:
        s += user("a")

    with pytest.raises(ProgramError, match="user message: this model has no chat template"):
        chat.run(backend=backend)


def test_backend_is_inferred_from_engine_or_url(toy_engine: Engine) -> None:
    assert isinstance(as_backend(toy_engine), EngineBackend)
    assert isinstance(as_backend("http://localhost:1"), HttpBackend)
    backend = EngineBackend(toy_engine)
    assert as_backend(backend) is backend
    with pytest.raises(TypeError, match="backend is None"):
        as_backend(None)


@pytest.mark.process
def test_programs_give_equal_results_over_http(toy_engine: Engine, toy_server: ServerUnderTest) -> None:
    backend = HttpBackend(toy_server.url, api_key="secret")
    here = talk.run(task=TASK, backend=toy_engine, temperature=0)
    for stream in (False, True):
        there = talk.run(task=TASK, backend=backend, temperature=0, stream=stream)
        assert "".join(there.text_iter()) == here.text()
        for name in ("thought", "way", "rest", "again"):
            assert there[name] == here[name]
        for meta in (there.meta("way"), there.meta("rest"), *there.meta("again")):
            assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1
    states = talk.run_batch([{"task": TASK}] * 4, backend=backend, temperature=0)
    assert [state.text() for state in states] == [here.text()] * 4
    toy_server.wait_until(lambda: toy_server.metric("leased_tokens") == 0, "all leases are released")


@pytest.mark.process
def test_beam_search_gives_equal_results_over_http(toy_engine: Engine, toy_server: ServerUnderTest) -> None:
    @function
    def search(s: ProgramState, n: int) -> None:
        s += user(TASK) + "<|im_start|>assistant\n" + beam("commands", width=4, n=n, max_tokens=16, stop="\n```")
        s += "\n```" + gen("rest", max_tokens=8)

    backend = HttpBackend(toy_server.url, api_key="secret")
    for n in (1, 3):
        here = search.run(n=n, backend=toy_engine, temperature=0)
        assert len(here["commands"]) == n and not any("\n```" in text for text in here["commands"])
        for stream in (False, True):
            there = search.run(n=n, backend=backend, temperature=0, stream=stream)
            assert "".join(there.text_iter()) == here.text()
            assert there["commands"] == here["commands"] and there["rest"] == here["rest"]
            scores = [meta["sequence_score"] for meta in there.meta("commands")]
            assert scores == pytest.approx([meta["sequence_score"] for meta in here.meta("commands")], abs=1e-4)
            assert there.meta("rest")["continuation"]["path"] == "handoff"
    toy_server.wait_until(lambda: toy_server.metric("leased_tokens") == 0, "all leases are released")


@pytest.mark.process
def test_forgotten_parent_is_replayed_in_full(toy_server: ServerUnderTest, toy_engine: Engine) -> None:
    backend = HttpBackend(toy_server.url, api_key="secret")

    @function
    def slow(s: ProgramState, forget: bool) -> None:
        s += "<|im_start|>user\n" + gen("a", max_tokens=8, ignore_eos=True) + " lines"
        s.sync()
        for _ in range(3 if forget else 0):
            toy_server.generate(text="x", sampling_params={"max_new_tokens": 1}).raise_for_status()
        s += gen("b", max_tokens=8, ignore_eos=True)

    state = slow.run(forget=True, backend=backend, temperature=0, retain_ttl=0)
    assert "continuation" not in state.meta("b"), "it was sent again as a whole"
    assert state.text() == slow.run(forget=False, backend=toy_engine, temperature=0).text()


@pytest.mark.process
def test_wrong_api_key_is_a_program_error(toy_server: ServerUnderTest) -> None:
    with pytest.raises(ProgramError, match="API key") as caught:
        talk.run(task=TASK, backend=toy_server.url)
    assert caught.value.status == 401


@pytest.mark.process
def test_interrupted_program_aborts_its_requests(toy_server: ServerUnderTest) -> None:
    @function
    def endless(s: ProgramState) -> None:
        s += "a" + gen("x", max_tokens=1900, ignore_eos=True)
        toy_server.wait_until(lambda: toy_server.running() == 1, "it runs")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        endless.run(backend=HttpBackend(toy_server.url, api_key="secret"))
    toy_server.wait_until(lambda: toy_server.running() == 0, "nothing runs")
