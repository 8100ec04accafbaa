"""Followers over real sockets: the events they receive, miss and get again; a slow one delays nothing."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from baton.radix.block_events import BlockEvent, BlocksRemoved, BlocksStored
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import KVEventConfig, KVEventForm
from baton.runtime.kv_events import publisher as publisher_module
from baton.runtime.kv_events import replay as replay_module
from baton.runtime.kv_events.publisher import KVEventPublisher
from tests.doubles import plain_msgpack
from tests.doubles.block_mirror import BlockMirror, blocks_in_tree
from tests.doubles.cache_rig import CacheRig
from tests.doubles.event_follower import END, Follower, ask, following, read_batch
from tests.doubles.host_rig import TierRig, tokens
from tests.doubles.server_under_test import free_port

FIRST = 1000
"""The number of the first batch of a server that starts a second after 1970."""


@contextlib.contextmanager
def publishing(config: KVEventConfig, rig: CacheRig | None = None, started: float = 1.0) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(config, rig.cache.page_size if rig is not None else 1, lambda: started)
    try:
        if rig is not None:
            publisher.watch_cache(rig.cache, rig.tier if isinstance(rig, TierRig) else None)
        yield publisher
    finally:
        publisher.close()


def on_ports(block_tokens: int = 0, topic: str = "", form: KVEventForm = "maps") -> KVEventConfig:
    """Port 0 takes a free one."""
    return KVEventConfig(
        kv_events_endpoint="tcp://127.0.0.1:0",
        kv_events_replay_endpoint="tcp://127.0.0.1:0",
        kv_events_block_size=block_tokens,
        kv_events_topic=topic,
        kv_events_format=form,
    )


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1000, count).astype(np.int32)


def test_follower_mirrors_published_events() -> None:
    rig = TierRig(num_tokens=512, host_tokens=256)
    with (
        publishing(on_ports(4, "kv@pod"), rig) as publisher,
        following(publisher.endpoint, publisher.replay_endpoint, 4, b"kv@pod") as follower,
    ):
        rng = np.random.default_rng(1)
        while follower.last < 0:  # a subscription takes a moment to arrive
            rig.insert(random_ids(rng, 9))
            publisher.publish_events()
            with contextlib.suppress(AssertionError):
                follower.receive(50)
        for number in range(40):
            rig.insert(random_ids(rng, 40), "salt" if number % 3 == 0 else "")
            rig.store_all()
            publisher.publish_events()
        publisher.publish_events()  # nothing happened: no batch
        follower.receive_until(lambda: follower.last == publisher._next - 1)
        assert follower.mirror.on == blocks_in_tree(rig.cache, 4) and follower.mirror.cleared == 1
        assert rig.cache.reset()
        publisher.publish_events()
        follower.receive()
        assert follower.mirror.on == {} and follower.mirror.cleared == 2
        assert publisher.describe() == {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": "kv@pod",
            "block_size": 4,
            "tiers": "all",
            "format": "maps",
        }


def test_missed_event_batches_are_replayed() -> None:
    rig = CacheRig(num_tokens=2048)
    with publishing(on_ports(1), rig) as publisher:
        rng = np.random.default_rng(2)
        for _ in range(20):
            rig.insert(random_ids(rng, 30))
            publisher.publish_events()
        numbers = [number for number, _ in ask(publisher.replay_endpoint, FIRST + 5)]
        assert numbers == list(range(FIRST + 5, FIRST + 21)), "20 batches, and the first, which clears all"
        mirror = BlockMirror(1)
        for _, payload in ask(publisher.replay_endpoint, 0):
            mirror.apply(read_batch(payload, 1))
        assert mirror.on == {"GPU": blocks_in_tree(rig.cache, 1)["GPU"]}
        assert ask(publisher.replay_endpoint, FIRST + 21) == []


@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_replay_answers_as_maps_or_arrays(form: KVEventForm) -> None:
    """With maps the topic comes again, as vLLM 0.33 answers; with arrays it does not, as servers of that time did."""
    rig = CacheRig(num_tokens=64)
    with publishing(on_ports(1, "kv@pod", form), rig) as publisher:
        rig.insert(np.arange(6, dtype=np.int32))
        publisher.publish_events()
        answers = ask(publisher.replay_endpoint, 0, b"kv@pod" if form == "maps" else None)
        mirror = BlockMirror(1)
        for _, payload in answers:
            assert isinstance(plain_msgpack.read(payload)[1][0], dict if form == "maps" else list)
            mirror.apply(read_batch(payload, 1))
        assert mirror.on == {"GPU": blocks_in_tree(rig.cache, 1)["GPU"]} and len(mirror.on["GPU"]) == 6


def test_replay_serves_req_sockets() -> None:
    with publishing(on_ports()) as publisher, zmq.Context.instance().socket(zmq.REQ) as req:
        req.linger = 0
        req.connect(publisher.replay_endpoint)
        req.send(bytes(8))
        assert req.poll(20_000)
        topic, number, payload = req.recv_multipart()
        assert topic == b"" and number == FIRST.to_bytes(8, "big") and len(read_batch(payload, 16)) == 1


def test_malformed_replay_requests_are_ignored() -> None:
    with publishing(on_ports()) as publisher, zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"", b"x" * 100], [b"a", b"b", bytes(8)], [b"", bytes(8), b""]):
            dealer.send_multipart(frames)
        dealer.send_multipart([bytes(8)])  # without the empty frame, so the answer has none
        assert dealer.poll(20_000)
        assert dealer.recv_multipart()[1] == FIRST.to_bytes(8, "big") and dealer.recv_multipart() == [b"", END, b""]
        with zmq.Context.instance().socket(zmq.DEALER) as other:
            other.linger = 0
            other.connect(publisher.replay_endpoint)
            other.send_multipart([b"", b"x" * 10_000])  # too long for any request: its connection ends
        assert len(ask(publisher.replay_endpoint, 0)) == 1


def long_events(number: int) -> list[BlockEvent]:
    """Blocks of 1000 tokens, some 30 KB on the wire, after which what was there before them is gone."""
    first = 1 + number * 10
    stored = BlocksStored("GPU", list(range(first, first + 10)), None, tokens(10_000).tobytes())
    return [*([BlocksRemoved("GPU", list(range(first - 10, first))[::-1])] if number else []), stored]


def test_a_follower_that_never_reads_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_UNREAD", 5)
    with (
        publishing(on_ports(1000)) as publisher,
        following(publisher.endpoint, publisher.replay_endpoint, 1000, slow=True) as follower,
    ):
        numbers = itertools.count()
        while not follower._socket.poll(20):
            publisher._send(long_events(next(numbers)))
        for _ in range(250):  # some 7 MB: more than the sockets hold
            publisher._send(long_events(next(numbers)))
        follower.receive_until(lambda: not follower._socket.poll(200))
        assert 0 < follower.heard < 250
        follower.catch_up()
        assert follower.last == publisher._next - 1
        [stored] = [event for event in long_events(next(numbers) - 1) if isinstance(event, BlocksStored)]
        assert follower.mirror.on == {"GPU": set(stored.hashes)}


def test_stalled_replay_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MAX_UNREAD_ANSWERS", 2)
    monkeypatch.setattr(replay_module, "PATIENCE_MS", 50)
    with publishing(on_ports(1000)) as publisher, zmq.Context.instance().socket(zmq.DEALER) as dealer:
        for number in range(800):
            publisher._send(long_events(number))
        dealer.linger, dealer.rcvhwm, dealer.rcvbuf = 0, 1, 4096
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", (publisher._next - 700).to_bytes(8, "big")])
        assert dealer.poll(20_000)
        assert ask(publisher.replay_endpoint, publisher._next) == []  # the next follower's turn
        answers = 0
        while dealer.poll(500):
            answers += 1
            assert dealer.recv_multipart()[2] != END, "an answer that is not whole has no end"
        assert 0 < answers < 700


def test_long_prompt_events_are_split_into_batches() -> None:
    rig = CacheRig(num_tokens=40_000, context=40_000)
    with publishing(on_ports(16), rig) as publisher:
        announcer = publisher._announcer
        assert announcer is not None
        ids = tokens(40_000)
        rig.cache.tree.add_leaf(rig.cache.tree.root, "", ids.tobytes(), ids, 0)
        announcer.node_stored(next(rig.cache.tree.nodes()))
        publisher.publish_events()
        batches = ask(publisher.replay_endpoint, FIRST + 1)
        assert len(batches) == 3 and all(len(payload) < 100_000 for _, payload in batches)
        mirror = BlockMirror(16)
        for _, payload in batches:
            mirror.apply(read_batch(payload, 16))
        assert len(mirror.on["GPU"]) == 2500


@contextlib.contextmanager
def publishing_again(config: KVEventConfig, rig: CacheRig, started: float) -> Iterator[KVEventPublisher]:
    """On the addresses of a publisher that was closed: ZMQ's own thread takes a moment to let them go."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.ExitStack() as stack:
            try:
                publisher = stack.enter_context(publishing(config, rig, started))
            except ModelLoadError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
                continue
            yield publisher
            return


def publish_until_heard(publisher: KVEventPublisher, rig: CacheRig, follower: Follower, seed: int, least: int) -> None:
    """At least so many batches, until the follower has the last one."""
    rng = np.random.default_rng(seed)
    for _ in range(least):
        rig.insert(random_ids(rng, 9))
        publisher.publish_events()
    while follower.last != publisher._next - 1:
        if follower._socket.poll(20):
            follower.receive()
        else:  # its connection takes a moment
            rig.insert(random_ids(rng, 9))
            publisher.publish_events()


@pytest.mark.parametrize(("before", "after"), [(40, 1), (1, 40), (5, 5)])
def test_a_follower_continues_after_a_restart_of_the_server(before: int, after: int) -> None:
    config = KVEventConfig(
        kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}",
        kv_events_replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
        kv_events_block_size=4,
    )
    first, second = CacheRig(num_tokens=2048), CacheRig(num_tokens=2048)
    with following(config.kv_events_endpoint, config.kv_events_replay_endpoint, 4) as follower:
        with publishing(config, first, started=1_700_000_000.0) as publisher:
            publish_until_heard(publisher, first, follower, 1, before)
            old = follower.last
            assert old >= 1_700_000_000_000
        with publishing_again(config, second, started=1_700_000_010.0) as publisher:
            publish_until_heard(publisher, second, follower, 2, after)
            assert follower.last > old and follower.last < 2**63
            there = blocks_in_tree(second.cache, 4)["GPU"]
            assert follower.mirror.on == {"GPU": there} and there != blocks_in_tree(first.cache, 4)["GPU"]


def test_a_request_that_fails_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing(on_ports()) as publisher, zmq.Context.instance().socket(zmq.DEALER) as dealer:
        assert publisher._past is not None and publisher._replay is not None
        since = publisher._past.batches_since
        monkeypatch.setattr(publisher._past, "batches_since", lambda first: since(first) if first else 1 / 0)
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        for first in (0, 0, FIRST):
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
        assert dealer.poll(20_000)
        assert dealer.recv_multipart()[2] == FIRST.to_bytes(8, "big"), "the next asker has its turn"
        assert publisher._replay.failed == 2 and caplog.text.count("earlier KV cache events failed") == 1


def test_no_batches_are_kept_without_replay_endpoint() -> None:
    config = KVEventConfig(kv_events_endpoint="tcp://127.0.0.1:0")
    before = threading.active_count()
    with publishing(config) as publisher:
        assert publisher.replay_endpoint == "" and publisher._past is None and threading.active_count() == before


def test_event_address_in_use_is_refused(tmp_path: Path) -> None:
    port = free_port()
    for address in (f"tcp://127.0.0.1:{port}", f"ipc://{tmp_path}/e"):
        config = KVEventConfig(kv_events_endpoint=address)
        with publishing(config):
            with pytest.raises(ModelLoadError, match=r"--kv-events-endpoint .* give each an address of its own"):
                KVEventPublisher(config, 1)
            replay = KVEventConfig(kv_events_endpoint="tcp://127.0.0.1:0", kv_events_replay_endpoint=address)
            with pytest.raises(ModelLoadError, match=r"--kv-events-replay-endpoint .* give each an address"):
                KVEventPublisher(replay, 1)


def test_nonlocal_event_address_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="this machine has no such address"):
        KVEventPublisher(KVEventConfig(kv_events_endpoint="tcp://192.0.2.1:5557"), 1)


def test_public_event_address_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with publishing(KVEventConfig(kv_events_endpoint="tcp://0.0.0.0:0")):
        assert "reads the token ids of all prompts" in caplog.text
    caplog.clear()
    with publishing(KVEventConfig(kv_events_endpoint="tcp://127.0.0.1:0")):
        assert caplog.text == ""
