"""Parents and children among jobs: an agent that starts another, a subagent, waits for it, and then returns.

    parent   turn ─▶ tool "Task" ······ its last step stays pinned ······▶ turn
    child            └▶ turn ─▶ tool ─▶ turn ─▶ tool ─▶ turn (the answer)

A child is served where its parent stands in the order of jobs: else the parent would wait behind every job that
arrived before its child. While a child computes, or is expected back from a tool, its parent's pins do not expire; they
break under pressure as any lease does. When the child has ended, its parent is about to return, and gets a moment
more. Pure functions; `PinManager` moves the leases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ...radix.lease import LeaseState
from .job import Job

MAX_CHILDREN = 64
"""Children for which a parent's pins are held; of more, those that were active last."""

MAX_GENERATIONS = 8
"""Ancestors that a job holds the pins of, and among which a cycle is looked for."""


class Hold(NamedTuple):
    """How long a parent's pins are held for its children. until: their leases do not expire before that. expected: the
    time until which its return is expected. Both are -inf for no time."""

    until: float = -math.inf
    expected: float = -math.inf


def adopt_child(parent: Job, child: Job) -> None:
    """Make a job the child of another, in its place in the order. No effect if it has a parent that is not over, or is
    one of the parent's own ancestors."""
    if (child.parent is not None and not child.parent.is_over) or child is parent or child in ancestors(parent):
        return
    _leave_parent(child)
    child.parent = parent
    parent.adopted[child] = None
    child.arrival, child.serial = min((child.arrival, child.serial), (parent.arrival, parent.serial))
    child.asked = min(child.asked, parent.asked)


def note_activity(child: Job) -> None:
    """Note that a job has a request, for the parent that it may have."""
    if child.parent is None:
        return
    children = child.parent.children
    children.pop(child, None)
    children[child] = None
    if len(children) > MAX_CHILDREN:
        del children[next(iter(children))]


def leave_family(job: Job) -> None:
    """Remove a job that is forgotten, so that no job keeps it. Its children are free for another parent: for one of the
    same name, if it begins anew."""
    _leave_parent(job)
    for child in job.adopted:
        child.parent = None
    job.adopted.clear()
    job.children.clear()


def _leave_parent(child: Job) -> None:
    if child.parent is not None:
        child.parent.adopted.pop(child, None)
        child.parent.children.pop(child, None)
        child.parent = None


def ancestors(job: Job) -> Iterator[Job]:
    """The parent, its parent, and so on; `MAX_GENERATIONS` of them at most."""
    for _ in range(MAX_GENERATIONS):
        if job.parent is None:
            return
        job = job.parent
        yield job


def hold_for_children(parent: Job, now: float, most_s: float, moment_s: float) -> Hold:
    """How long the parent's pins are to be held, by what its children do; children that need nothing are dropped.
    most_s: seconds for a child that computes, from its last activity; about that, since each change of a deadline costs
    something. moment_s: for a child that has ended."""
    until = expected = -math.inf
    for child in list(parent.children):
        if child.open_rids:
            need = parent.held_until if parent.held_until >= now + most_s / 2 else now + most_s
            until, expected = max(until, need), max(expected, need)
            continue
        needs = _needs_of_idle(child, moment_s)
        if needs.until <= now:
            del parent.children[child]
        until, expected = max(until, needs.until), max(expected, needs.expected)
    return Hold(until, expected)


def _needs_of_idle(child: Job, moment_s: float) -> Hold:
    """As `Hold`, for a child with no open request: until it is expected back, and its parent right after it."""
    until = expected = max(child.heard + moment_s, child.held_until)
    for step in child.pinned_steps():
        lease = step.lease
        if lease is not None and lease.state is LeaseState.GRANTED:
            until, expected = max(until, lease.deadline), max(expected, step.expected_until)
    return Hold(until, expected)
