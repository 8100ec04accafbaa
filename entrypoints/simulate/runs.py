"""One run: a cell of a study under one policy, with one seed. Plain data in, plain data out; runs share nothing."""

from __future__ import annotations

import time
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...runtime.pool_sizes import PoolSizes
from ...scheduler.config import SchedulerConfig
from ...scheduler.scheduler import Scheduler
from .arms import arm_named
from .cost_model import CARDS, MODELS, ModelSizes, Roofline, StepCost, read_cost_file
from .job_records import completion_rate, measured, summarize
from .machine import WantedPools, add_host, one_pool, plan_pools, with_recorded_bytes
from .simulation import Conditions, Simulation
from .work.job import Job
from .work.traces import read_trace
from .work.workloads import make_jobs, tools_named, workload_named


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on."""

    arm: str
    """POLICY[@TIME][+pin][+chat][+plain][+bare][+host]; see arms.py."""
    seed: int = 0
    rate: float = 1.0
    """Jobs per second; for a trace, the speed-up over the recording."""
    num_jobs: int = 300
    """Number of generated jobs; for a trace, how many of its first jobs are played, 0 for all."""
    workload: str = "agents"
    tools: str = "shell"
    scale: float = 1.0
    one_shots: float = 0.0
    """Share of the generated jobs that end with their first turn."""
    trace: str = ""
    files: str = ""
    """A digest of the files ``trace`` and ``costs``, so that a changed file gives a new run."""
    gpu: str = "H200"
    model: str = "llama-3.1-8b"
    sizes: ModelSizes | None = None
    """Of a model that is none of MODELS."""
    costs: str = ""
    """A file of measured costs, in place of card and model."""
    pool: int = 0
    """Tokens of KV on the card; 0 for as many as fit beside the model."""
    states: int = 0
    """Recurrent states on the card; 0 for as many as a server would have, none for a model without."""
    window: int = 0
    """Tokens that layers with a sliding window see; 0: the model's."""
    window_ratio: float = 0.0
    """Tokens of the pool for windows, by those of the KV pool; 0: as many as a server would give it."""
    recorded: PoolSizes | None = None
    """The pools of the trace, which stand for those that fit the card."""
    host_gb: float = 0.0
    """0 for an arm without a host tier, or with that of ``recorded``."""
    pin_s: float = 2.0
    conversation_ttl_s: float = 60.0
    """Seconds for which chats are leased."""
    burst: int = 16
    check_every: int = 0
    trim: float = 0.2
    settings: dict[str, Any] = {}
    """Fields of SchedulerConfig."""

    @property
    def key(self) -> str:
        """Identifies the run: equal for equal plans."""
        return msgspec.json.encode(self, order="sorted").decode()

    @property
    def cell(self) -> Plan:
        """The plan without arm and seed: equal for runs that are compared with each other."""
        return msgspec.structs.replace(self, arm="", seed=0, host_gb=0.0, pin_s=0.0)

    @property
    def label(self) -> str:
        """The arm, as reports name it."""
        return f"{self.arm} {self.host_gb:g} GB" if self.host_gb else self.arm


class Machine(NamedTuple):
    cost: StepCost
    pools: PoolSizes


def machine_of(plan: Plan, config: SchedulerConfig, *, has_host: bool) -> Machine:
    """config: the limits of the scheduler, and the lengths. Raises CostError."""
    card, model = CARDS[plan.gpu], plan.sizes or MODELS[plan.model]
    if plan.recorded is not None:
        model = with_recorded_bytes(model, plan.recorded)
    wanted = WantedPools(
        tokens=plan.pool,
        states=plan.states,
        window=plan.window,
        window_ratio=plan.window_ratio,
        recorded=plan.recorded,
    )
    pools = plan_pools(card, model, config, wanted)
    if has_host:
        pools = add_host(one_pool(pools), plan.host_gb, plan.recorded)
    return Machine(read_cost_file(Path(plan.costs)) if plan.costs else Roofline(card, model), pools)


@lru_cache(maxsize=2)
def _trace(path: str, digest: str) -> list[Job]:
    """digest: of the file's content; part of the cache's key."""
    return read_trace(Path(path))


def jobs_of(plan: Plan) -> tuple[list[Job], int]:
    """The jobs, and the max_new_tokens that their requests ask for. Raises TraceError."""
    if not plan.trace:
        workload = workload_named(plan.workload, plan.scale)
        tools = tools_named(plan.tools)
        jobs = make_jobs(workload, tools, rate=plan.rate, count=plan.num_jobs, seed=plan.seed, one_shots=plan.one_shots)
        return jobs, workload.max_new_tokens
    jobs = [
        replace(job, arrival=job.arrival / plan.rate) for job in _trace(plan.trace, plan.files)[: plan.num_jobs or None]
    ]
    return jobs, max(512, *(turn.output for job in jobs for turn in job.turns))


def make_simulation(plan: Plan) -> Simulation:
    """Raises CostError, TraceError, or ValueError for an unknown arm or setting."""
    arm = arm_named(plan.arm)
    jobs, max_new_tokens = jobs_of(plan)
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := plan.settings.keys() - known:
        raise ValueError(f"the scheduler has no setting {', '.join(sorted(unknown))}")
    if arm.host and not (plan.host_gb or (plan.recorded is not None and plan.recorded.host_tokens)):
        raise ValueError(f"{plan.arm} needs a host tier; give its size with --host-gb")
    settings: dict[str, Any] = {
        "context_length": max(job.longest for job in jobs) + max_new_tokens,
        "max_running_requests": 256,
        "max_leased_requests": 256,
        "max_leases_per_client": 256,  # there is one client
        "max_client_leased_ratio": 1.0,
        "max_finished_requests": 4096,
        "max_queued_requests": 0,
        "schedule_policy": arm.policy,
        "random_seed": plan.seed,
        "page_size": plan.recorded.page_size if plan.recorded is not None else 1,
    }
    config = SchedulerConfig(**settings | arm.settings | plan.settings)
    machine = machine_of(plan, config, has_host=arm.host)
    return Simulation(
        jobs,
        Conditions(
            config=config,
            pools=machine.pools,
            cost=machine.cost,
            variant=arm.variant,
            pin_s=plan.pin_s if arm.pins else 0.0,
            sender=arm.sender,
            conversation_ttl_s=plan.conversation_ttl_s,
            max_new_tokens=max_new_tokens,
            burst=plan.burst,
            check_every=plan.check_every,
        ),
    )


def run(plan: Plan) -> dict[str, Any]:
    """The figures of a run. All but ``wall_s`` are reproducible."""
    started = time.perf_counter()
    simulation = make_simulation(plan)
    records = simulation.run()
    wall = time.perf_counter() - started
    return {
        "plan": msgspec.to_builtins(plan),
        "figures": summarize(records, plan.trim) | {"completion_rate": completion_rate(records)[0]},
        "services_s": [round(record.service, 3) for record in measured(records, plan.trim)],
        "scheduler": _scheduler_figures(simulation.scheduler),
        "pools": msgspec.to_builtins(simulation.pools),
        "steps": simulation.steps,
        "simulated_s": simulation.now,
        "busy_share": simulation.busy_s / simulation.now if simulation.now else 0.0,
        "wall_s": wall,
    }


def _scheduler_figures(scheduler: Scheduler) -> dict[str, Any]:
    stats = scheduler.stats()
    names = ("leases_granted", "leases_handed_off", "leases_expired", "leases_broken", "evicted_tokens", "retractions")
    tiers = [
        {"tier": t.tier, "stored": t.stores.tokens, "loaded": t.loads.tokens, "evicted": t.evicted_tokens}
        for t in stats.tiers
    ]
    found = {name: getattr(stats, name) for name in names}
    states = {"evicted_states": stats.states.evicted} if stats.states.total else {}
    return found | states | {"total_tokens": stats.total_tokens, "jobs": asdict(stats.jobs), "tiers": tiers}
