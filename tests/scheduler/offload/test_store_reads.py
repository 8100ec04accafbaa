"""How often a request asks a store and reads from it before it computes its prefix (on the KV-echo model)."""

from __future__ import annotations

from baton.radix.tiers.block_orders import BlockFind
from baton.scheduler.memory.transfer_rates import TRY_AGAIN
from baton.scheduler.offload import MAX_READS
from baton.scheduler.outcome import FoundTokens
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.tier_rig import FakeBlocks

PROMPT = prompt_of(65, 1)


class MissingBlocks(FakeBlocks):
    """Its index has every block, and none can be read."""

    def contains(self, key: bytes) -> bool:
        return True


def blocks_of_prompt() -> FakeBlocks:
    blocks = FakeBlocks()
    harness = Harness(host_tokens=512, block_tokens=16, blocks=(blocks, FakeBlocks()))
    harness.add("first", PROMPT, 1)
    harness.run()
    assert len(blocks.blocks) == 4
    return blocks


def request_of(harness: Harness, rid: str) -> Request:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request


def test_store_with_missing_blocks_is_read_max_reads_times() -> None:
    harness = Harness(host_tokens=512, block_tokens=16, blocks=(MissingBlocks(), FakeBlocks()))
    harness.add("a", PROMPT, 2)
    harness.run()
    assert request_of(harness, "a").loading.reads == MAX_READS and harness.tiers is not None
    assert harness.tiers.disk is not None and harness.tiers.disk.counts.missed == 64 * MAX_READS
    assert harness.outcomes["a", 0].tokens == expected_output(PROMPT, 2)


def test_request_joining_shorter_read_reads_the_rest() -> None:
    harness = Harness(host_tokens=512, block_tokens=16, blocks=(blocks_of_prompt(), FakeBlocks()))
    harness.add("short", PROMPT[:33], 2)
    harness.add("long", PROMPT, 2)
    harness.run()
    short, long = request_of(harness, "short"), request_of(harness, "long")
    assert (short.loading.reads, long.loading.reads) == (1, 2) and short.found == FoundTokens(disk=32)
    assert long.found == FoundTokens(device=33, disk=31), "the other has brought its own to the device by then"
    assert harness.outcomes["long", 0].tokens == expected_output(PROMPT, 2)


def test_store_is_queried_once_per_request() -> None:
    harness = Harness(host_tokens=512, block_tokens=16)
    harness.add("a", PROMPT, 2)
    scheduler = harness.scheduler
    (find,) = scheduler.take_transfer_orders(0.0)
    assert isinstance(find, BlockFind) and request_of(harness, "a").status is RequestStatus.LOADING
    scheduler.finish_block_order(find.fence, 0, harness.now)
    assert request_of(harness, "a").status is RequestStatus.WAITING and scheduler.take_transfer_orders(0.0) == []
    harness.run()
    assert harness.outcomes["a", 0].tokens == expected_output(PROMPT, 2)


def test_store_slower_than_computing_is_retried_occasionally() -> None:
    harness = Harness(host_tokens=512, block_tokens=16, blocks=(blocks_of_prompt(), FakeBlocks()))
    harness.scheduler._fill_time.record_step(10_000, 0.0, 1.0)
    rate = harness.scheduler._offload._rates["disk"].loads
    rate.record_copy(9000, 1.0)
    for number in range(TRY_AGAIN):
        harness.add(f"{number}", PROMPT, 1)
    reads = [request_of(harness, f"{number}").loading.reads for number in range(TRY_AGAIN)]
    assert reads == [0] * (TRY_AGAIN - 1) + [1]
    rate.record_copy(1_000_000, 1.0)
    harness.add("fast", PROMPT, 1)
    assert request_of(harness, "fast").loading.reads == 1
    harness.run()
    assert all(outcome.tokens == expected_output(PROMPT, 1) for outcome in harness.outcomes.values())
