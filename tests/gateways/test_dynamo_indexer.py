"""Dynamo's indexer follows a radix tree by its events, and knows what the tree holds: hashes, tokens, tiers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import KVEventConfig, KVEventForm
from baton.runtime.kv_events.publisher import KVEventPublisher
from tests.doubles.block_mirror import BlockMirror, blocks_in_tree
from tests.doubles.event_follower import ask, read_batch
from tests.doubles.foreign_envs import env_python
from tests.doubles.host_rig import TierRig
from tests.doubles.server_under_test import free_port

pytestmark = [pytest.mark.gateways, pytest.mark.slow]

BLOCK = 16
TIERS = {"device": "GPU", "host_pinned": "CPU_PINNED"}
HASHES = "import json, sys; from dynamo.llm import compute_block_hash_for_seq as hashes; "
HASHES += f"print(json.dumps([hashes(ids, {BLOCK}) for ids in json.load(sys.stdin)]))"


class Indexer:
    def __init__(self, folder: Path) -> None:
        python, port = env_python("dynamo"), free_port()
        self._log = folder / "indexer.log"
        with self._log.open("wb") as log:
            command = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def __enter__(self) -> Indexer:
        self.wait_until(lambda: self.client.get("/health").status_code == 200)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if condition():
                    return
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.05)

    def follow(self, publisher: KVEventPublisher) -> None:
        told = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "block_size": BLOCK}
        assert self.client.post("/register", json={"instance_id": 1, "model_name": "toy", **told}).status_code == 201

    def blocks(self) -> dict[str, dict[int, int]]:
        """By tier: the hash of each block, and Dynamo's hash of its tokens."""
        found: dict[str, dict[int, int]] = {}
        for event in self.client.get("/dump").json().get("toy:default", {}).get("events", ()):
            tier = found.setdefault(TIERS[event["storage_tier"]], {})
            tier |= {block["block_hash"]: block["tokens_hash"] for block in event["event"]["data"]["stored"]["blocks"]}
        return found

    def hit(self, ids: list[int]) -> dict[str, Any]:
        found = self.client.post("/query", json={"token_ids": ids, "model_name": "toy"}).json()["instances"]
        return found.get("1", {"longest_matched": 0})


def token_hashes(blocks: dict[int, bytes]) -> dict[int, int]:
    """The same of each block as Dynamo hashes its tokens."""
    ids = [np.frombuffer(part, dtype=np.int32).tolist() for part in blocks.values()]
    ran = subprocess.run([env_python("dynamo"), "-c", HASHES], input=json.dumps(ids), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return {name: hashed for name, [hashed] in zip(blocks, json.loads(ran.stdout), strict=True)}


def opened(config: KVEventConfig, started: float) -> KVEventPublisher:
    """ZeroMQ frees the address of a closed publisher in a thread of its own, later on a busy machine."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return KVEventPublisher(config, 1, lambda: started)
        except ModelLoadError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def published(config: KVEventConfig, rig: TierRig, started: float) -> Iterator[KVEventPublisher]:
    with contextlib.closing(opened(config, started)) as publisher:
        publisher.watch_cache(rig.cache, rig.tier)
        yield publisher


def known_tokens(publisher: KVEventPublisher, form: KVEventForm) -> dict[int, bytes]:
    """The tokens of each block there is, by its hash."""
    mirror = BlockMirror(BLOCK)
    for _, payload in ask(publisher.replay_endpoint, 0, b"" if form == "maps" else None):
        mirror.apply(read_batch(payload, BLOCK))
    there = set.union(set(), *mirror.on.values())
    return {name: ids for name, ids in mirror.ids.items() if name in there}


@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_dynamo_indexer_mirrors_the_radix_tree(form: KVEventForm, tmp_path: Path) -> None:
    rng = np.random.default_rng(30)
    config = KVEventConfig(
        kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}",
        kv_events_replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
        kv_events_block_size=BLOCK,
        kv_events_format=form,
    )

    def sequence(count: int = 100) -> np.ndarray:
        return rng.integers(0, 1000, count).astype(np.int32)

    with Indexer(tmp_path) as indexer:
        rig = TierRig(num_tokens=2048, host_tokens=1024)
        with published(config, rig, 1000.0) as publisher:
            early = sequence()
            rig.insert(early)  # before the indexer follows: it has to ask for this
            publisher.publish_events()
            indexer.follow(publisher)
            indexer.wait_until(lambda: '"active"' in indexer.client.get("/workers").text)
            time.sleep(0.5)  # until its subscription has arrived

            def insert_more() -> None:
                rig.insert(sequence(40))
                publisher.publish_events()

            def is_equal() -> bool:
                found, tree = indexer.blocks(), blocks_in_tree(rig.cache, BLOCK)
                return {tier: set(found.get(tier, ())) for tier in tree} == tree

            insert_more()  # a follower hears of a gap by the next batch
            indexer.wait_until(is_equal)
            assert indexer.hit(early.tolist())["gpu"] == 96
            rig.store_all()
            rig.cache.evict(60)
            publisher.publish_events()
            indexer.wait_until(is_equal)
            found = indexer.blocks()
            assert set(found) == {"GPU", "CPU_PINNED"}
            expected = token_hashes(known_tokens(publisher, form))
            for blocks in found.values():
                assert blocks == {name: expected[name] for name in blocks}
        again = TierRig(num_tokens=512, host_tokens=256)
        with published(config, again, 2000.0) as publisher:  # the server has started anew
            rig = again
            time.sleep(1)  # it connects again by itself, and nothing tells when
            insert_more()
            indexer.wait_until(is_equal)
            assert indexer.hit(early.tolist())["longest_matched"] == 0
