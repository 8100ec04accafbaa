"""Records of turns and jobs, and the figures computed from them. Times are seconds of the simulation's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .work.job import Job

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class TurnRecord:
    sent: float
    prompt: int
    kept: int
    """Prompt tokens that an earlier turn had, or that other jobs share."""
    first_token: float = 0.0
    end: float = 0.0
    found: int = 0
    """Prompt tokens with KV in the cache, on the device or on the host."""
    from_host: int = 0
    no_state: int = 0
    """Prompt tokens with K and V in the cache that no recurrent state makes usable."""
    no_window: int = 0
    """Prompt tokens with K and V in the cache whose window has gone."""
    output: int = 0
    retractions: int = 0

    @property
    def recomputed(self) -> int:
        return max(0, self.kept - self.found)


@dataclass(slots=True)
class JobRecord:
    job: Job
    turns: list[TurnRecord] = field(default_factory=list)
    end: float = 0.0
    refused: str = ""
    """The scheduler's reason for refusing one of its turns; "" if it took all."""

    @property
    def duration(self) -> float:
        return self.end - self.job.arrival

    @property
    def service(self) -> float:
        """The duration without the time of its tools."""
        return self.duration - self.job.tool_s


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum."""
    if not len(values):
        return {}
    points = np.percentile(values, PERCENTILES).tolist()
    found = {"mean": float(np.mean(values))}
    found |= {f"p{point}": float(value) for point, value in zip(PERCENTILES, points)}
    return found | {"max": float(np.max(values))}


def measured(records: Sequence[JobRecord], trim: float) -> list[JobRecord]:
    """The jobs that count: the served ones in order of arrival, without the first and the last share ``trim``. The
    first jobs met an empty server, and the last ones ran nearly alone."""
    done = [record for record in records if not record.refused]
    cut = int(trim * len(done))
    return done[cut : len(done) - cut]


def summarize(records: Sequence[JobRecord], trim: float) -> dict[str, Any]:
    """The figures of a run; spreads are over the jobs that are `measured`."""
    done = [record for record in records if not record.refused]
    seen = measured(records, trim)
    turns = [turn for record in seen for turn in record.turns]
    prompts, kept = sum(turn.prompt for turn in turns), sum(turn.kept for turn in turns)
    later = [turn for record in seen for turn in record.turns[1:]]
    makespan = max((record.end for record in done), default=0.0) - min((r.job.arrival for r in done), default=0.0)
    return {
        "jobs": len(records),
        "jobs_done": len(done),
        "jobs_refused": len(records) - len(done),
        "jobs_measured": len(seen),
        "jobs_per_s": len(done) / makespan if makespan > 0 else 0.0,
        "makespan_s": makespan,
        "duration_s": spread([record.duration for record in seen]),
        "service_s": spread([record.service for record in seen]),
        "ttft_s": spread([turn.first_token - turn.sent for turn in turns]),
        "later_ttft_s": spread([turn.first_token - turn.sent for turn in later]),
        "prompt_tokens": prompts,
        "output_tokens": sum(turn.output for turn in turns),
        "recomputed_tokens": sum(turn.recomputed for turn in turns),
        "recomputed_share": sum(turn.recomputed for turn in turns) / kept if kept else 0.0,
        "hit_rate": sum(turn.found for turn in turns) / prompts if prompts else 0.0,
        "no_state_share": sum(turn.no_state for turn in turns) / prompts if prompts else 0.0,
        "no_window_share": sum(turn.no_window for turn in turns) / prompts if prompts else 0.0,
        "from_host_tokens": sum(turn.from_host for turn in turns),
        "retracted_turns": sum(turn.retractions > 0 for turn in turns),
    }


def completion_rate(records: Sequence[JobRecord]) -> tuple[float, float]:
    """(jobs completed per second, jobs completed ÷ jobs arrived) in the second half of the time from the first arrival
    to the last."""
    arrivals = sorted(record.job.arrival for record in records)
    start, stop = (arrivals[0] + arrivals[-1]) / 2, arrivals[-1]
    done = sum(start < record.end <= stop and not record.refused for record in records)
    came = sum(start < arrival for arrival in arrivals)
    return (done / (stop - start), done / came) if stop > start else (0.0, 0.0)
