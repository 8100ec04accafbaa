"""A server that is gone, silent, wrong or hostile costs hits and short waits, never a request; no password gets out."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.block_store import WARN_S
from baton.memory_pool.stores.redis_link import SOCKET_BYTES, RemoteStoreError
from baton.memory_pool.stores.remote_store import FAILURES_IN_ROW, PAUSE_S, Breaker, RemoteStore
from tests.doubles.disk_blocks import BLOCK, MODEL, key_of, payload_of
from tests.doubles.redis_servers import Blocks, RedisServer, ScriptedServer

SECRET = "hunter2/%"
QUOTED = "hunter2%2F%25"


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers = []

    def start(answer: Callable[[list[bytes]], bytes], tls: ssl.SSLContext | None = None) -> ScriptedServer:
        servers.append(ScriptedServer(answer, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


def open_store(port: int, block_bytes: int = BLOCK, user: str = "", timeout_s: float = 30.0) -> RemoteStore:
    return RemoteStore(f"redis://{user}127.0.0.1:{port}", block_bytes, MODEL, timeout_s=timeout_s)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def blocks(store: RemoteStore, *numbers: int) -> Blocks:
    payloads = [payload_of(key, store.block_bytes) for key in keys(*numbers)]
    return Blocks(payloads, [np.zeros(store.block_bytes, dtype=np.uint8) for _ in numbers])


def test_breaker_pauses_after_failures_in_a_row() -> None:
    breaker = Breaker(2, 10.0)
    assert [breaker.failed(0.0), breaker.allows(0.0)] == [False, True]
    breaker.succeeded()
    assert [breaker.failed(1.0), breaker.failed(2.0)] == [False, True]  # in a row
    assert [breaker.allows(now) for now in (2.0, 11.9, 12.0)] == [False, False, True]
    assert breaker.failed(12.0) and not breaker.allows(21.9) and breaker.allows(22.0)  # one try is enough
    breaker.succeeded()
    assert not breaker.failed(23.0) and breaker.allows(23.0)


class TestServerThatDies:
    def test_server_dying_during_load_keeps_blocks_read_so_far(self, server: RedisServer) -> None:
        store = open_store(server.port)
        store.store_batch = 1
        some = blocks(store, 1, 2, 3)
        assert store.write_blocks(keys(1, 2, 3), some, 0.0) == [True] * 3

        def die_after_two() -> bool:
            if some.accepted == [0, 1]:
                server.stop()
            return True

        some.wanted = die_after_two
        assert store.read_blocks(keys(1, 2, 3), some, 0.0) == 2 and some.accepted == [0, 1]
        assert all(np.array_equal(room, payload) for room, payload in zip(some.rooms[:2], some.payloads))
        assert store.stats.failures["unreachable"] == 1 and (store.stats.hits, store.stats.misses) == (2, 1)

    def test_unreachable_server_is_paused_and_used_again_when_back(
        self, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = open_store(server.port)
        some = blocks(store, 1)
        assert store.write_blocks(keys(1), some, 0.0) == [True]
        server.stop()
        now = 100.0
        calls = [
            lambda: store.read_blocks(keys(1), some, now),
            lambda: store.find_blocks(keys(1), now),
            lambda: store.write_blocks(keys(2), some, now) == [True],
        ]
        assert len(calls) == FAILURES_IN_ROW and not any(call() for call in calls)
        assert store.stats.failures["unreachable"] == 3 and store.stats.pauses == 1 and store.stats.skipped == 0
        server.start()
        now += PAUSE_S - 0.1
        assert not any(call() for call in calls)
        store.touch_blocks(keys(1), now)
        assert store.stats.skipped == 3 and store.stats.failures["unreachable"] == 3
        now += 0.1
        assert store.write_blocks(keys(1), some, now) == [True]
        assert store.read_blocks(keys(1), some, now) == 1
        store.close()
        (record,) = caplog.records  # one in a minute
        assert f"the remote store at redis://127.0.0.1:{server.port}/0 failed: " in record.getMessage()
        assert f"{FAILURES_IN_ROW} failures in a row" in record.getMessage() and record.levelno == logging.WARNING

    def test_single_failed_retry_pauses_store_again(self, server: RedisServer) -> None:
        server.stop()
        store = open_store(server.port)
        assert not store.connect(0.0)
        for now in (0.0, 0.0, 0.0, 1.0, PAUSE_S, PAUSE_S + 1, 2 * PAUSE_S, WARN_S):
            assert store.find_blocks(keys(1), now) == 0
        assert store.stats.failures["unreachable"] == 6 and store.stats.skipped == 3 and store.stats.pauses == 4


def test_unanswered_remote_calls_time_out_and_pause_store(scripted: Callable[..., ScriptedServer]) -> None:
    server = scripted(lambda parts: b"")
    store = open_store(server.port, timeout_s=0.05)
    some = blocks(store, 1)
    for call in (store.read_blocks, store.read_blocks, store.write_blocks, store.read_blocks, store.write_blocks):
        assert call(keys(1), some, 5.0) in (0, [False])
    assert store.stats.failures["timeout"] == 3 == server.connections and store.stats.skipped == 2
    assert some.asked == [] == some.accepted  # nothing was gathered for it
    store.close()


def test_load_deadline_mid_block_discards_rest_of_block(server: RedisServer) -> None:
    """The rest of the block is not taken for the beginning of what comes next."""
    store = open_store(server.port, block_bytes=2 * SOCKET_BYTES)
    some = blocks(store, 1, 2)
    assert store.write_blocks(keys(1, 2), some, 0.0) == [True] * 2
    asked = iter([True, False])
    some.wanted = lambda: next(asked, False)
    assert store.read_blocks(keys(1, 2), some, 0.0) == 0 and store.stats.failures["late"] == 1
    some.wanted = lambda: True
    assert store.read_blocks(keys(2, 1), some, 0.0) == 2
    assert np.array_equal(some.rooms[0], some.payloads[1])
    store.close()


def test_loads_end_at_their_deadline(server: RedisServer) -> None:
    store = open_store(server.port)
    some = blocks(store, 1, 2, 3)
    assert store.write_blocks(keys(1, 2, 3), some, 0.0) == [True] * 3
    some.wanted = lambda: len(some.accepted) < 2
    assert store.read_blocks(keys(1, 2, 3), some, 0.0) == 2 and sum(store.stats.failures.values()) == 0
    some.wanted = lambda: True
    some.rooms[0][:] = 0
    assert store.read_blocks(keys(1), some, 0.0) == 1  # what had been asked for is not taken for it
    assert np.array_equal(some.rooms[0], some.payloads[0])
    store.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR \xff\xfe\r\n", b"*-5\r\n", b"$x\r\n"])
def test_non_redis_replies_are_misses(scripted: Callable[..., ScriptedServer], answer: bytes) -> None:
    store = open_store(scripted(lambda parts: answer).port, timeout_s=0.2)
    some = blocks(store, 1)
    assert store.read_blocks(keys(1), some, 0.0) == 0 and store.write_blocks(keys(1), some, 0.0) == [False]
    assert sum(store.stats.failures.values()) == 2
    store.close()


def test_redis_reply_of_wrong_type_is_a_miss(scripted: Callable[..., ScriptedServer]) -> None:
    store = open_store(scripted(lambda parts: b":5\r\n").port)
    assert store.read_blocks(keys(1), blocks(store, 1), 0.0) == 0 and store.stats.failures["answer"] == 1
    store.close()


def test_remote_value_of_wrong_type_is_removed(scripted: Callable[..., ScriptedServer]) -> None:
    wrong = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    server = scripted(lambda parts: wrong if parts[0] == b"GETRANGE" else b":1\r\n")
    store = open_store(server.port)
    assert store.read_blocks(keys(1), blocks(store, 1), 0.0) == 0 and store.stats.failures["header"] == 1
    assert [parts[0] for parts in server.commands] == [b"GETRANGE", b"GETRANGE", b"UNLINK"]
    assert server.commands[2][1] == server.commands[0][1] and server.connections == 1
    store.close()


def test_full_remote_store_pauses_writes_but_not_reads(scripted: Callable[..., ScriptedServer], caplog) -> None:
    """It can still be read from; what would be refused is not gathered."""
    full = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    server = scripted(lambda parts: {b"SET": full, b"EXISTS": b":0\r\n"}.get(parts[0], b"$0\r\n\r\n"))
    store = open_store(server.port)
    some = blocks(store, 1, 2)
    assert store.write_blocks(keys(1, 2), some, 0.0) == [False] * 2 and some.asked == [0, 1]
    assert store.write_blocks(keys(1), some, PAUSE_S - 1) == [False] and some.asked == [0, 1]
    assert store.read_blocks(keys(1), some, 1.0) == 0 and store.stats.misses == 1 and store.stats.skipped == 1
    assert store.write_blocks(keys(1), some, PAUSE_S) == [False] and some.asked == [0, 1, 0]
    assert store.stats.failures["refused"] == 3 == sum(store.stats.failures.values()) and store.stats.pauses == 0
    (record,) = caplog.records
    assert "refused a block of KV; pausing writes for 10 s: command not allowed" in record.getMessage()
    assert not store.contains(key_of(1))
    store.close()


class TestSecrets:
    @pytest.mark.parametrize(
        "reply",
        [
            b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
            f"-ERR unknown command 'AUTH', with args beginning with: 'baton' '{SECRET}' \r\n".encode(),
            f"-NOPERM this user {SECRET} has no permissions\r\n".encode(),
        ],
    )
    def test_wrong_password_is_refused_and_not_leaked(
        self, scripted: Callable[..., ScriptedServer], reply: bytes, caplog
    ) -> None:
        caplog.set_level(logging.DEBUG)
        server = scripted(lambda parts: reply if parts[0] == b"AUTH" else b"+PONG\r\n")
        store = open_store(server.port, user=f"baton:{QUOTED}@")
        with pytest.raises(
            RemoteStoreError, match=r"cannot log in to the remote store at .*: .*; check user, password"
        ) as caught:
            store.connect(0.0)
        assert server.commands == [[b"AUTH", b"baton", SECRET.encode()]]  # it was read as it should be
        assert store.find_blocks(keys(1), 0.0) == 0 and store.stats.failures["login"] == 1  # later it is no end
        told = str(caught.value) + caplog.text + store.address + repr(caught.value.__cause__)
        assert "127.0.0.1" in told and "hunter2" not in told
        store.close()

    def test_missing_password_is_refused(self, scripted: Callable[..., ScriptedServer]) -> None:
        store = open_store(scripted(lambda parts: b"-NOAUTH Authentication required.\r\n").port)
        with pytest.raises(RemoteStoreError, match=r"cannot log in .*: Authentication required"):
            store.connect(0.0)
        store.close()

    def test_right_password_logs_in_and_is_not_logged(
        self, scripted: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        right = [b"AUTH", SECRET.encode()]
        server = scripted(lambda parts: b"+OK\r\n" if parts in (right, [b"SELECT", b"3"]) else b"+PONG\r\n")
        store = RemoteStore(f"redis://:{QUOTED}@127.0.0.1:{server.port}/3", BLOCK, MODEL)
        assert store.connect(0.0) and server.commands == [right, [b"SELECT", b"3"], [b"PING"]]
        assert store.address == f"redis://127.0.0.1:{server.port}/3" and "hunter2" not in caplog.text
        store.close()

    @pytest.mark.parametrize(
        "url",
        [
            "redis://:hunter2/x@host",
            "redis://:12/hunter2@host",
            "redis://:12#hunter2@host",
            "redis://:12?hunter2@host",
            "redis://:12/3#hunter2",
            "redis://[hunter2@host",
            "redis://host:hunter2",
            "http://user:hunter2@host",
            "hunter2@host",
            "redis://host/hunter2",
        ],
    )
    def test_unreadable_urls_are_refused_without_leaking_password(self, url: str) -> None:
        """Mostly a password that is not quoted."""
        with pytest.raises(RemoteStoreError, match="cannot be read: give it the form redis://") as caught:
            RemoteStore(url, BLOCK, MODEL)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__suppress_context__  # a trace would show what redis-py says


class TestArguments:
    @pytest.mark.parametrize("option", ["socket_timeout=9", "decode_responses=1", "password=hunter2", "protocol=3"])
    def test_unsupported_url_options_are_refused(self, option: str) -> None:
        name = option.partition("=")[0]
        with pytest.raises(RemoteStoreError, match=f"has an option '{name}', which is not supported") as caught:
            RemoteStore(f"redis://host/?{option}", BLOCK, MODEL)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize("url", ["redis://host/?ssl_cert_reqs=none", "rediss://host/?ssl_foo=1"])
    def test_options_unknown_to_redis_py_are_refused(self, url: str) -> None:
        with pytest.raises(RemoteStoreError, match="has options that redis-py does not take: ssl_"):
            RemoteStore(url, BLOCK, MODEL)

    def test_blocks_too_large_for_redis_are_refused(self) -> None:
        with pytest.raises(RemoteStoreError, match="does not fit into a value of Redis, of 536870912 bytes"):
            RemoteStore("redis://host", 2**29 - 67, MODEL)
        RemoteStore("redis://host", 2**29 - 68, MODEL)
        with pytest.raises(ValueError, match="block_bytes must be at least 1, not 0"):
            RemoteStore("redis://host", 0, MODEL)

    def test_zero_ttl_is_refused(self) -> None:
        with pytest.raises(RemoteStoreError, match="keeps blocks for at least 1 second, not 0"):
            RemoteStore("redis://host", BLOCK, MODEL, ttl_s=0)

    def test_remote_keys_of_wrong_length_are_refused(self, scripted: Callable[..., ScriptedServer]) -> None:
        server = scripted(lambda parts: b":0\r\n")
        store = open_store(server.port)
        with pytest.raises(ValueError, match="key has 20 bytes, not 19"):
            store.write_blocks([bytes(19)], blocks(store, 1), 0.0)
        assert server.commands == []
        store.close()

    def test_missing_redis_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "redis", None)
        with pytest.raises(RemoteStoreError, match=r"needs the package redis, .*: pip install 'baton-serve\[remote\]'"):
            RemoteStore("redis://host", BLOCK, MODEL)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_requires_trusted_certificate(scripted: Callable[..., ScriptedServer], tmp_path: Path) -> None:
    """Only with a server whose certificate is trusted."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *command.split(), *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = scripted(lambda parts: b"+PONG\r\n", tls)
    url = f"rediss://127.0.0.1:{server.port}"
    stranger = RemoteStore(url, BLOCK, MODEL, connect_timeout_s=30.0)
    assert not stranger.connect(0.0) and stranger.stats.failures["unreachable"] == 1 and server.connections == 0
    store = RemoteStore(f"{url}?ssl_ca_certs={certificate}", BLOCK, MODEL, connect_timeout_s=30.0)
    assert store.connect(0.0) and server.commands == [[b"PING"]] and store.address == f"{url}/0"
    store.close()
    stranger.close()
