"""What speculation did, as Prometheus scrapes it."""

from __future__ import annotations

from baton.runtime.metrics import ServerMetrics
from baton.scheduler.outcome import DraftCounts
from baton.scheduler.stats import SchedulerStats


def test_draft_counters_follow_worker_reports() -> None:
    metrics = ServerMetrics("toy")
    for counts in (DraftCounts(2, 30, 20), DraftCounts(3, 37, 21)):
        metrics.worker_reported(SchedulerStats(drafts=counts))
    text = metrics.render().decode()
    for name, value in (("spec_verify", 3), ("spec_draft_tokens", 37), ("spec_accepted_tokens", 21)):
        assert f'baton:{name}_total{{model_name="toy"}} {value}.0' in text
