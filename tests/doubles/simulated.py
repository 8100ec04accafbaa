"""Small simulations: jobs written down turn by turn, steps that take a second, pools of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.entrypoints.simulate.arms import Sender
from baton.entrypoints.simulate.cost_model import Linear
from baton.entrypoints.simulate.simulation import Conditions, Simulation
from baton.entrypoints.simulate.work.job import Job, Turn, numbered
from baton.entrypoints.simulate.work.tool_shapes import SHAPES
from baton.entrypoints.simulate.work.workloads import make_jobs, workload_named
from baton.runtime.pool_sizes import PoolSizes
from baton.scheduler.config import SchedulerConfig

SECOND = Linear(fixed_s=1.0, prompt_token_s=0.0, decode_row_s=0.0, context_token_s=0.0)
"""Every step takes a second."""

USUAL = Linear(fixed_s=0.005, prompt_token_s=5e-5, decode_row_s=1e-4, context_token_s=1e-7, load_token_s=5e-6)


def talk(name: str, arrival: float, *turns: tuple[int, int, float]) -> Job:
    """Turns: (new prompt tokens, output tokens, seconds of the tool)."""
    made: list[Turn] = []
    for new, output, tool_s in turns:
        made.append(Turn(made[-1].known if made else 0, new, output, "ls", tool_s))
    return Job(name, arrival, tuple(made), 0)


def simulation(
    jobs: Sequence[Job],
    *,
    cost: Linear = SECOND,
    pool: int = 4096,
    host: int = 0,
    sizes: dict[str, int] | None = None,
    pin_s: float = 0.0,
    sender: Sender = "generate",
    burst: int = 1,
    check_every: int = 1,
    max_new_tokens: int = 64,
    **settings: Any,
) -> Simulation:
    """pool, host: tokens. sizes: other sizes of pools, by their names in PoolSizes. settings: of the scheduler."""
    context = max(job.longest for job in jobs) + max_new_tokens
    limits: dict[str, Any] = {"max_running_requests": 64, "max_leased_requests": 64, "max_leases_per_client": 64}
    limits["schedule_policy"] = "fcfs"
    config = SchedulerConfig(context_length=context, max_client_leased_ratio=1.0, random_seed=0, **limits | settings)
    given = {"tokens": pool, "page_size": config.page_size, "bytes_per_token": 0, "host_tokens": host} | (sizes or {})
    conditions = Conditions(
        config=config,
        pools=PoolSizes(**given),
        cost=cost,
        pin_s=pin_s,
        sender=sender,
        burst=burst,
        check_every=check_every,
        max_new_tokens=max_new_tokens,
    )
    return Simulation(numbered(list(jobs)), conditions)


def crowd(count: int, *, rate: float = 3.0, seed: int = 0) -> list[Job]:
    """Short jobs that come close together; each has about 500 tokens in the end."""
    small = replace(workload_named("agents", 0.2), output=(5, 30))
    return make_jobs(small, SHAPES["exponential"], rate=rate, count=count, seed=seed)
