"""Requests and leases for the tests of scheduling policies: nothing runs, nothing is allocated."""

from __future__ import annotations

import numpy as np

from baton.radix.kv_sequence import KVSequence
from baton.radix.lease import Lease, LeaseState
from baton.scheduler.policies.fill_time import FillTime
from baton.scheduler.policies.request_policies import FirstComeFirstServed
from baton.scheduler.request import Inheritance, Request
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import TokenBuffer
from tests.doubles.specs import make_spec

FILL_TIME = FillTime(1000, fixed=10.0)


def fcfs() -> FirstComeFirstServed:
    return FirstComeFirstServed(FILL_TIME)


def waiting_request(number: int, prompt: list[int] | None = None, *, namespace: str = "", priority: int = 0) -> Request:
    """The ``number``-th to arrive, that many seconds after the first."""
    ids = np.array(prompt or [number, 1, 2], dtype=np.int32)
    spec = make_spec(f"r{number}", ids, SamplingParams(max_new_tokens=4), namespace=namespace, priority=priority)
    request = Request(spec, index=0, seed=0, arrival=float(number), serial=number)
    request.set_prompt(TokenBuffer(ids), 4)
    return request


def returning_child(number: int, *, lease: Lease | None = None) -> Request:
    """A continuation for which a claimed lease waits."""
    ids = np.array([number, 5], dtype=np.int32)
    spec = make_spec(f"c{number}", ids, SamplingParams(max_new_tokens=4), continuation=ContinuationSpec("parent"))
    request = Request(spec, index=0, seed=0, arrival=float(number), serial=number)
    request.set_prompt(TokenBuffer(ids), 4)
    request.inheritance = Inheritance("handoff", lease=lease or claimed_lease(number))
    return request


def granted_lease(serial: int, idle_since: float) -> Lease:
    return Lease(_kept(), 1e9, serial, idle_since=idle_since)


def claimed_lease(serial: int, idle_since: float = 0.0) -> Lease:
    return Lease(_kept(), 1e9, serial, idle_since=idle_since, state=LeaseState.CLAIMED, claims=1)


def _kept() -> KVSequence:
    return KVSequence("", row=0, node=None, tree_len=0, length=9)


def admit(child: Request) -> Request:
    """What admission makes of a child: its lease is its own KV now."""
    assert child.inheritance is not None
    child.inheritance.lease = None
    return child
