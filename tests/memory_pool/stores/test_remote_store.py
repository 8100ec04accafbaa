"""Blocks come back from a Redis server byte for byte, in few round trips; what is not the block is a miss."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import numpy as np
import pytest

from baton.memory_pool.stores import remote_store
from baton.memory_pool.stores.block_frame import HEADER_BYTES
from baton.memory_pool.stores.block_keys import block_keys, model_digest, root_key
from baton.memory_pool.stores.block_store import WARN_S
from baton.memory_pool.stores.redis_link import SOCKET_BYTES
from baton.memory_pool.stores.remote_store import TOUCH_S, RemoteStore
from tests.doubles.disk_blocks import BLOCK, MODEL, key_of, payload_of
from tests.doubles.redis_servers import Blocks, RedisServer

KEY = key_of(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture
def store(server: RedisServer) -> Iterator[RemoteStore]:
    store = RemoteStore(server.url, BLOCK, MODEL)
    yield store
    store.close()


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def put(store: RemoteStore, *numbers: int, now: float = 0.0) -> list[bool]:
    payloads = [payload_of(key, store.block_bytes) for key in keys(*numbers)]
    return store.write_blocks(keys(*numbers), Blocks(payloads), now)


def get(store: RemoteStore, *numbers: int, now: float = 0.0) -> int:
    """How many leading blocks the store gives; they must be the right ones."""
    rooms = [np.full(store.block_bytes, 85, dtype=np.uint8) for _ in numbers]
    blocks = Blocks((), rooms)
    count = store.read_blocks(keys(*numbers), blocks, now)
    assert blocks.accepted == list(range(count))
    for key, room in zip(keys(*numbers)[:count], rooms):
        assert np.array_equal(room, payload_of(key, store.block_bytes)), "a wrong block was handed out"
    return count


def name_of(key: bytes, model: bytes = MODEL) -> bytes:
    return b"baton-kv:1:" + model_digest(model).hex().encode() + b":" + key.hex().encode()


def count_round_trips(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by "s" and "r" as packets are sent and replies received."""
    events: list[str] = []
    connection = store._link._connection
    for name in ("send_packed_command", "read_response"):
        call = getattr(connection, name)

        def record(*args, call=call, letter=name[0], **kwargs):
            events.append(letter)
            return call(*args, **kwargs)

        monkeypatch.setattr(connection, name, record)
    return events


SIZES = [1, SOCKET_BYTES - 1, SOCKET_BYTES, SOCKET_BYTES + 1, 3 * SOCKET_BYTES - 5]


@pytest.mark.parametrize("ttl_s", [None, 100])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_stored_blocks_read_back_unchanged(server: RedisServer, block_bytes: int, ttl_s: int | None) -> None:
    store = RemoteStore(server.url, block_bytes, MODEL, ttl_s=ttl_s)
    assert put(store, 1, 2, 3) == [True] * 3
    assert get(store, 3, 1, 2) == 3 and get(store, 1, 4, 2) == 1 and get(store, 4) == 0 and get(store) == 0
    assert get(store, 2, 3) == 2  # the connection is in step
    stats = store.stats
    assert (stats.hits, stats.misses, stats.bytes_read) == (6, 2, 6 * block_bytes)
    assert (stats.writes, stats.bytes_written, sum(stats.failures.values())) == (3, 3 * block_bytes, 0)
    with server.client() as client:
        assert {client.ttl(name_of(key)) > 0 for key in keys(1, 2, 3)} == {ttl_s is not None}
    store.close()


def test_redis_values_have_documented_layout(server: RedisServer, store: RemoteStore) -> None:
    assert put(store, 1) == [True]
    with server.client() as client:
        assert client.keys() == [name_of(KEY)]
    value = value_of(server, KEY)
    assert value[:12] == b"baton-kv\1\0\0\0" and value[12:32] == model_digest(MODEL)
    assert value[32:52] == KEY and value[HEADER_BYTES:] == bytes(payload_of(KEY))


def test_namespaces_and_fingerprints_do_not_reach_the_server(server: RedisServer) -> None:
    store = RemoteStore(server.url, BLOCK, b"the-model")
    (key,) = block_keys(root_key(b"the-model", "secret-salt"), np.arange(8, dtype=np.int32), 8)
    assert store.write_blocks([key], Blocks([np.zeros(BLOCK, dtype=np.uint8)]), 0.0) == [True]
    with server.client() as client:
        assert client.keys() == [name_of(key, b"the-model")]
    data = name_of(key, b"the-model") + value_of(server, key, b"the-model")
    assert b"secret-salt" not in data and b"the-model" not in data
    store.close()


def test_random_remote_traffic_matches_set_model(server: RedisServer) -> None:
    rng, there = random.Random(7), set[int]()
    stores = [RemoteStore(server.url, 700, MODEL, ttl_s=ttl) for ttl in (None, 100, 100)]
    for _ in range(120):
        store, numbers = rng.choice(stores), [rng.randrange(12) for _ in range(rng.randrange(6))]
        lead = next((at for at, number in enumerate(numbers) if number not in there), len(numbers))
        match rng.randrange(6):
            case 0 | 1:
                assert put(store, *numbers) == [True] * len(numbers)
                there |= {*numbers}
            case 2 | 3:
                assert get(store, *numbers) == lead
            case 4:
                assert store.find_blocks(keys(*numbers), 0.0) == lead
            case 5 if rng.random() < 0.3:
                with server.client() as client:
                    client.flushall()
                there.clear()
            case _:
                store.touch_blocks(keys(*numbers), 0.0)
    assert not any(sum(store.stats.failures.values()) for store in stores)
    for store in stores:
        store.close()


class TestRoundTrips:
    def test_loads(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        assert all(put(store, *range(9)))
        events = count_round_trips(store, monkeypatch)
        assert get(store, *range(9)) == 9
        assert "".join(events).count("sr") == 1 and events.count("s") == 1
        events.clear()
        store.store_batch = 4
        assert get(store, *range(9)) == 9
        assert "".join(events).count("sr") == 3  # and no more than four blocks are on their way

    def test_stores_and_finds_take_few_round_trips(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        assert put(store, 0) == [True]
        events = count_round_trips(store, monkeypatch)
        assert put(store, *range(5)) == [True] * 5
        assert "".join(events).count("sr") == 2
        events.clear()
        assert store.find_blocks(keys(*range(9)), 0.0) == 5 and "".join(events).count("sr") == 1 == events.count("s")

    def test_miss_keeps_connection_open(self, store: RemoteStore) -> None:
        """What had been asked for beyond it is taken in."""
        assert all(put(store, 1, 3))
        socket = store._link._connection._sock
        assert get(store, 1, 2, 3) == 1 and get(store, 3, 1) == 2 and store._link._connection._sock is socket

    def test_store_batch_is_bounded_by_bytes(self, server: RedisServer) -> None:
        for block_bytes, blocks in ((2**23, 1), (2**22, 2), (2**26, 1)):
            store = RemoteStore(server.url, block_bytes, MODEL)
            assert store.store_batch == blocks
            store.close()


class TestSharing:
    def test_servers_of_one_model_share_remote_blocks(self, server: RedisServer, store: RemoteStore) -> None:
        other = RemoteStore(server.url, BLOCK, MODEL)
        assert put(store, 1, 2) == [True, True]
        blocks = Blocks([payload_of(key) for key in keys(1, 3, 2)])
        assert other.write_blocks(keys(1, 3, 2), blocks, 0.0) == [True] * 3
        assert blocks.asked == [1]  # nor does it look at what the server has
        assert (other.stats.writes, other.stats.writes_present) == (1, 2)
        assert get(store, 1, 2, 3) == 3 and get(other, 1, 2, 3) == 3
        other.close()

    def test_models_share_no_remote_blocks(self, server: RedisServer, store: RemoteStore) -> None:
        other = RemoteStore(server.url, BLOCK, b"another")
        assert put(store, 1, 2) == [True] * 2 and other.find_blocks(keys(1), 0.0) == 0 and put(other, 1) == [True]
        assert store.contains(KEY) and get(other, 2) == 0
        other.close()


class TestWhatIsKnown:
    def test_known_keys_follow_server_replies(self, server: RedisServer, store: RemoteStore) -> None:
        other = RemoteStore(server.url, BLOCK, MODEL)
        assert put(other, 1, 2) == [True] * 2 and other.contains(KEY) and not store.contains(KEY)
        assert store.find_blocks(keys(1), 0.0) == 1 and store.contains(KEY)
        assert get(store, 2) == 1 and store.contains(key_of(2))
        with server.client() as client:
            client.flushall()
        assert store.contains(KEY) and store.contains(key_of(2))  # out of date
        assert get(store, 1) == 0 and not store.contains(KEY)
        assert store.find_blocks(keys(2), 0.0) == 0 and not store.contains(key_of(2))
        other.close()

    def test_known_keys_are_bounded(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_store, "KNOWN_KEYS", 3)
        assert all(put(store, 1, 2, 3)) and get(store, 1) == 1 and all(put(store, 4))
        assert [store.contains(key) for key in keys(1, 2, 3, 4)] == [True, False, True, True]


class TestTimeToLive:
    def test_use_extends_remote_ttl(self, server: RedisServer) -> None:
        store = RemoteStore(server.url, BLOCK, MODEL, ttl_s=1000)
        assert all(put(store, 1, 2, 3))
        with server.client() as client:
            for key in keys(1, 2, 3):
                client.expire(name_of(key), 10)
            assert get(store, 1) == 1
            store.touch_blocks(keys(2, 9), TOUCH_S)
            left = [client.ttl(name_of(key)) > 10 for key in keys(1, 2, 3)]
        assert left == [True, True, False]
        store.close()

    def test_touch_without_ttl_reads_blocks(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Redis evicts by it."""
        assert all(put(store, 1, 2))
        replies = []
        receive = store._link.receive
        monkeypatch.setattr(store._link, "receive", lambda: replies.append(receive()))
        store.touch_blocks(keys(1, 9, 2), TOUCH_S)
        assert replies == [b"b", b"", b"b"] and store._link.pending == 0

    @pytest.mark.parametrize(("ttl_s", "often"), [(None, TOUCH_S), (1000, TOUCH_S), (100, 25.0)])
    def test_touches_of_remote_blocks_are_rate_limited(
        self, ttl_s: int | None, often: float, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also by reads and writes; not by questions."""
        store = RemoteStore(server.url, BLOCK, MODEL, ttl_s=ttl_s)
        assert put(store, 1, 2, now=10.0) == [True] * 2 and get(store, 1, now=15.0) == 1
        assert store.find_blocks(keys(1, 2), 20.0) == 2
        told = []
        monkeypatch.setattr(
            store._values, "touch_block", lambda key, touch=store._values.touch_block: told.append(key) or touch(key)
        )
        for now, expected in ((9.9, []), (10.0, [2]), (14.9, []), (15.0, [1])):
            store.touch_blocks(keys(1, 2), often + now)
            assert told == keys(*expected), now
            told.clear()
        store.touch_blocks(keys(2, 1), 2 * often + 20.0)
        assert told == keys(2, 1)
        store.close()

    def test_touch_detects_blocks_lost_by_server(self, server: RedisServer, store: RemoteStore) -> None:
        assert put(store, 1, 2) == [True] * 2
        with server.client() as client:
            client.delete(name_of(KEY))
        store.touch_blocks(keys(1, 2, 3), TOUCH_S)
        assert [store.contains(key) for key in keys(1, 2, 3)] == [False, True, False]
        with server.client() as client:
            client.lpush(name_of(key_of(3)), "no block")
        store.touch_blocks(keys(3), TOUCH_S)  # it refuses to say
        assert not store.contains(key_of(3)) and not any(store.stats.failures.values())


def value_of(server: RedisServer, key: bytes, model: bytes = MODEL) -> bytes:
    with server.client() as client:
        value = client.get(name_of(key, model))
    assert isinstance(value, bytes)
    return value


def flipped(value: bytes, position: int) -> bytes:
    return value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]


class TestDamage:
    """A miss, counted, logged now and then; the value goes, so that the block can be stored again."""

    def is_lost(self, server: RedisServer, store: RemoteStore, value: bytes, kind: str) -> None:
        with server.client() as client:
            client.set(name_of(KEY), value)
            before = store.stats.failures[kind]
            assert get(store, 0, 1, 2) == 1
            assert store.stats.failures[kind] == before + 1 and sum(store.stats.failures.values()) == before + 1
            assert not store.contains(KEY) and not client.exists(name_of(KEY))
        assert put(store, 1) == [True] and get(store, 0, 1, 2) == 3

    @pytest.mark.parametrize("block_bytes", [BLOCK, SOCKET_BYTES + 10])
    def test_remote_value_of_wrong_size_is_removed(self, server: RedisServer, block_bytes: int) -> None:
        store = RemoteStore(server.url, block_bytes, MODEL)
        assert all(put(store, 0, 1, 2))
        value = value_of(server, KEY)
        for size in {1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + SOCKET_BYTES, len(value) - 1}:
            if size < len(value):
                self.is_lost(server, store, value[:size], "size")
        self.is_lost(server, store, value + b"\0", "size")
        self.is_lost(server, store, value * 3, "size")
        store.close()

    def test_flipped_byte_of_remote_value_is_detected(self, server: RedisServer, store: RemoteStore) -> None:
        assert all(put(store, 0, 1, 2))
        value = value_of(server, KEY)
        for position in (0, 8, 12, 32, 52, HEADER_BYTES - 9, HEADER_BYTES - 8, HEADER_BYTES - 1):
            kind = "header" if position < HEADER_BYTES - 8 else "checksum"
            store.stats.failures[kind] = 0
            self.is_lost(server, store, flipped(value, position), kind)
            store.stats.failures[kind] = 0
        for position in (HEADER_BYTES, HEADER_BYTES + 2500, len(value) - 1):
            self.is_lost(server, store, flipped(value, position), "checksum")

    def test_remote_value_of_other_key_or_model_is_removed(self, server: RedisServer, store: RemoteStore) -> None:
        """Another key's, and another model's of the same shape."""
        other = RemoteStore(server.url, BLOCK, b"another")
        assert all(put(store, 0, 1, 2)) and all(put(other, 1))
        for value in (value_of(server, key_of(2)), value_of(server, KEY, b"another")):
            self.is_lost(server, store, value, "header")
        other.close()

    def test_damage_warnings_are_rate_limited_per_kind(
        self, server: RedisServer, store: RemoteStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        for value, now in ((b"x", 0.0), (b"x", WARN_S - 1), (bytes(HEADER_BYTES + BLOCK), 5.0), (b"x", WARN_S)):
            with server.client() as client:
                client.set(name_of(KEY), value)
            assert get(store, 1, now=now) == 0
        assert [record.getMessage().split("recomputing it: ")[1] for record in caplog.records] == [
            f"{KEY.hex()} (size, 1 so far)",
            f"{KEY.hex()} (header, 1 so far)",
            f"{KEY.hex()} (size, 3 so far)",
        ]
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
