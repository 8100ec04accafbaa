"""What an operator can set about scheduling. CLI flags are generated from these fields (name, default, help)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PolicyName = Literal["fcfs", "lpm"]


def flag(default, help: str):
    """A dataclass field that becomes the CLI flag ``--name-with-dashes``."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Lengths are in tokens."""

    context_length: int = flag(0, "longest prompt + output; 0 takes the model's")
    max_total_tokens: int = flag(0, "tokens in the KV pool; 0 sizes it from --mem-fraction-static")
    max_running_requests: int = flag(64, "rows of the request pool: requests that hold KV at the same time")
    chunked_prefill_size: int = flag(2048, "new prompt tokens per step; longer prompts are computed in chunks")
    page_size: int = flag(1, "tokens per KV page: 1, 16, 64 or any other power of two")
    schedule_policy: PolicyName = flag("fcfs", "order of the waiting queue: first come, or longest cached prefix")
    disable_radix_cache: bool = flag(False, "no matching and no sharing between requests")
    random_seed: int = flag(0, "seeds the seeds of requests that bring none")
