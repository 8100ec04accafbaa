"""KV cache events of a whole server, as a router gets them, and the example that follows one."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from baton.radix.block_events import AllCleared, BlocksStored
from baton.runtime.config import KVEventConfig, KVEventForm
from baton.runtime.kv_events.publisher import KVEventPublisher
from tests.doubles.event_follower import Follower, ask, following
from tests.doubles.server_under_test import ServerUnderTest, free_port

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TOY_MODEL = ROOT / "examples" / "toy_model"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
BLOCK = 16


@dataclass
class Served:
    server: ServerUnderTest
    endpoint: str
    replay: str

    def flags(self) -> list[str]:
        return ["--kv-events-endpoint", self.endpoint, "--kv-events-replay-endpoint", self.replay]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ["--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--host-cache-ratio", "1"]
    flags += ["--kv-events-endpoint", addresses[0], "--kv-events-replay-endpoint", addresses[1]]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield Served(running.wait_ready(), *addresses)


@pytest.fixture
def follower(served: Served) -> Iterator[Follower]:
    """Knows all that has happened so far, and hears of what will."""
    with following(served.endpoint, served.replay, BLOCK) as one:
        one.catch_up()
        while not one._socket.poll(50):  # its subscription takes a moment to arrive
            ids = np.random.default_rng(one.last).integers(5, 1000, BLOCK + 1).tolist()
            assert served.server.generate(input_ids=ids, sampling_params=GREEDY).status_code == 200
        yield one


def prompt(seed: int, count: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(5, 1000, count).tolist()


def test_computed_blocks_are_announced(served: Served, follower: Follower) -> None:
    ids = prompt(1)
    answer = served.server.generate(input_ids=ids, sampling_params=GREEDY).json()
    sequence = [*ids, *answer["output_ids"]][:48]
    data = np.array(sequence, dtype=np.int32).tobytes()
    mirror = follower.mirror

    def blocks() -> list[int]:
        """Those of the sequence, as far as they are known."""
        found, parent = list[int](), None
        for start in range(0, len(data), 4 * BLOCK):
            part = data[start : start + 4 * BLOCK]
            names = [name for name in mirror.ids if (mirror.parents[name], mirror.ids[name]) == (parent, part)]
            if not names:
                break
            [parent] = names
            found.append(parent)
        return found

    follower.receive_until(lambda: len(blocks()) == 3)
    assert {*blocks()} <= mirror.on["GPU"]
    follower.receive_until(lambda: {*blocks()} <= mirror.on.get("CPU_PINNED", set()))


def test_salt_is_not_revealed_in_events(served: Served, follower: Follower) -> None:
    ids = prompt(2)
    follower.receive_until(lambda: not follower._socket.poll(100))
    served.server.generate(input_ids=ids, sampling_params=GREEDY, cache_salt="a secret")
    scopes: set[str] = set()
    while not scopes:
        scopes = {event.scope for event in follower.receive() if isinstance(event, BlocksStored) and event.scope}
    served.server.generate(input_ids=ids, sampling_params=GREEDY)
    start = np.array(ids[:BLOCK], dtype=np.int32).tobytes()
    follower.receive_until(lambda: sum(part == start for part in follower.mirror.ids.values()) == 2)
    assert len(scopes) == 1 and len(*scopes) == 16
    assert all(b"secret" not in payload for _, payload in ask(served.replay, 0))


def test_flush_is_announced(served: Served, follower: Follower) -> None:
    server = served.server
    server.generate(input_ids=prompt(3), sampling_params=GREEDY)
    cleared = follower.mirror.cleared
    server.wait_until(lambda: server.client.post("/flush_cache").status_code == 200, "the worker is idle")
    follower.receive_until(lambda: follower.mirror.cleared > cleared)
    assert follower.mirror.on == {}


def test_missed_batches_are_replayed(served: Served, follower: Follower) -> None:
    for seed in range(10, 14):
        served.server.generate(input_ids=prompt(seed), sampling_params=GREEDY)
    follower.receive_until(lambda: not follower._socket.poll(500))
    with following(served.endpoint, served.replay, BLOCK) as late:
        late.catch_up()
        assert late.last >= follower.last and late.mirror.on == follower.mirror.on
    numbers = [number for number, _ in ask(served.replay, follower.last - 2)]
    assert numbers[:3] == [follower.last - 2, follower.last - 1, follower.last]


def test_first_batch_clears_blocks_of_an_earlier_server(served: Served) -> None:
    with following(served.endpoint, served.replay, BLOCK) as late:
        number, payload = ask(served.replay, 0)[0]
        assert late.apply(number, payload)[0] == AllCleared()
        assert 0 <= time.time() * 1000 - number < 24 * 3600 * 1000, "numbers begin at the time of the start"


def test_stalled_follower_does_not_block_publishing(served: Served) -> None:
    with zmq.Context.instance().socket(zmq.SUB) as deaf:
        deaf.linger, deaf.rcvhwm = 0, 1
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.connect(served.endpoint)
        assert deaf.poll(10) == 0
        for seed in range(20, 30):
            assert served.server.generate(input_ids=prompt(seed, 300), sampling_params=GREEDY).status_code == 200


def test_server_info_reports_kv_event_endpoints(served: Served) -> None:
    info = served.server.client.get("/server_info").json()
    told = {"endpoint": served.endpoint, "replay_endpoint": served.replay, "topic": "", "block_size": BLOCK}
    assert info["internal_states"][0]["kv_events"] == told | {"tiers": "all", "format": "maps"}
    assert info["kv_events_endpoint"] == served.endpoint


def test_second_server_on_the_same_endpoint_is_refused(served: Served, tmp_path: Path) -> None:
    flags = ["--max-total-tokens", "1024", "--device", "cpu", *served.flags()]
    with ServerUnderTest(TOY_MODEL, tmp_path, *flags, behaviour=None) as second:
        assert second.process.wait(60) != 0
        assert f"--kv-events-endpoint {served.endpoint}: another process listens there" in second.log


def test_kv_events_example_reports_cached_prefix(served: Served) -> None:
    ids = prompt(4, 70)
    answer = served.server.generate(input_ids=ids, sampling_params=GREEDY).json()
    assert answer["meta_info"]["cached_tokens"] == 0
    told = ",".join(map(str, [*ids, 1, 2, 3]))

    def shown() -> str:
        command = [sys.executable, str(ROOT / "examples" / "kv_events.py"), "--endpoint", served.endpoint]
        options = ["--replay", served.replay, "--hit", told]
        return subprocess.run([*command, *options], capture_output=True, text=True, check=True, env=os.environ).stdout

    served.server.wait_until(
        lambda: shown() == "of 73 tokens are cached, by tier: {'GPU': 64}\n", "the prompt is announced"
    )


@pytest.mark.parametrize("form", ["maps", "arrays"])
@pytest.mark.parametrize("restarted", [1_700_000_010.0, 1_600_000_000.0])
def test_kv_events_example_follows_a_restarted_server(restarted: float, form: KVEventForm) -> None:
    """Also where the clock was set back meanwhile. What an answer had already is passed over."""
    config = KVEventConfig(
        kv_events_endpoint="tcp://127.0.0.1:0",
        kv_events_replay_endpoint="tcp://127.0.0.1:0",
        kv_events_block_size=1,
        kv_events_format=form,
    )
    example = runpy.run_path(str(ROOT / "examples" / "kv_events.py"))
    follower = example["Follower"](config.kv_events_endpoint, config.kv_events_replay_endpoint, "")
    mirror, asked = example["Mirror"](), list[int]()

    class Ended(Exception):
        """Nothing more is heard."""

    def live() -> Iterator[list[bytes]]:
        """What is heard of two servers, one after the other; first of all nothing, but the first one is there."""
        for start, names in ((1_700_000_000.0, range(1, 21)), (restarted, range(101, 111))):
            publisher = KVEventPublisher(config, 1, lambda start=start: start)
            with contextlib.closing(publisher):
                follower._replay = publisher.replay_endpoint
                for name in names:
                    publisher._send([BlocksStored("GPU", [name], None, name.to_bytes(4, "little"))])
                if start != restarted:
                    yield []
                for number, payload in ask(
                    publisher.replay_endpoint, publisher._next - 5, b"" if form == "maps" else None
                ):
                    yield [b"", number.to_bytes(8, "big"), payload]
                assert set(mirror.blocks) == set(names)
        raise Ended

    heard, missed = live(), follower.missed
    next(heard)
    follower._socket.close(linger=0)
    follower._socket = SimpleNamespace(recv_multipart=lambda: next(heard))
    follower.missed = lambda: (asked.append(follower.last), missed())[1]
    with pytest.raises(Ended):
        for events in follower.batches():
            for event in events:
                mirror.apply(event)
    assert len(asked) == 3, "at first, once because an answer may have had the first batch already, and of the second"
