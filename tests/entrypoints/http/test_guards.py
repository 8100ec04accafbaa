"""No page of the web gets through: Host, Origin, Content-Type, and which GETs change something."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.entrypoints.http.guards import KnownHosts, check_origin
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from tests.doubles.http_calls import error_of, raw_answer
from tests.doubles.server_under_test import ServerUnderTest


@pytest.mark.parametrize(
    ("allowed", "host", "is_known"),
    [
        ("", "localhost:30000", True),
        ("", "LocalHost.", True),
        ("", "app.localhost", True),
        ("", "127.0.0.1:1", True),
        ("", "[::1]:30000", True),
        ("", "10.1.2.3", True),
        ("", "gpu-box:30000", True),
        ("", "evil.example", False),
        ("", "evil.example:30000", False),
        ("", "localhost.evil.example", False),
        ("", "127.0.0.1.evil.example", False),
        ("", "notlocalhost", False),
        ("", "", False),
        ("", "[evil]", False),
        ("a.org, b.org", "B.org:80", True),
        ("a.org, b.org", "c.org", False),
        ("*.a.org", "x.a.org", True),
        ("*.a.org", "a.org", False),
        ("*.a.org", "xa.org", False),
        ("*", "evil.example", True),
    ],
)
def test_only_known_hosts_are_accepted(allowed: str, host: str, is_known: bool) -> None:
    hosts = KnownHosts("gpu-box", allowed)
    if is_known:
        hosts.check(host)
    else:
        with pytest.raises(RequestRefused, match="--allowed-hosts") as caught:
            hosts.check(host)
        assert status_of(caught.value) == 421


@pytest.mark.parametrize(
    ("origin", "host", "friend", "is_taken"),
    [
        (None, "localhost:1", "", True),
        (b"http://localhost:1", "localhost:1", "", True),
        (b"http://LOCALHOST:1", "localhost:1", "", True),
        (b"https://a.org", "a.org:443", "", True),
        (b"http://a.org:80", "a.org", "", True),
        (b"http://localhost:2", "localhost:1", "", False),
        (b"http://localhost", "localhost:1", "", False),
        (b"null", "localhost:1", "", False),
        (b"", "localhost:1", "", False),
        (b"http://[bad", "localhost:1", "", False),
        (b"http://[::1", "[::1", "", False),
        (b"http://a]b[", None, "", False),
        (b"http://evil.org", "localhost:1", "", False),
        (b"http://evil.org", None, "", False),
        (b"https://a.org", "localhost:1", "https://a.org/", True),
        (b"http://a.org", "localhost:1", "https://a.org", False),
        (b"http://evil.org", "localhost:1", "*", True),
    ],
)
def test_foreign_origins_are_refused(origin: bytes | None, host: str | None, friend: str, is_taken: bool) -> None:
    if is_taken:
        check_origin(origin, host, friend)
    else:
        with pytest.raises(RequestRefused, match="--cors-origin") as caught:
            check_origin(origin, host, friend)
        assert status_of(caught.value) == 403


STATE_CHANGING = ["/generate", "/v1/completions", "/abort_request", "/release", "/tokenize", "/flush_cache",
                  "/start_profile", "/stop_profile", "/item_tries?name=x"]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("path", STATE_CHANGING)
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_state_changes_from_foreign_origins_are_refused(server: ServerUnderTest, path: str, body: bytes) -> None:
    kind = "application/octet-stream" if "tries" in path else "application/json"
    headers = {"Content-Type": kind, "Origin": "https://evil.example"}
    response = server.client.post(path, content=body, headers=headers)
    assert error_of(response, 403)["code"] == "foreign_origin"
    for origin in (server.url, "https://example.org"):  # its own page, and --cors-origin
        response = server.client.post(path, content=body, headers=headers | {"Origin": origin})
        assert response.status_code in (200, 400, 409)


@pytest.mark.process
@pytest.mark.parametrize("path", STATE_CHANGING)
def test_body_requires_its_content_type(server: ServerUnderTest, path: str) -> None:
    own = "application/octet-stream" if "tries" in path else "application/json"
    other = "application/json" if "tries" in path else "application/octet-stream"
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "text/json", other):
        headers = {"Content-Type": kind} if kind else {}
        error = error_of(server.client.post(path, content=b"{}", headers=headers), 415)
        assert error["code"] == "unsupported_media_type" and own in error["message"]
        chunked = server.client.post(path, content=iter([b"{}"]), headers=headers)
        assert error_of(chunked, 415)


@pytest.mark.process
def test_json_content_type_variants_are_accepted(server: ServerUnderTest) -> None:
    for kind in ("Application/JSON; charset=utf-8", "application/vnd.api+json"):
        response = server.client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert response.status_code == 200


@pytest.mark.process
@pytest.mark.parametrize("path", ["/flush_cache", "/flush_cache%0A", "/start_profile", "/stop_profile"])
def test_get_cannot_change_state(server: ServerUnderTest, path: str) -> None:
    response = server.client.get(path)
    assert "use POST" in error_of(response, 405)["message"] and response.headers["allow"] == "POST"


@pytest.mark.process
def test_unknown_host_is_refused(server: ServerUnderTest) -> None:
    for path in ("/generate", "/metrics", "/health", "/nothing"):
        response = server.client.get(path, headers={"Host": "evil.example"})
        assert error_of(response, 421)["code"] == "unknown_host"
    assert raw_answer(server, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw_answer(server, b"GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n").startswith(
        b"HTTP/1.1 400 "
    )
    assert raw_answer(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.process
def test_api_key_allows_any_host_and_flush_by_get(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--api-key", "k", behaviour={}) as server:
        server.wait_ready()
        assert server.client.get("/health", headers={"Host": "any.example"}).status_code == 200
        assert error_of(server.client.get("/flush_cache"), 401)
        key = {"Authorization": "Bearer k"}
        assert server.client.get("/flush_cache", headers=key).status_code == 200
        foreign = key | {"Origin": "https://evil.example"}
        assert error_of(server.client.get("/flush_cache", headers=foreign), 403)["code"] == "foreign_origin"
