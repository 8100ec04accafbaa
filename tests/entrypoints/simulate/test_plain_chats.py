"""Conversations beside one-shot chats of others, on the real scheduler: what is kept of them, named or not."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.simulate.arms import Sender
from baton.entrypoints.simulate.cost_model import Linear
from baton.entrypoints.simulate.simulation import Simulation
from baton.entrypoints.simulate.work.job import Job, Turn
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.policies.registry import PINNING, POLICIES
from tests.doubles.simulated import simulation

COST = Linear(fixed_s=0.01, prompt_token_s=4e-4, decode_row_s=1e-3, context_token_s=1e-6)
CHATS: tuple[Sender, ...] = ("plain", "chat")


def conversation(name: str, arrival: float, turns: int = 5, away_s: float = 20.0) -> Job:
    """Each answer is read by a person: it calls nothing."""
    made: list[Turn] = []
    for number in range(turns):
        made.append(Turn(made[-1].known if made else 0, 30 if number else 60, 10, "", away_s))
    return Job(name, arrival, tuple(made), 0)


def one_shots(tokens: int, start: float, end: float) -> list[Job]:
    """Chats of 60 tokens that are never continued; ``tokens`` of them every 20 s."""
    gap = 20.0 * 60 / tokens
    count = int((end - start) / gap)
    return [Job(f"one{n}", start + n * gap, (Turn(0, 50, 10, ""),), 0) for n in range(count)]


def played(jobs: list[Job], sender: Sender, policy: str, **more: Any) -> Simulation:
    more = {"pool": 800, "cost": COST, "max_new_tokens": 16, "check_every": 50, "burst": 16, **more}
    played = simulation(jobs, sender=sender, schedule_policy=policy, **more)
    played.run()
    return played


def kept(done: Simulation, first: int = 1) -> float:
    """The share of what the conversations' earlier turns had that their turns from ``first`` on found."""
    turns = [turn for record in done.records if len(record.turns) > 1 for turn in record.turns[first:]]
    return sum(min(turn.found, turn.kept) for turn in turns) / sum(turn.kept for turn in turns)


def scene() -> list[Job]:
    """Between two turns of each conversation one and a half times the pool comes in one-shots."""
    return [conversation("a", 0.0), conversation("b", 0.5), *one_shots(1200, 2.0, 95.0)]


def test_plain_chats_are_retained_like_on_a_server() -> None:
    """They are leased, last turns too, are a job named after their first turn, and have asked for none of it."""
    done = played([conversation("a", 0.0, turns=1), conversation("b", 0.0, turns=2, away_s=1.0)], "plain", "fcfs")
    kept = [lease.owner for lease in done.scheduler.live_leases()]
    assert all(isinstance(owner, KeptTurn) for owner in kept)
    assert {(owner.job.id, owner.worth) for owner in kept if isinstance(owner, KeptTurn) and owner.job} == {
        ("chat-a.0", Worth.FIRST_TURN), ("chat-b.0", Worth.RETURNED)
    }  # fmt: skip


def test_bare_prompts_name_nothing() -> None:
    """They are leased for no longer than others' prompts, and find what the tree still has of their last turn."""
    done = played([conversation("a", 0.0, turns=3, away_s=1.0)], "bare", "fcfs")
    assert done.scheduler.stats().leases_granted == 0
    assert kept(done) == 1.0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_continued_conversations_survive_a_flood_of_one_shots(policy: str, page_size: int) -> None:
    done = played(scene(), "plain", policy, page_size=page_size)
    assert kept(done, first=2) > 0.9
    assert not any(record.refused for record in done.records)


@pytest.mark.parametrize("host", [0, 1600])
@pytest.mark.parametrize("policy", POLICIES)
def test_naming_a_job_keeps_at_least_as_much(policy: str, host: int) -> None:
    plain, named = (kept(played(scene(), sender, policy, host=host)) for sender in CHATS)
    assert named >= plain > 0.5
    if not host:
        assert named > plain, "a first turn whose job is named is worth more"


@pytest.mark.parametrize("policy", ["fcfs", *PINNING])
def test_finished_conversations_do_not_block_others(policy: str) -> None:
    """They all are returned to, one after the other, and then never again. The oldest job is not the best one."""
    jobs = [conversation(f"old{n}", 1.5 * n, turns=3, away_s=4.0) for n in range(12)]
    late = conversation("late", 30.0, away_s=4.0)
    done = played([*jobs, late, *one_shots(4000, 29.0, 55.0)], "plain", policy)
    turns = next(record.turns for record in done.records if record.job.name == "late")
    assert all(turn.recomputed == 0 for turn in turns[2:])


@pytest.mark.parametrize("policy", POLICIES)
def test_one_shots_progress_while_leases_fill_the_budget(policy: str) -> None:
    """Leases of conversations fill the budget for as long as they may; none is continued."""
    jobs = [conversation(f"old{n}", 0.2 * n, turns=2, away_s=1.0) for n in range(40)]
    done = played([*jobs, *one_shots(1200, 8.0, 20.0)], "plain", policy, page_size=64, pool=1024)
    assert all(record.end for record in done.records)
    waited = [record.turns[0].first_token - record.turns[0].sent for record in done.records if len(record.turns) == 1]
    assert max(waited) < 10.0, "less than the time for which a young lease is protected"
