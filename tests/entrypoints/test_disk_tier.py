"""A disk tier under a server that is killed while it writes: the next one starts warm, and says the same."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1600) for _ in range(600)] for _ in range(count)]


def disk_bytes(server: ServerUnderTest) -> float:
    line = re.search(r'^baton:tier_used_bytes\{.*tier="disk"\} (.*)$', server.client.get("/metrics").text, re.MULTILINE)
    return float(line[1]) if line else 0.0


def kill(server: ServerUnderTest) -> None:
    """All of its processes at once."""
    children = list(server.children().values())
    os.kill(server.process.pid, signal.SIGKILL)
    for child in children:
        child.kill()
    server.process.wait()


def test_server_killed_while_writing_restarts_with_a_warm_disk_cache(tmp_path: Path) -> None:
    flags = ["--max-total-tokens", "1024", "--host-cache-gb", "0.02"]
    flags += ["--disk-cache-path", str(tmp_path / "kv"), "--disk-cache-gb", "0.1"]
    shared = prompts(1, 1)[0]
    with ServerUnderTest(TOY, tmp_path, "--max-total-tokens", "1024", behaviour=None) as plain:
        plain.wait_ready()
        expected = [plain.generate(input_ids=p, sampling_params=GREEDY).json()["output_ids"] for p in prompts(1, 3)]
    for attempt in range(3):
        with ServerUnderTest(TOY, tmp_path, *flags, behaviour=None) as server:
            server.wait_ready()
            answer = server.generate(input_ids=shared, sampling_params=GREEDY).json()
            assert answer["output_ids"] == expected[0]
            found = answer["meta_info"]["cached_tokens_details"]
            if attempt:
                assert found == {"device": 0, "host": 0, "disk": 576, "remote": 0}, "9 blocks of 64"
            others = [server.generate(input_ids=p, sampling_params=GREEDY).json() for p in prompts(1, 3)[1:]]
            assert [other["output_ids"] for other in others] == expected[1:]
            size = server.client.get("/cache/tiers").json()["disk"]
            assert (
                size["total_gib"] == 0.1 and size["total_tokens"] == size["used_tokens"] + size["free_tokens"] > 10_000
            )
            assert not attempt or size["used_tokens"] >= 576, "what the server before it left counts"
            if not attempt:  # its first prompt must be on disk; what came last may still be on its way
                server.wait_until(lambda: "disk" in server.client.get("/metrics").text, "metrics of the disk")
                deadline = time.monotonic() + 60
                while (stored := server.client.get("/cache/tiers").json()["disk"]["stores"]["tokens"]) < 576:
                    assert time.monotonic() < deadline, stored
                    time.sleep(0.02)
                size = server.client.get("/cache/tiers").json()["disk"]
                assert size["used_tokens"] >= stored and size["used_gib"] > 576 * 2048 / 2**30
                server.wait_until(lambda: disk_bytes(server) > 0, "bytes on disk in /metrics")
            kill(server)
            assert "Traceback" not in server.log
