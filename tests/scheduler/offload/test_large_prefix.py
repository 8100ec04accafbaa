"""A prefix on disk that is larger than the host: as much is read as fits, the rest computed (on the KV-echo model)."""

from __future__ import annotations

import random

import pytest

from baton.radix.tiers.block_orders import BlockFind, BlockRead
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.tier_rig import FakeBlocks

PROMPT = prompt_of(161, 1)


@pytest.fixture
def blocks() -> tuple[FakeBlocks, FakeBlocks]:
    """PROMPT is on disk, in ten blocks."""
    blocks = FakeBlocks(), FakeBlocks()
    harness = Harness(host_tokens=512, block_tokens=16, blocks=blocks)
    harness.add("first", PROMPT, 1)
    harness.run()
    assert len(blocks[0].blocks) == 10
    return blocks[0], FakeBlocks()


def request_of(harness: Harness, rid: str) -> Request:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("host_tokens", "found"), [(64, 64), (128, 128), (256, 160)])
def test_prefix_beyond_host_capacity_is_computed(
    host_tokens: int, found: int, page_size: int, blocks: tuple[FakeBlocks, FakeBlocks]
) -> None:
    harness = Harness(host_tokens=host_tokens, block_tokens=16, blocks=blocks, page_size=page_size)
    harness.add("again", PROMPT, 3)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output(PROMPT, 3)
    assert request_of(harness, "again").found.disk == found == request_of(harness, "again").found.total
    assert harness.model.computed_tokens == 161 - found + 2


@pytest.mark.parametrize("seed", range(4))
def test_concurrent_requests_with_large_prefixes(seed: int, blocks: tuple[FakeBlocks, FakeBlocks]) -> None:
    rng = random.Random(seed)
    harness = Harness(host_tokens=96, block_tokens=16, blocks=blocks, tiers_rng=rng)
    prompts = [PROMPT[: rng.randrange(50, 161)] + prompt_of(20, number) for number in range(6)]
    for number, prompt in enumerate(prompts):
        harness.add(f"{number}", prompt, 3)
        harness.step()
    harness.run()
    for number, prompt in enumerate(prompts):
        assert harness.outcomes[f"{number}", 0].tokens == expected_output(prompt, 3)
    assert any(request_of(harness, f"{number}").found.disk for number in range(6))


def test_request_with_finished_read_does_not_wait_for_others(blocks: tuple[FakeBlocks, FakeBlocks]) -> None:
    harness = Harness(host_tokens=64, block_tokens=16, blocks=blocks)
    harness.add("again", PROMPT, 3)
    harness.add("unknown", prompt_of(40, 9), 3)
    read, find = harness.scheduler.take_transfer_orders(harness.now)
    assert isinstance(read, BlockRead) and isinstance(find, BlockFind) and harness.tiers is not None
    harness.tiers.order([read])  # nobody answers the question
    harness.step()
    assert request_of(harness, "again").status is RequestStatus.PREFILLING
    harness.scheduler.finish_block_order(find.fence, 0, harness.now)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output(PROMPT, 3)
