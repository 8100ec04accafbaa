"""The dashboard of a real server on the toy model: its page, its stream, and the tree page by page."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.entrypoints.http.dashboard.broadcaster import MAX_READERS
from tests.doubles.event_stream import EventStream, reading
from tests.doubles.http_calls import error_of
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[4] / "examples" / "toy_model"
KEY = "s3cret"
ADMIN = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-total-tokens", "4096", "--linear-backend", "torch", "--admin-api-key", KEY]
    with ServerUnderTest(TOY, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def ask(server: ServerUnderTest, rid: str, text: str, new: int = 20, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0}
    response = server.generate(rid=rid, text=text, sampling_params=sampling, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def phases(stream: EventStream, rid: str) -> list[str]:
    return [phase[0] for phase in stream.lives[rid, 0]["phases"]] if (rid, 0) in stream.lives else []


# -- the page ----------------------------------------------------------------------------------------------------------


def test_page_files_are_served_with_security_headers(toy: ServerUnderTest) -> None:
    assert "dashboard: http://127.0.0.1" in toy.log
    page = toy.client.get("/dashboard")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["cache-control"] == "no-cache"
    file = toy.client.get("/dashboard/index.html")
    assert file.content == page.content and file.headers["etag"] == page.headers["etag"]
    again = toy.client.get("/dashboard", headers={"If-None-Match": f'"other", W/{page.headers["etag"]}'})
    assert again.status_code == 304 and again.content == b""
    head = toy.client.head("/dashboard")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2fbroadcaster.py", "%2e%2e/texts.py", "index.html%00", "index.html/", "INDEX.HTML", ""]
)
def test_paths_outside_the_page_are_not_served(toy: ServerUnderTest, name: str) -> None:
    assert toy.client.get(f"/dashboard/{name}", follow_redirects=False).status_code in (404, 307)
    assert b"import" not in toy.client.get(f"/dashboard/{name}").content


def test_dashboard_requires_key_and_known_host(toy: ServerUnderTest) -> None:
    assert error_of(toy.client.get("/dashboard/events"), 401)["code"] == "invalid_api_key"
    assert error_of(toy.client.get("/cache/tree"), 401)["code"] == "invalid_api_key"
    for path in ("/dashboard", "/dashboard/index.html", "/dashboard/events", "/cache/tree"):
        assert error_of(toy.client.get(path, headers={"Host": "evil.example"}), 421)["code"] == "unknown_host"
    assert toy.client.post("/dashboard/events", headers=ADMIN).status_code == 405


# -- the stream --------------------------------------------------------------------------------------------------------


def test_page_stream_follows_a_request(toy: ServerUnderTest) -> None:
    with reading(toy, **ADMIN) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        assert stream.next() == "hello"
        hello = stream.hello
        assert (hello["page_size"], hello["total_tokens"], hello["host_tokens"]) == (1, 4096, 0)
        assert hello["text_allowed"] is hello["radix_cache"] is True and hello["model"] == str(TOY)
        ask(toy, "seen", "hello there", 30)
        stream.until(lambda: stream.lives.get(("seen", 0), {}).get("end"), "the request has ended")
        life = stream.lives["seen", 0]
        assert (life["end"], life["output"]) == ("length", 30) and phases(stream, "seen")[:2] == [
            "queued",
            "prefill",
        ]
        assert sum(phase[3] for phase in life["phases"] if phase[0] == "decode") == 30
        assert all(phase[2] is None or phase[1] <= phase[2] for phase in life["phases"]), "a lease has no end yet"
        before = stream.update["t"]
        stream.until(lambda: stream.tree.get("t", 0) > before, "a tree that holds it")
        spans = stream.tree["spans"]
        assert stream.tree["complete"] and stream.tree["tokens"] == sum(span[4] for span in spans if span[1] < 0)
        assert any(span[11] is not None and span[11].startswith("hello there") for span in spans), "text, with the key"
        assert stream.update["stats"]["total"] == 4096 and stream.update["stats"]["output_tokens"] >= 30


def test_handoff_is_shown_from_parent_to_child(toy: ServerUnderTest) -> None:
    with reading(toy, **ADMIN) as stream:
        ask(toy, "parent", "count with me", 20, retain_ttl=60)
        stream.until(lambda: "leased" in phases(stream, "parent"), "the parent is leased")
        stream.until(lambda: any(lease["rid"] == "parent" for lease in stream.update["leases"]), "its lease is listed")
        lease = next(lease for lease in stream.update["leases"] if lease["rid"] == "parent")
        assert 0 < lease["expires_in"] <= 60 and not lease["claimed"] and stream.update["num_leases"] >= 1
        before = stream.update["t"]
        stream.until(lambda: stream.tree.get("t", 0) > before, "a tree that holds it")
        assert any("S" in span[7] and "L" in span[7] for span in stream.tree["spans"])
        fields = {"continuation_of": "parent", "continuation_suffix": " more"}
        sampling = {"max_new_tokens": 5, "ignore_eos": True}
        assert toy.generate(rid="child", sampling_params=sampling, **fields).status_code == 200
        stream.until(lambda: stream.lives.get(("child", 0), {}).get("end"), "the child has ended")
        parent, child = stream.lives["parent", 0], stream.lives["child", 0]
        assert (parent["child"], child["parent"], child["path"]) == ("child", "parent", "handoff")
        kind, _, ended, tokens = parent["phases"][-1]
        assert kind == "leased" and tokens == child["cached"] > 20
        assert ended == next(begin for kind, begin, _, _ in child["phases"] if kind == "prefill")


def test_page_opened_late_sees_running_requests(toy: ServerUnderTest) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, toy, "runs", "a long story", 1900)
        toy.wait_until(lambda: toy.running() == 1, "it runs")
        with reading(toy, **ADMIN) as stream:
            stream.until(lambda: ("runs", 0) in stream.lives, "the request is seen")
            stream.until(lambda: any(r["rid"] == "runs" for r in stream.update["running"]), "and listed")
            stream.until(lambda: stream.lives["runs", 0].get("end") == "length", "and its end")
        asked.result()


def test_page_stream_shows_jobs_and_aborts(toy: ServerUnderTest) -> None:
    with reading(toy, **ADMIN) as stream:
        ask(toy, "step", "do it", 5, job_id="job-1")
        stream.until(
            lambda: any(job["job_id"] == "job-1" for job in stream.update.get("jobs", ())), "the job is listed"
        )
        assert stream.lives["step", 0]["job_id"] == "job-1"
        threading.Thread(target=ask, args=(toy, "gives-up", "a very long story", 2000), daemon=True).start()
        stream.until(lambda: ("gives-up", 0) in stream.lives, "it is seen")
        toy.client.post("/abort_request", json={"rid": "gives-up"}, headers=ADMIN)
        stream.until(lambda: stream.lives["gives-up", 0].get("end") == "abort", "its end")
        assert error_of(toy.generate(rid="orphan", continuation_of="nobody"), 404)
        stream.until(lambda: stream.lives.get(("orphan", 0), {}).get("end") == "error", "what was refused")


def test_page_stream_shows_cache_flush(toy: ServerUnderTest) -> None:
    with reading(toy, **ADMIN) as stream:
        ask(toy, "cached", "something to forget", 5)
        stream.until(lambda: stream.tree.get("nodes", 0) > 0, "a tree")
        toy.wait_until(
            lambda: toy.client.post("/flush_cache", headers=ADMIN).status_code == 200, "the cache can be flushed"
        )
        stream.until(lambda: stream.tree["nodes"] == 0, "an empty tree")
        assert stream.tree["spans"] == []


def test_unread_pages_do_not_slow_other_pages(toy: ServerUnderTest) -> None:
    """Those that read get what they would alone."""
    ask(toy, "warm", "x", 5)
    memory = psutil.Process(toy.process.pid).memory_info().rss
    head = f"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(10):
            lazy = stack.enter_context(socket.socket())
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", toy.port))
            lazy.sendall(head)
        streams = [stack.enter_context(reading(toy, **ADMIN)) for _ in range(20)]
        for number in range(8):
            ask(toy, f"m{number}", f"text number {number}", 10)
        for stream in streams:
            stream.until(lambda stream=stream: stream.lives.get(("m7", 0), {}).get("end"), "the last request's end")
            assert all(stream.lives[f"m{number}", 0]["end"] == "length" for number in range(8))
        assert psutil.Process(toy.process.pid).memory_info().rss < memory + 60e6


def test_excess_streams_are_refused(toy: ServerUnderTest) -> None:
    head = f"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(MAX_READERS):
            page = stack.enter_context(socket.create_connection(("127.0.0.1", toy.port), timeout=20))
            page.sendall(head)
            assert page.recv(12) == b"HTTP/1.1 200"
        refused = toy.client.get("/dashboard/events", headers=ADMIN)
        assert error_of(refused, 503)["code"] == "too_many_streams" and refused.headers["retry-after"]

    def is_read() -> bool:
        with reading(toy, **ADMIN) as stream:
            return stream.response.status_code == 200 and stream.next() == "hello"

    toy.wait_until(is_read, "there is room again")


def test_an_idle_server_without_pages_sleeps(toy: ServerUnderTest) -> None:
    """Also after pages were open: nothing goes on for them. Context switches say so, whatever else the machine does."""
    with reading(toy, **ADMIN) as stream:
        stream.until(lambda: stream.tree, "a tree")
    worker = toy.children()["worker"]

    def wakeups() -> int:
        return worker.num_ctx_switches().voluntary

    time.sleep(5)  # it was asked to report for so long
    before = wakeups()
    time.sleep(1)
    assert wakeups() - before < 20


# -- the tree, page by page --------------------------------------------------------------------------------------------


def tree(server: ServerUnderTest, **query: Any) -> dict[str, Any]:
    response = server.client.get("/cache/tree", params=query, headers=ADMIN)
    assert response.status_code == 200, response.text
    return response.json()


def test_tree_is_paginated(toy: ServerUnderTest) -> None:
    for number in range(5):
        ask(toy, f"t{number}", f"shared beginning, {number} different ends", 8)
    ask(toy, "salted", "shared beginning of another", 8, cache_salt="red")
    whole = tree(toy, limit=1000)
    nodes = whole["nodes"]
    assert whole["next"] is None and whole["is_complete"] and len(nodes) == whole["total_nodes"] >= 11
    assert sum(node["tokens"] for node in nodes) == whole["total_tokens"]
    seen: dict[int, dict[str, Any]] = {}
    for node in nodes:
        assert node["parent"] is None or node["parent"] in seen, "a node before those below it"
        assert node["start"] == (
            0 if node["parent"] is None else seen[node["parent"]]["start"] + seen[node["parent"]]["tokens"]
        )
        assert node["tiers"] == ["device"] and node["idle_s"] >= 0 and "text" not in node
        seen[node["serial"]] = node
    first = tree(toy, limit=4)
    paged, last = list(first["nodes"]), first
    while last["next"] is not None:
        ask(toy, "meanwhile", "the tree changes, the pages do not", 3)
        last = tree(toy, limit=4, snapshot=first["snapshot"], after=last["next"])
        paged += last["nodes"]
    assert [node["serial"] for node in paged] == [node["serial"] for node in nodes]


def test_tree_is_filtered_by_salt_and_size(toy: ServerUnderTest) -> None:
    ask(toy, "salted", "in a namespace of its own", 8, cache_salt="blue")
    ask(toy, "plain", "in a namespace of its own", 8)
    salted = tree(toy, cache_salt="blue", with_text="true", limit=1000)
    assert salted["nodes"] and salted["total_nodes"] > len(salted["nodes"])
    assert len({node["namespace"] for node in salted["nodes"]}) == 1 and salted["nodes"][0]["namespace"]
    assert salted["nodes"][0]["text"].startswith("in a namespace")
    assert tree(toy, cache_salt="nobody's")["nodes"] == []
    plain = tree(toy, cache_salt="", limit=1000)["nodes"]
    assert plain and {node["namespace"] for node in plain} == {""}
    large = tree(toy, min_tokens=12, limit=1000)["nodes"]
    assert large and all(node["subtree_tokens"] >= 12 for node in large)


def test_expired_snapshot_is_gone(toy: ServerUnderTest) -> None:
    ask(toy, "one", "one", 3)
    ask(toy, "two", "two", 3)
    first = tree(toy, limit=1)
    others = [tree(toy, limit=1) for _ in range(2)]
    query = {"limit": 1, "after": first["next"], "snapshot": first["snapshot"]}
    error = error_of(toy.client.get("/cache/tree", params=query, headers=ADMIN), 410)
    assert error["code"] == "snapshot_gone" and "leave out snapshot and after" in error["message"]
    assert tree(toy, limit=1, after=others[0]["next"], snapshot=others[0]["snapshot"])["nodes"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"after": "-2"}, "after"),
        ({"after": "x"}, "after"),
        ({"min_tokens": "0"}, "min_tokens"),
        ({"with_text": "1"}, "with_text"),
        ({"depth": "3"}, "depth"),
    ],
)
def test_invalid_tree_queries_are_refused(toy: ServerUnderTest, query: dict[str, str], param: str) -> None:
    assert error_of(toy.client.get("/cache/tree", params=query, headers=ADMIN), 400)["param"] == param


# -- other servers -----------------------------------------------------------------------------------------------------


def test_no_dashboard_flag_removes_its_routes(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--no-dashboard", "--api-key", KEY, behaviour={}) as server:
        server.wait_ready()
        for path in ("/dashboard", "/dashboard/index.html", "/dashboard/events"):
            assert error_of(server.client.get(path, headers=ADMIN), 404)["code"] == "not_found"
        assert "dashboard" not in server.log
        error = error_of(server.client.get("/cache/tree?with_text=true", headers=ADMIN), 403)
        assert error["param"] == "with_text" and "--admin-api-key" in error["message"]


def test_shutdown_ends_dashboard_streams(model: Path, tmp_path: Path) -> None:
    """And is not held up by them; without an admin key no text is told."""
    with ServerUnderTest(model, tmp_path, "--drain-timeout", "60", behaviour={}) as server:
        server.wait_ready()
        with reading(server) as stream:
            assert stream.next() == "hello" and stream.hello["text_allowed"] is False
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(StopIteration):
                while True:
                    stream.next()
        assert server.process.wait(60) == 0


def test_worker_death_ends_dashboard_streams(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, behaviour={"crash_after": 3}) as server:
        server.wait_ready()
        with reading(server) as stream:
            assert stream.next() == "hello"
            with pytest.raises((AssertionError, httpx.HTTPError)):
                ask(server, "a", "abc", 10)
            with pytest.raises((StopIteration, httpx.RemoteProtocolError)):
                while True:
                    stream.next()
        assert server.process.wait(60) == 1
