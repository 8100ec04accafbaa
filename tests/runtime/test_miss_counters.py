"""Counters of prompt tokens that were not found, by reason, and the names in reports."""

from __future__ import annotations

import msgspec
import pytest

from baton.runtime.clients import SOLE_CLIENT, Client
from baton.runtime.messages import TextOutput, TokenOutput
from baton.runtime.metrics import ServerMetrics
from baton.runtime.tokenizer_manager import _stripped
from baton.scheduler.outcome import CacheReport, MissedSpan


def test_misses_count_tokens_and_requests_by_reason() -> None:
    metrics = ServerMetrics("m")
    spans = MissedSpan("evicted", 0, 5, 1.0), MissedSpan("evicted", 5, 2, 2.0, "x"), MissedSpan("required", 7, 1)
    for report in (CacheReport(spans), CacheReport((MissedSpan("required", 9, 1),)), None):
        metrics.count_misses(report)
    value = metrics.registry.get_sample_value
    counted = {
        (name, reason): value(f"baton:cache_missed_{name}_total", {"model_name": "m", "reason": reason})
        for name in ("tokens", "requests")
        for reason in ("evicted", "required")
    }
    assert counted == {
        ("tokens", "evicted"): 7, ("tokens", "required"): 2, ("requests", "evicted"): 1, ("requests", "required"): 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "client, by, told",
    [
        (Client("alice"), "alice/step-1", "step-1"),
        (Client("alice"), "another client", "another client"),
        (SOLE_CLIENT, "step-1", "step-1"),
        (Client("alice"), None, None),
    ],
)
def test_reports_have_the_clients_own_names(client: Client, by: str | None, told: str | None) -> None:
    report = CacheReport((MissedSpan("evicted", 0, 5, 1.0, by),), 3)
    update = TextOutput(output=TokenOutput(rid="r", cache_report=report))
    stripped = _stripped(update, client).output.cache_report
    assert stripped is not None and stripped.missed[0].by == told and stripped.diverged_at == 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=CacheReport) == report
