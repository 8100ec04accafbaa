"""Keys: where they come from, what each opens, and that nobody else gets to see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_calls import error_of
from server_under_test import ServerUnderTest

from baton.entrypoints.http.keys import Keys, presented_key, read_keys
from baton.entrypoints.server_config import ServerConfig, UsageError
from baton.scheduler.outcome import RequestRefused

SERVING, ADMIN = "serving-s3cret", "admin-s3cret"


@pytest.mark.parametrize(
    ("keys", "access", "given", "status"),
    [
        (Keys(), "serving", "", None),
        (Keys(), "admin", "", None),
        (Keys("k"), "open", "", None),
        (Keys("k"), "serving", "", 401),
        (Keys("k"), "serving", "x", 401),
        (Keys("k"), "serving", "k", None),
        (Keys("k"), "admin", "", 401),
        (Keys("k"), "admin", "k", None),
        (Keys("", "a"), "serving", "", None),
        (Keys("", "a"), "admin", "", 401),
        (Keys("", "a"), "admin", "a", None),
        (Keys("k", "a"), "serving", "", 401),
        (Keys("k", "a"), "serving", "k", None),
        (Keys("k", "a"), "serving", "a", None),
        (Keys("k", "a"), "admin", "k", 403),
        (Keys("k", "a"), "admin", "x", 401),
        (Keys("k", "a"), "admin", "a", None),
    ],
)
def test_what_a_key_opens(keys: Keys, access: str, given: str, status: int | None) -> None:
    try:
        keys.check(access, given.encode())  # type: ignore[arg-type]
    except RequestRefused as refused:
        assert refused.status == status
    else:
        assert status is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, b""),
        ({b"authorization": b"Bearer k"}, b"k"),
        ({b"x-api-key": b"k"}, b"k"),
        ({b"authorization": b"Bearer k", b"x-api-key": b"other"}, b"k"),
        ({b"authorization": b"k"}, b""),
        ({b"authorization": b"Basic k", b"x-api-key": b"k"}, b""),
    ],
)
def test_where_a_request_has_its_key(headers: dict[bytes, bytes], key: bytes) -> None:
    assert presented_key(headers) == key


def test_a_key_stands_in_a_flag_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {"BATON_API_KEY": "from-environment", "BATON_ADMIN_API_KEY": "admin", "HOME": "/"}
    assert read_keys(ServerConfig(), environment) == Keys("from-environment", "admin")
    assert environment == {"HOME": "/"}, "children would inherit it"
    environment = {"BATON_API_KEY": "from-environment"}
    assert read_keys(ServerConfig(api_key_file=str(file), admin_api_key="a"), environment) == Keys("from-file", "a")
    assert environment == {}
    assert "from" not in repr(Keys("from-flag", "from-flag"))


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=r"--admin-api-key-file .*key (cannot be read|must hold one line)"):
        read_keys(ServerConfig(admin_api_key_file=str(file)), {})


@pytest.fixture(scope="module")
def locked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "key").write_text(SERVING)
    (folder / "admin").write_text(ADMIN)
    flags = ["--api-key-file", str(folder / "key"), "--admin-api-key-file", str(folder / "admin")]
    with ServerUnderTest(model, folder, *flags, "--log-level", "debug", behaviour={}) as running:
        yield running.wait_ready()


def ask(server: ServerUnderTest, method: str, path: str, key: str, json: dict | None = None) -> httpx.Response:
    return server.client.request(method, path, json=json, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.process
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/flush_cache", None),
        ("POST", "/cache/statistics/reset", None),
        ("GET", "/flush_cache", None),
        ("POST", "/flush_cache%0A", None),
        ("POST", "/item_tries%0A?name=x", None),
        ("POST", "/start_profile", None),
        ("POST", "/stop_profile", None),
        ("POST", "/item_tries?name=x", None),
        ("DELETE", "/item_tries/x", None),
        ("POST", "/abort_request", {"abort_all": True}),
    ],
)
def test_admin_endpoints_take_the_admin_key(locked: ServerUnderTest, method: str, path: str, body: dict | None) -> None:
    refused = ask(locked, method, path, SERVING, body)
    assert error_of(refused, 403)["code"] == "admin_key_required"
    assert error_of(ask(locked, method, path, "wrong", body), 401)["code"] == "invalid_api_key"
    if method != "DELETE":  # which the double does not answer
        assert ask(locked, method, path, ADMIN, body).status_code in (200, 400)


@pytest.mark.process
def test_serving_takes_either_key_and_shows_none(locked: ServerUnderTest) -> None:
    for key in (SERVING, ADMIN):
        assert ask(locked, "POST", "/generate", key, {"text": "a"}).status_code == 200
        shown = ask(locked, "GET", "/server_info", key)
        assert shown.status_code == 200 and SERVING not in shown.text and ADMIN not in shown.text
    assert ask(locked, "POST", "/abort_request", SERVING, {"rid": "nobody"}).status_code == 404
    assert locked.client.get("/health").status_code == 200
    assert SERVING not in locked.log and ADMIN not in locked.log
