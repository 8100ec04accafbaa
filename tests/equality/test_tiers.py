"""What came back from the host says what was computed, token for token, whatever had pushed it off the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.memory_pool.stores.host_state_pool import HostStatePool
from baton.runtime.config import TierConfig
from baton.runtime.kv_transfer.transfer import TransferError
from baton.scheduler import offload
from baton.scheduler.request import FoundTokens
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items
from tests.doubles.redis_servers import RedisServer
from tests.doubles.tiny_models import save_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 17


def flood(worker: LocalWorker, tokens: int, first: int) -> None:
    """Prompts that nobody has sent before, until they have taken the whole pool."""
    rng = np.random.default_rng(first)
    for _ in range(0, tokens, 150):
        worker.generate([rng.integers(5, 200, 150).tolist()], SamplingParams(max_new_tokens=1, temperature=0.0))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "max_total_tokens": 800},
        {"page_size": 16, "max_total_tokens": 800, "overlap": True, "chunked_prefill_size": 33},
        {"page_size": 64, "max_total_tokens": 1280, "enable_mixed_chunk": True},
    ],
    ids=str,
)
def test_kv_reloaded_from_host_gives_equal_outputs(options: dict[str, Any], policy: Any) -> None:
    items = some_items(SEED)
    selective = policy == "write_through_selective"
    if selective:  # what is not hit before it goes is not stored
        options = {**options, "max_total_tokens": 8 * options["max_total_tokens"]}
    plain = LocalWorker(TOY, disable_radix_cache=True)
    tiers = LocalWorker(TOY, tiers=TierConfig(host_cache_ratio=4.0, host_write_policy=policy), **options)
    tier = tiers.scheduler._memory.tier
    assert tier is not None
    expected = plain.run(mixed_requests(SEED), items=items)
    for turn in range(3):
        for _ in range(2 if selective else 1):
            got = tiers.run(mixed_requests(SEED), items=items)
            assert_same_answers(mixed_requests(SEED), expected, got)
            tiers.end_copies()
        flood(tiers, options["max_total_tokens"], turn)
    assert tier.counts.loaded > 300 and tier.counts.failed_loads == 0, tier.counts


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next", "mamba2"])
def hybrid(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_reference(request.param, folder)
    return folder


def small_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 131, count).tolist()


GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("write_through", {"page_size": 1, "max_total_tokens": 400, "max_states": 4}),
        (
            "write_back",
            {"page_size": 16, "max_total_tokens": 4096, "max_states": 4, "overlap": True, "chunked_prefill_size": 33},
        ),
    ],
)
def test_states_reloaded_from_host_give_equal_outputs(hybrid: Path, options: dict[str, Any], policy: Any) -> None:
    """Conversations that wait while others take their states, or all of the pool."""
    plain = LocalWorker(hybrid, disable_radix_cache=True)
    tiers = LocalWorker(hybrid, tiers=TierConfig(host_cache_ratio=8.0, host_write_policy=policy), **options)
    host = tiers.scheduler._memory.tier
    assert host is not None
    talks = [small_ids(40 + 7 * number, number) for number in range(4)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            (answer,) = tiers.generate([talk], GREEDY)
            assert answer.tokens == plain.generate([talk], GREEDY)[0].tokens
            tiers.end_copies()
            assert turn == 0 or answer.cached_tokens >= len(talk) - 6 - 2 * options["page_size"]
            talks[number] = [*talk, *answer.tokens, *small_ids(5, 100 * turn + number)]
        for noise in range(8):
            tiers.generate([small_ids(60, 1000 + 10 * turn + noise)], GREEDY)
            tiers.end_copies()
    tiers.scheduler.check_invariants()
    tiers.close()
    assert host.counts.loaded_states >= 3 and host.counts.failed_loads == 0, host.counts


def test_states_that_cannot_be_copied_are_computed_again(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing load ends the request that waits for it; the next time its prefix is computed."""
    tiers = LocalWorker(hybrid, tiers=TierConfig(host_cache_ratio=8.0))
    memory, talk = tiers.scheduler._memory, small_ids(50, 1)
    (first,) = tiers.generate([talk], GREEDY)
    tiers.end_copies()
    memory.leases.break_all()
    assert memory.cache.evict_states(8, kept_too=True)
    with monkeypatch.context() as broken:
        broken.setattr(HostStatePool, "load", lambda *_: 1 / 0)
        with pytest.raises(TransferError):
            tiers.generate([[*talk, *first.tokens, 5]], GREEDY)
        (event,) = tiers.scheduler.fail_step(0.0, "a load failed")
        assert event.finish is not None and event.finish.type == "abort"
        tiers.end_copies()
    tiers.scheduler.check_invariants()
    (again,) = tiers.generate([[*talk, *first.tokens, 5]], GREEDY)
    assert again.tokens == LocalWorker(hybrid).generate([[*talk, *first.tokens, 5]], GREEDY)[0].tokens
    tiers.close()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    return [rng.integers(5, 1600, count).tolist() for count in (700, 300, 129)]


def serve(tiers: TierConfig, **options: Any) -> tuple[list[list[int]], list[FoundTokens]]:
    """Start a worker, answer the prompts, end it: the answers, and where the prompts' KV was found."""
    worker = LocalWorker(TOY, tiers=tiers, **options)
    answers = worker.generate(prompts(), SamplingParams(max_new_tokens=12, temperature=0.0))
    worker.end_copies()
    worker.close()
    return [answer.tokens for answer in answers], [answer.found for answer in answers]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_kv_reloaded_from_disk_gives_equal_outputs(page_size: int, tmp_path: Path) -> None:
    """The second worker finds what the first has left; the third, with the dtype changed, must not."""
    tiers = TierConfig(host_cache_gb=0.05, disk_cache_path=str(tmp_path), disk_cache_gb=0.5)
    first, nothing = serve(tiers, page_size=page_size)
    second, found = serve(tiers, page_size=page_size)
    assert first == second and found == [FoundTokens(disk=count) for count in (640, 256, 128)]
    _, other = serve(tiers, page_size=page_size, model_options={"dtype": "bfloat16"})
    assert nothing == other == [FoundTokens()] * 3


def test_kv_reloaded_from_remote_store_gives_equal_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers share one; what came from there is on the disk of the second then."""
    monkeypatch.setattr(offload, "ASKING_S", 20.0)  # on a busy machine the steps of the prompts before take longer
    server = RedisServer()
    try:
        first, nothing = serve(TierConfig(host_cache_gb=0.05, remote_cache_url=server.url))
        on_disk = TierConfig(host_cache_gb=0.05, disk_cache_path=str(tmp_path), disk_cache_gb=0.5)
        second, found = serve(replace(on_disk, remote_cache_url=server.url))
    finally:
        server.stop()
    assert nothing == [FoundTokens()] * 3
    assert first == second and found == [FoundTokens(remote=count) for count in (640, 256, 128)]
    third, found = serve(on_disk)
    assert first == third and found == [FoundTokens(disk=count) for count in (640, 256, 128)]


def continue_after_restarts(
    model: Path, tiers: TierConfig, before_second: Callable[[], None] = lambda: None, **options: Any
) -> list[tuple[int, FoundTokens]]:
    """A conversation of three turns, each of which meets a new worker: (tokens with a state, tokens found) of each."""
    plain = LocalWorker(model, disable_radix_cache=True)
    talk, computed, found = small_ids(150, 3), 0, []
    for turn in range(3):
        if turn == 1:
            before_second()
        worker = LocalWorker(model, tiers=tiers, **options)
        (answer,) = worker.generate([talk], GREEDY)
        worker.end_copies()
        worker.scheduler.check_invariants()
        worker.close()
        assert answer.tokens == plain.generate([talk], GREEDY)[0].tokens
        found.append((computed, answer.found))
        computed = len(talk) + len(answer.tokens) - 1  # the last token has not been computed
        talk = [*talk, *answer.tokens, *small_ids(5, 100 + turn)]
    return found


@pytest.mark.parametrize(("page_size", "policy"), [(1, "write_through"), (16, "write_back"), (64, "write_through")])
def test_conversation_continues_from_disk_after_restarts(
    hybrid: Path, page_size: int, policy: Any, tmp_path: Path
) -> None:
    """A turn computes no token of those before it, but for the rest of a page."""
    tiers = TierConfig(host_cache_ratio=4.0, host_write_policy=policy, disk_cache_path=str(tmp_path), disk_cache_gb=0.5)
    for computed, found in continue_after_restarts(hybrid, tiers, page_size=page_size):
        assert found == FoundTokens(disk=computed // page_size * page_size)
    other = LocalWorker(hybrid, tiers=tiers, page_size=page_size, model_options={"dtype": "bfloat16"})
    assert other.generate([[*small_ids(150, 3), 1]], GREEDY)[0].found == FoundTokens(), "states of another dtype"
    other.close()


def test_conversation_continues_from_remote_store_after_restarts(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "ASKING_S", 20.0)  # on a busy machine
    server = RedisServer()
    try:
        tiers = TierConfig(host_cache_ratio=4.0, remote_cache_url=server.url)
        for computed, found in continue_after_restarts(hybrid, tiers):
            assert found == FoundTokens(remote=computed)
    finally:
        server.stop()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_snapshot_is_computed_again(hybrid: Path, damage: str, tmp_path: Path) -> None:
    """By the turn that finds it damaged; the next one finds what that has left."""

    def do_damage() -> None:
        sizes = {file: file.stat().st_size for file in tmp_path.glob("*/*/*")}
        (snapshot,) = [file for file, size in sizes.items() if list(sizes.values()).count(size) == 1]
        content = bytearray(snapshot.read_bytes())
        content[len(content) // 2] ^= 1
        snapshot.write_bytes(content[:-1] if damage == "cut" else content)
        if damage == "gone":
            snapshot.unlink()

    tiers = TierConfig(host_cache_ratio=4.0, disk_cache_path=str(tmp_path), disk_cache_gb=0.5)
    _, (_, nothing), (computed, found) = continue_after_restarts(hybrid, tiers, do_damage)
    assert nothing == FoundTokens() and found == FoundTokens(disk=computed)
