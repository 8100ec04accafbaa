"""Settings of events that contradict one another are refused by name."""

from __future__ import annotations

import pytest

from baton.runtime.config import KVEventConfig
from baton.runtime.kv_events.endpoints import event_block_tokens, is_private, refusal

HERE = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_events_endpoint": "5557"}, "--kv-events-endpoint is '5557'; it takes tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": "tcp://127.0.0.1"}, "it takes tcp://"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:99999"}, "it takes tcp://"),
        ({"kv_events_endpoint": "tcp://:5557"}, "it takes tcp://"),
        ({"kv_events_endpoint": "inproc://x"}, "it takes tcp://"),
        ({"kv_events_endpoint": "ipc://"}, "it takes tcp://"),
        ({"kv_events_endpoint": HERE, "kv_events_replay_endpoint": "x"}, "--kv-events-replay-endpoint is 'x'"),
        ({"kv_events_endpoint": HERE, "kv_events_replay_endpoint": HERE}, "give it an address of its own"),
        ({"kv_events_endpoint": HERE, "kv_events_block_size": 24}, "a multiple of --page-size 16"),
        ({"kv_events_endpoint": HERE, "kv_events_block_size": -16}, "--kv-events-block-size is -16"),
        ({"kv_events_endpoint": HERE, "kv_events_buffer_mb": 0}, "--kv-events-buffer-mb is 0; use 1 or more"),
        ({"kv_events_replay_endpoint": HERE}, "--kv-events-replay-endpoint is given without --kv-events-endpoint"),
        ({"kv_events_tiers": "device"}, "--kv-events-tiers is given without"),
        ({"kv_events_topic": "kv"}, "--kv-events-topic is given without"),
    ],
)
def test_refusals(options: dict, why: str) -> None:
    refused = refusal(KVEventConfig(**options), 16, cached=True)
    assert refused is not None and why in refused


def test_valid_event_endpoints_are_accepted() -> None:
    for address in (HERE, "tcp://*:0", "tcp://[::1]:5557", "ipc:///run/baton/events"):
        assert refusal(KVEventConfig(kv_events_endpoint=address), 16, cached=True) is None
    assert refusal(KVEventConfig(), 16, cached=False) is None
    refused = refusal(KVEventConfig(kv_events_endpoint=HERE), 16, cached=False)
    assert refused is not None and "--disable-radix-cache" in refused


def test_is_private_detects_local_addresses() -> None:
    assert all(map(is_private, (HERE, "tcp://[::1]:1", "tcp://localhost:1", "ipc:///x", "tcp://127.3.2.1:9")))
    assert not any(
        map(is_private, ("tcp://*:1", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://[::]:1", "tcp://eth0:1"))
    )


def test_event_block_size_defaults_and_override() -> None:
    assert [event_block_tokens(KVEventConfig(), page) for page in (1, 16, 64)] == [16, 16, 64]
    assert event_block_tokens(KVEventConfig(kv_events_block_size=128), 64) == 128
