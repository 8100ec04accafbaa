"""A store that does not answer, on the KV-echo model."""

from __future__ import annotations

from baton.radix.tiers.block_orders import BlockFind, BlockRead
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.tier_rig import FakeBlocks

PROMPTS = [prompt_of(49, first) for first in range(3)]


def hanging() -> tuple[Harness, list[int]]:
    """A server that finds the KV of PROMPTS on disk, and one request that waits for it in vain; the fences of reads
    that hang."""
    blocks = FakeBlocks(), FakeBlocks()
    first = Harness(host_tokens=512, block_tokens=16, blocks=blocks)
    for number, prompt in enumerate(PROMPTS):
        first.add(f"{number}", prompt, 1)
    first.run()
    assert len(blocks[0].blocks) == 9
    harness = Harness(host_tokens=512, block_tokens=16, blocks=(blocks[0], FakeBlocks()))
    harness.add("first", PROMPTS[0], 2)
    orders = harness.scheduler.take_transfer_orders(harness.now)
    hung = [order.fence for order in orders if isinstance(order, BlockRead)]
    assert len(hung) == 1
    assert harness.tiers is not None
    harness.tiers.order([order for order in orders if not isinstance(order, BlockRead | BlockFind)])
    harness.step()
    assert request_of(harness, "first").status is RequestStatus.LOADING
    harness.now = 5.0
    harness.run()
    assert harness.outcomes["first", 0].tokens == expected_output(PROMPTS[0], 2)
    return harness, hung


def request_of(harness: Harness, rid: str) -> Request:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request


def test_hanging_store_delays_only_earlier_requests() -> None:
    harness, (hung,) = hanging()
    harness.add("second", PROMPTS[1], 2)
    harness.run()  # the remote store is asked, and has nothing
    assert request_of(harness, "second").loading.reads == 0
    assert harness.outcomes["second", 0].tokens == expected_output(PROMPTS[1], 2)
    harness.scheduler.finish_block_order(hung, 0, harness.now)
    harness.add("third", PROMPTS[2], 2)
    harness.run()
    assert harness.outcomes["third", 0].tokens == expected_output(PROMPTS[2], 2)
    assert request_of(harness, "third").found.disk == 48, "it answers again"
