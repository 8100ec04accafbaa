"""A server's life and its ends: ready, drain, death of each process, a hang, start-up failures."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.http_calls import raw_post
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

LONG = {"text": "abc", "sampling_params": {"max_new_tokens": 4000}}
SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """For tests that leave it as it is: a start takes seconds."""
    with ServerUnderTest(model, tmp_path_factory.mktemp("running"), behaviour=SLOW) as server:
        yield server.wait_ready()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    servers: list[ServerUnderTest] = []

    def starter(*flags: str, behaviour: dict[str, Any] | None = None, port: int = 0) -> ServerUnderTest:
        servers.append(ServerUnderTest(model, tmp_path, *flags, behaviour=behaviour or SLOW, port=port))
        return servers[-1]

    yield starter
    for server in servers:
        server.__exit__()


class Caller(threading.Thread):
    """A client that waits for its answer."""

    def __init__(self, server: ServerUnderTest, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.fields = server.url, fields
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = httpx.post(f"{self.url}/generate", json=self.fields, timeout=120)

    def answer(self, timeout_s: float = 60) -> httpx.Response:
        self.join(timeout_s)
        assert self.response is not None, "no answer"
        return self.response


def assert_all_gone(server: ServerUnderTest, children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert not list(server.tmp.iterdir()), "the run directory was left behind"


def test_startup_objects_are_frozen_from_garbage_collection(start: Any) -> None:
    """A full collection of all modules stops the loop for longer than an answer to /health takes."""
    server = start().wait_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    frozen = [line.split()[0] for line in server.log.splitlines() if "garbage collector" in line]
    assert len(frozen) == 1 and int(frozen[0]) > 50_000


@pytest.mark.parametrize("victim", ["worker", "detokenizer"])
def test_child_death_fails_open_requests_and_ends_the_server(start: Any, victim: str) -> None:
    server = start().wait_ready()
    children = server.children()
    assert set(children) == {"worker", "detokenizer"}
    plain, streamed = Caller(server, **LONG), Caller(server, stream=True, **LONG)
    server.wait_until(lambda: server.running() == 2, "both requests run")
    children[victim].kill()
    answer = plain.answer()
    assert answer.status_code == 503
    assert f"the {victim} ended: killed by SIGKILL" in answer.json()["error"]["message"]
    events = [line[6:] for line in streamed.answer().text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "server_failed"
    assert server.process.wait(60) == 1
    assert server.log.splitlines()[-1].startswith(f"baton: the {victim} ended: killed by SIGKILL")
    assert_all_gone(server, list(children.values()))


def test_killed_launcher_leaves_no_process(start: Any) -> None:
    server = start().wait_ready()
    children = list(server.children().values())
    server.process.kill()
    server.process.wait()
    assert_all_gone(server, children)


def folders(server: ServerUnderTest) -> list[Path]:
    return list(server.tmp.iterdir())


def test_ready_server_has_no_run_directory(start: Any) -> None:
    server = start()
    server.wait_until(lambda: folders(server), "the run directory is there")
    server.wait_ready()
    assert not folders(server), "it is needed only until everybody is connected"
    assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_launcher_killed_at_any_time_leaves_no_run_directory(start: Any, seed: int) -> None:
    """From the moment the folder appears until well after it is gone."""
    server = start()
    while not folders(server) and server.process.poll() is None:
        pass
    time.sleep(random.Random(seed).random() * 1.5 * (seed > 0))  # the first at once
    children = list(server.children().values())
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    server.wait_until(lambda: not folders(server), "the folder is removed")


def test_signal_to_all_processes_lets_open_requests_finish(start: Any) -> None:
    """As service managers and terminals send it."""
    server = start().wait_ready()
    plain = Caller(server, text="abc", sampling_params={"max_new_tokens": 120})
    server.wait_until(lambda: server.running() == 1, "the request runs")
    for child in server.children().values():
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGTERM)
    assert plain.answer().json()["meta_info"]["completion_tokens"] == 120
    assert server.process.wait(60) == 0


def test_child_processes_have_their_own_process_groups(start: Any) -> None:
    """A signal to the launcher's group comes before a child can ignore it, while it still imports."""
    server = start()
    server.wait_until(lambda: len(server.children()) == 2, "the children are there")
    groups = {os.getpgid(child.pid) for child in server.children().values()}
    assert len(groups) == 2 and os.getpgid(server.process.pid) not in groups


def test_sigusr1_dumps_stacks_of_every_process(running: ServerUnderTest) -> None:
    for number, pid in enumerate((running.process.pid, *(child.pid for child in running.children().values())), 1):
        os.kill(pid, signal.SIGUSR1)
        running.wait_until(lambda count=number: running.log.count("Current thread") == count, "the stacks are written")
    assert running.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200


def test_child_exit_with_status_0_is_a_failure(start: Any) -> None:
    server = start(behaviour={"exit_after": 3})
    # The warm-up is step 1.
    answer = Caller(server.wait_ready(), **LONG).answer()
    assert answer.status_code == 503
    assert server.process.wait(60) == 1
    assert "the worker ended: exit status 0" in server.log


def test_worker_crash_names_its_reason(start: Any) -> None:
    server = start(behaviour={"crash_after": 3})
    answer = Caller(server.wait_ready(), **LONG).answer()
    assert answer.status_code == 503
    assert "RuntimeError: the fake device caught fire" in answer.json()["error"]["message"]
    assert server.process.wait(60) == 1
    assert server.log.splitlines()[-1] == "baton: the worker ended: RuntimeError: the fake device caught fire"


def test_hung_worker_is_dumped_and_ends_the_server(start: Any) -> None:
    server = start("--watchdog-timeout", "3", behaviour={"hang_after": 4})
    answer = Caller(server.wait_ready(), **LONG).answer()
    assert answer.status_code == 503
    assert server.process.wait(60) == 1
    assert "Current thread" in server.log and "fake_worker.py" in server.log, "no stacks in the log"
    assert server.log.splitlines()[-1].startswith("baton: the worker has been silent for 3 s")


def first_answer(server: ServerUnderTest) -> httpx.Response:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return server.client.get("/health")
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"no answer within 20 s:\n{server.log}")


def test_loading_server_answers_not_ready(start: Any) -> None:
    server = start("--ready-timeout", "4", behaviour={"start_hang": True})
    seen = first_answer(server)
    assert seen.status_code == 503
    assert seen.headers["retry-after"] == "1"
    assert seen.json()["error"]["message"] == "the server is starting: loading libraries"
    refused = server.generate(text="a")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
    assert server.process.wait(60) == 1
    assert server.log.splitlines()[-1] == "baton: the worker was not ready within 4 s; see --ready-timeout"


def test_sigterm_lets_open_requests_finish(start: Any) -> None:
    server = start().wait_ready()
    fields = {"text": "abc", "sampling_params": {"max_new_tokens": 200}}  # 4 s, for all the calls below
    plain, streamed = Caller(server, **fields), Caller(server, stream=True, **fields)
    server.wait_until(lambda: server.running() == 2, "both requests run")
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.client.get("/health").status_code == 503, "it drains")
    # On new connections, too, until the last request has its answer:
    for path in ("/health", "/ready", "/health_generate"):
        assert httpx.get(f"{server.url}{path}").status_code == 503
    refused = httpx.post(f"{server.url}/generate", json={"text": "a"})
    assert refused.json()["error"]["code"] == "shutting_down"
    assert plain.answer().json()["meta_info"]["completion_tokens"] == 200
    assert streamed.answer().text.endswith("data: [DONE]\n\n")
    assert server.process.wait(60) == 0
    assert_all_gone(server, [])


def test_unfinished_uploads_get_503_during_drain(start: Any) -> None:
    server = start("--log-level", "debug").wait_ready()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as upload:
        upload.sendall(raw_post(b"x" * 1000)[:-500])
        server.wait_until(lambda: server.client.get("/health").status_code == 200, "the head has been read")
        server.process.send_signal(signal.SIGTERM)
        answer = upload.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log and " ERROR " not in server.log


def test_unfinished_uploads_get_503_after_child_death(start: Any) -> None:
    server = start().wait_ready()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as upload:
        upload.sendall(raw_post(b"x" * 1000)[:-500])
        server.wait_until(lambda: server.client.get("/health").status_code == 200, "the head has been read")
        server.children()["worker"].kill()
        answer = upload.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"server_failed" in answer
    assert server.process.wait(60) == 1
    assert "Traceback" not in server.log


def test_open_file_limit_is_raised(model: Path, tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        server = ServerUnderTest(model, tmp_path, behaviour=SLOW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    with server:
        server.wait_ready()
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        soft = next(line for line in limits.splitlines() if "open files" in line).split()[3]
        assert int(soft) == min(2048 + 1024, limit[1] if limit[1] > 0 else 2**31)


def test_drain_timeout_ends_open_requests(start: Any) -> None:
    server = start("--drain-timeout", "0.5").wait_ready()
    plain, streamed = Caller(server, **LONG), Caller(server, stream=True, **LONG)
    server.wait_until(lambda: server.running() == 2, "both requests run")
    server.process.send_signal(signal.SIGTERM)
    assert plain.answer().json()["error"]["code"] == "shutting_down"
    assert "shutting_down" in streamed.answer().text
    assert server.process.wait(60) == 0


def test_a_second_signal_ends_draining(start: Any) -> None:
    server = start("--drain-timeout", "600").wait_ready()
    caller = Caller(server, **LONG)
    server.wait_until(lambda: server.running() == 1, "the request runs")
    server.process.send_signal(signal.SIGINT)
    server.wait_until(lambda: "shutting down" in server.log, "it drains")
    server.process.send_signal(signal.SIGINT)
    assert caller.answer().status_code == 503
    assert server.process.wait(60) == 0


def test_sigterm_while_loading_exits_immediately(start: Any) -> None:
    server = start(behaviour={"start_hang": True})
    assert first_answer(server).status_code == 503
    children = list(server.children().values())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert_all_gone(server, children)


def test_second_server_on_a_used_port_is_refused(start: Any, running: ServerUnderTest) -> None:
    second = start(port=running.port)
    assert second.process.wait(60) == 1
    assert second.log == (
        f"baton: cannot listen on 127.0.0.1:{running.port}: Address already in use; use another --port or --host\n"
    )
    assert running.generate(text="a", sampling_params={"max_new_tokens": 1}).status_code == 200


def test_each_start_draws_and_logs_its_seed(start: Any, running: ServerUnderTest) -> None:
    seeds = []
    for server in (running, start().wait_ready(), start("--random-seed", "5").wait_ready()):
        seeds.append(server.client.get("/server_info").json()["random_seed"])
        assert f"random seed: {seeds[-1]}; --random-seed repeats it" in server.log
    assert len(set(seeds)) == 3 and seeds[2] == 5


def test_startup_error_is_one_line(start: Any) -> None:
    server = start(behaviour={"start_error": "the weights do not fit; download them again"})
    assert server.process.wait(60) == 1
    assert server.log == "baton: the worker ended: the weights do not fit; download them again\n"


MISTAKES = [
    (["--model-path", "/no/such/folder"], 1, "baton: --model-path /no/such/folder: there is no such folder"),
    (["--model-path", "{empty}"], 1, "baton: --model-path {empty} is an empty folder."),
    (["--model-path", "x", "--prot", "1"], 2, "baton: unknown flag --prot; did you mean --port?"),
    (["--model-path", "x", "--host", "no.such.host.invalid"], 1, "baton: cannot listen on no.such.host.invalid:"),
]

START_EACH = """
import json, sys
from baton.entrypoints.launch_server import main
for flags in json.loads(sys.argv[1]):
    print(main(flags))
    print(end="\\0", file=sys.stderr)
"""


def test_operator_mistakes_are_reported_in_one_line(tmp_path: Path) -> None:
    """One process makes them all: to import what a server needs takes a second."""
    starts = [[flag.format(empty=tmp_path) for flag in flags] + ["--port", "0"] for flags, _, _ in MISTAKES]
    command = [sys.executable, "-c", START_EACH, json.dumps(starts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [int(status) for status in done.stdout.split()] == [status for _, status, _ in MISTAKES]
    for said, (_, _, line) in zip(done.stderr.split("\0")[:-1], MISTAKES, strict=True):
        assert said.startswith(line.format(empty=tmp_path)) and said.count("\n") == 1


def test_without_flags_the_one_that_is_missing_is_named() -> None:
    command = [sys.executable, "-m", "baton.entrypoints.launch_server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "baton: --model-path is missing; give a Hugging Face folder or a GGUF file\n"


def test_light_processes_do_not_import_torch() -> None:
    modules = ["entrypoints.launch_server", "entrypoints.http.server", "runtime.detokenizer", "entrypoints.engine"]
    imports = "; ".join(f"import baton.{module}" for module in modules)
    code = f"import sys; {imports}; print(sorted({{'torch', 'transformers', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_processes_have_titles(running: ServerUnderTest) -> None:
    titles = {" ".join(child.cmdline()).strip() for child in psutil.Process(running.process.pid).children()}
    assert titles == {"baton::worker", "baton::detokenizer"}
    assert " ".join(psutil.Process(running.process.pid).cmdline()).strip() == "baton::http"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_server_serves_https(start: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    server = start("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    server.client = httpx.Client(
        base_url=server.url.replace("http:", "https:"), verify=ssl.create_default_context(cafile=str(cert))
    )
    server.wait_ready()
    assert server.generate(text="a", sampling_params={"max_new_tokens": 1}).json()["text"] == "a"
    server.wait_until(lambda: f"on https://127.0.0.1:{server.port}" in server.log, "the log names the scheme")
    # The key does not fit the certificate, and the wrong kind of file: one line each, before a child is started.
    for files in ((cert, tmp_path / "none.pem"), (key, key), (cert, cert)):
        broken = start("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
        assert broken.process.wait(60) == 1
        assert broken.log.startswith("baton: --ssl-certfile ") and broken.log.count("\n") == 1
