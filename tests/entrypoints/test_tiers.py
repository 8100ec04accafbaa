"""A host tier as a client sees it, through the Engine on the toy model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.entrypoints.engine import Engine

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
ONE = {"temperature": 0, "max_new_tokens": 1}
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
POOL = 1024


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model_path=TOY, device="cpu", dtype="float32", max_total_tokens=POOL, host_cache_ratio=4, max_leased_ratio=0.2
    ) as running:
        yield running


def flood(engine: Engine, seed: int) -> None:
    """Prompts that nobody has sent before take the whole pool."""
    rng = random.Random(seed)
    for _ in range(4):
        engine.generate(input_ids=[rng.randrange(5, 1000) for _ in range(500)], sampling_params=ONE)


def test_host_tier_hits_appear_in_meta_info_and_tier_report(engine: Engine) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(5, 1000) for _ in range(400)]
    parent = engine.generate(input_ids=prompt, sampling_params=GREEDY, rid="parent", retain_ttl=60)
    retained = parent["meta_info"]["retained"]
    assert "--max-leased-ratio" in retained["refused"] and (retained["tokens"], retained["tier"]) == (411, "host")
    none = {"device": 0, "host": 0, "disk": 0, "remote": 0}
    assert parent["meta_info"]["cached_tokens_details"] == none
    flood(engine, 2)
    child = engine.generate(sampling_params=GREEDY, continuation_of="parent", continuation_ids=[7, 8])
    meta = child["meta_info"]
    assert meta["cached_tokens"] == 411 and meta["cached_tokens_details"] == {**none, "host": 411}
    assert meta["continuation"]["path"] == "tier" and meta["continuation"]["recomputed_tokens"] == 1
    whole = [*prompt, *parent["output_ids"], 7, 8]
    again = engine.generate(input_ids=whole, sampling_params=GREEDY, cache_salt="elsewhere")
    assert child["output_ids"] == again["output_ids"]
    seen = engine.get_cache_tiers()
    host = seen["host"]
    assert (host["write_policy"], host["total_tokens"], seen["disk"]) == ("write_through", 4 * POOL, None)
    assert host["hit_tokens"] == 411 == host["loads"]["tokens"] and host["loads"]["seconds"] > 0
    assert host["stores"]["tokens"] > 411 and host["stores"]["tokens_per_s"] > 0
    assert host["total_gib"] == pytest.approx(4 * seen["device"]["total_gib"], rel=1e-3) and host["total_gib"] > 0
    assert seen["device"]["prefill_tokens_per_s"] > 0 and host["stores"]["failed_tokens"] == 0


def test_disk_folder_is_released_at_shutdown(tmp_path: Path) -> None:
    prompt = [random.Random(3).randrange(5, 1000) for _ in range(200)]
    answers = []
    for found in (0, 192):
        options = {"host_cache_gb": 0.02, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.1}
        with Engine(model_path=TOY, device="cpu", dtype="float32", max_total_tokens=POOL, **options) as engine:
            answers.append(engine.generate(input_ids=prompt, sampling_params=GREEDY))
            assert answers[-1]["meta_info"]["cached_tokens_details"]["disk"] == found
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_disk_folder_is_released_after_failed_start(tmp_path: Path) -> None:
    options = {"host_cache_gb": 0.02, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.1}
    with pytest.raises(ValueError, match="NO_SUCH_VARIABLE"):
        Engine(model_path=TOY, device="cpu", max_total_tokens=POOL, remote_cache_url="env:NO_SUCH_VARIABLE", **options)
    with Engine(model_path=TOY, device="cpu", max_total_tokens=POOL, **options) as engine:
        assert engine.get_cache_tiers()["disk"] is not None
