"""Keys: where they come from, what each opens, and that nobody else gets to see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.entrypoints.http.keys import ApiKey, Caller, Keys, exposure_warning, in_environment, presented_key, read_keys
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.server_config import ServerConfig, UsageError
from baton.runtime.clients import SOLE_CLIENT, Client
from baton.scheduler.outcome import RequestRefused
from tests.doubles.http_calls import error_of
from tests.doubles.server_under_test import ServerUnderTest

SERVING, ADMIN = "serving-s3cret", "admin-s3cret"


def keys_of(*api: str, admin: str = "", **options: bool) -> Keys:
    """Each key belongs to a client that is called as the key begins."""
    return Keys([ApiKey(key[0], key) for key in api], admin, **options)


@pytest.mark.parametrize(
    ("keys", "access", "given", "who"),
    [
        (keys_of(), "admin", "", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of(), "serving", "any", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of("k"), "open", "", Caller(SOLE_CLIENT)),
        (keys_of("k"), "serving", "", 401),
        (keys_of("k"), "serving", "x", 401),
        (keys_of("k"), "serving", "k", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of("k"), "admin", "", 401),
        (keys_of("k"), "admin", "k", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of("k", "k2"), "admin", "k2", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of(admin="a"), "serving", "", Caller(SOLE_CLIENT)),
        (keys_of(admin="a"), "serving", "x", Caller(SOLE_CLIENT)),
        (keys_of(admin="a"), "admin", "", 401),
        (keys_of(admin="a"), "admin", "a", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of("k", admin="a"), "serving", "", 401),
        (keys_of("k", admin="a"), "serving", "k", Caller(SOLE_CLIENT)),
        (keys_of("k", admin="a"), "serving", "a", Caller(SOLE_CLIENT, is_admin=True)),
        (keys_of("k", admin="a"), "admin", "k", 403),
        (keys_of("k", admin="a"), "admin", "x", 401),
        (keys_of("k", "l"), "serving", "l", Caller(Client("l"))),
        (keys_of("k", "l"), "admin", "l", 403),
        (keys_of("k", "l", admin="a"), "serving", "l", Caller(Client("l"))),
        (keys_of("k", "l", admin="a"), "serving", "a", Caller(Client("admin"), is_admin=True, sees_all=True)),
        (keys_of("k", "l"), "open", "", Caller(Client("anonymous"))),
        (keys_of("k", "l"), "serving", "a", 401),
        (keys_of("key", "Key"), "serving", "Key", Caller(Client("K"))),
        (keys_of("key", "Key"), "serving", "KEY", 401),
        (keys_of("k", "l", isolated=True), "serving", "l", Caller(Client("l", isolated=True))),
        (keys_of("k", "l" * 10_000), "serving", "l" * 10_000, Caller(Client("l"))),
        (keys_of("k", "l" * 10_000), "serving", "l" * 9_999, 401),
        (keys_of("k", "schlüssel"), "serving", "schlüssel", Caller(Client("s"))),
    ],
)
def test_key_determines_caller_and_access(keys: Keys, access: str, given: str, who: Caller | int) -> None:
    try:
        assert keys.admit(access, given.encode()) == who  # type: ignore[arg-type]
    except RequestRefused as refused:
        assert status_of(refused) == who


def test_only_admin_can_act_on_behalf_of_a_client() -> None:
    keys = keys_of("k", "l", admin="a")
    admin, client = keys.admit("serving", b"a"), keys.admit("serving", b"k")
    assert keys.on_behalf(admin, "k") == Caller(Client("k"), is_admin=True), "and sees only what the client sees"
    with pytest.raises(RequestRefused) as refused:
        keys.on_behalf(admin, "nobody")
    assert (status_of(refused.value), refused.value.code) == (404, "client_not_found")
    assert "k, l, admin" in refused.value.message
    said = set()
    for name in ("k", "l", "nobody", "admin", ""):
        with pytest.raises(RequestRefused) as refused:
            keys.on_behalf(client, name)
        said.add((status_of(refused.value), refused.value.message))
    assert len(said) == 1 and next(iter(said))[0] == 403, "nobody else learns which clients there are"


@pytest.mark.parametrize("keys", [("k", "k"), ("k", "l", "k")])
def test_duplicate_api_keys_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="the same API key is given twice"):
        keys_of(*keys)
    with pytest.raises(UsageError, match="the same API key is given twice"):
        keys_of("k", admin="k")
    with pytest.raises(UsageError, match="--isolate-clients tells clients apart by their keys"):
        keys_of("k", isolated=True)


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
def test_api_key_is_read_from_request_headers(headers: dict[bytes, bytes], key: bytes) -> None:
    assert presented_key(headers) == key


def found(server: ServerConfig, environment: dict[str, str]) -> list[tuple[str, str]]:
    return [(key.client, key.key) for key in read_keys(server, environment)._api]


def test_api_key_sources_are_flag_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environment = {"BATON_API_KEY": "from-environment", "BATON_ADMIN_API_KEY": "admin", "HOME": "/"}
    assert found(ServerConfig(), environment) == [("client-1", "from-environment")]
    assert environment == {"HOME": "/"}, "children would inherit it"
    environment = {"BATON_API_KEY": "from-environment", "BATON_ADMIN_API_KEY": "admin"}
    assert found(ServerConfig(api_key_file=str(file)), environment) == [("client-1", "from-file")]
    assert environment == {}
    given = ServerConfig(api_key=("one", "two"), api_key_file="", admin_api_key="three")
    keys = read_keys(given, {"BATON_ADMIN_API_KEY": "not this"})
    assert keys.client_names == ["client-1", "client-2", "admin"] and keys.most_powerful == "three"
    assert not any(key in repr(keys) + repr(keys._api) for key in ("'one'", "'two'", "'three'"))
    assert found(ServerConfig(), {"BATON_API_KEY": " \n"}) == []


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ("plain\n", [("client-1", "plain")]),
        ("with:colon", [("client-1", "with:colon")]),
        ("# of the gateway\nplain\n\n", [("client-1", "plain")]),
        ("#begins-with-a-hash", [("client-1", "#begins-with-a-hash")]),
        ("alice: one", [("alice", "one")]),
        ("alice: one\r\n  bob:\ttwo  \n", [("alice", "one"), ("bob", "two")]),
        ("alice: old\nalice: new\nbob: x:y", [("alice", "old"), ("alice", "new"), ("bob", "x:y")]),
        ("a: k\nA: K", [("a", "k"), ("A", "K")]),
    ],
)
def test_api_key_file_is_parsed(tmp_path: Path, content: str, keys: list[tuple[str, str]]) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content.encode())
    assert found(ServerConfig(api_key_file=str(file)), {}) == keys
    assert found(ServerConfig(), {"BATON_API_KEY": content}) == keys


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n", "must hold a key"),
        ("# nothing\n", "must hold a key"),
        ("alice: s3cret\nplain-s3cret", "line 2 is not of the form 'name: key'"),
        ("alice: s3cret\n\nbob:s3cret2", "line 3 is not of the form 'name: key'"),
        ("alice: s3cret\nbob: s3cret 2", "line 2 is not of the form 'name: key'"),
        ("alice: s3cret\na/b: s3cret2", "line 2 is not of the form 'name: key'"),
        ("alice: s3cret\n.: s3cret2", "line 2 is not of the form 'name: key'"),
        ("alice: s3cret\nálice: s3cret2", "line 2 is not of the form 'name: key'"),
        (f"alice: s3cret\n{'a' * 65}: s3cret2", "line 2 is not of the form 'name: key'"),
        ("admin: s3cret", "line 1 is not of the form 'name: key'"),
        ("anonymous: s3cret\nbob: s3cret2", "line 1 is not of the form 'name: key'"),
        ("alice: s3cret\nbob: s3cret", "line 2 has a key that an earlier line has"),
        ("alice: s3cret\nalice: s3cret", "line 2 has a key that an earlier line has"),
    ],
)
def test_malformed_api_key_file_is_refused_without_leaking_keys(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(UsageError) as refused:
        read_keys(ServerConfig(api_key_file=str(file)), {})
    assert said in str(refused.value) and str(file) in str(refused.value) and "s3cret" not in str(refused.value)


def test_runtime_api_keys_reach_its_server() -> None:
    assert in_environment("key") == in_environment(["key"]) == "key"
    assert found(ServerConfig(), {"BATON_API_KEY": in_environment(("a", "b"))}) == [
        ("client-1", "a"),
        ("client-2", "b"),
    ]


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", keys_of(), False),
        ("127.8.0.1", keys_of(), False),
        ("::1", keys_of(), False),
        ("localhost", keys_of(), False),
        ("0.0.0.0", keys_of(), True),
        ("::", keys_of(), True),
        ("192.168.1.5", keys_of(admin="a"), True),
        ("gpu-box.lan", keys_of(), True),
        ("0.0.0.0", keys_of("k"), False),
    ],
)
def test_exposed_server_without_key_is_warned_about(host: str, keys: Keys, warns: bool) -> None:
    warning = exposure_warning(host, keys)
    assert bool(warning) == warns
    assert not warns or (f"--host {host}" in warning and "--api-key-file" in warning)
    assert ("abort" in warning) == (warns and not keys.has_admin), "with an admin key, less can be done"


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff"])
def test_admin_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
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
    ],
)
def test_admin_endpoints_require_the_admin_key(
    locked: ServerUnderTest, method: str, path: str, body: dict | None
) -> None:
    refused = ask(locked, method, path, SERVING, body)
    assert error_of(refused, 403)["code"] == "admin_key_required"
    assert error_of(ask(locked, method, path, "wrong", body), 401)["code"] == "invalid_api_key"
    if method != "DELETE":  # which the double does not answer
        assert ask(locked, method, path, ADMIN, body).status_code in (200, 400)


@pytest.mark.process
def test_serving_accepts_either_key_and_leaks_none(locked: ServerUnderTest) -> None:
    for key in (SERVING, ADMIN):
        assert ask(locked, "POST", "/generate", key, {"text": "a"}).status_code == 200
        shown = ask(locked, "GET", "/server_info", key)
        assert shown.status_code == 200 and SERVING not in shown.text and ADMIN not in shown.text
    assert ask(locked, "POST", "/abort_request", SERVING, {"rid": "nobody"}).status_code == 404
    assert locked.client.get("/health").status_code == 200
    assert SERVING not in locked.log and ADMIN not in locked.log
