"""The leases as plain data for JSON, for operators. Times are seconds from now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...radix.lease import Lease, LeaseTable
from ..jobs.kept_turn import job_id_of

Name = tuple[str, int]
"""rid and index of a sequence."""


def describe_leases(
    leases: LeaseTable, names: Mapping[Lease, Name], now: float, after: int, limit: int, client: str | None = None
) -> dict[str, Any]:
    """A page of at most ``limit`` live leases, in the order in which they were granted, with serials greater than
    ``after``. ``next``: the value of ``after`` for the next page; None on the last. names: `Continuations.leased`.
    client: describe only leases that count in this client's budget."""
    live = [lease for lease in leases.live() if client is None or lease.client == client]
    later = [lease for lease in live if lease.serial > after]
    return {
        "leases": [_describe(lease, names.get(lease), now) for lease in later[:limit]],
        "next": later[limit - 1].serial if len(later) > limit else None,
        "live": len(live),
        "leased_tokens": leases.leased_tokens if client is None else sum(lease.own_tokens for lease in live),
    }


def _describe(lease: Lease, name: Name | None, now: float) -> dict[str, Any]:
    """name: rid and index of the sequence that it was granted for; None where its record is gone, and only waiting
    children still hold a claim."""
    rid, index = name if name is not None else (None, None)
    return {
        "serial": lease.serial,
        "rid": rid,
        "index": index,
        "job_id": job_id_of(lease),
        "user": lease.client,
        "tokens": lease.tokens,
        "own_tokens": lease.own_tokens,
        "idle_s": max(0.0, now - lease.idle_since),
        "expires_in_s": None if lease.claims else max(0.0, lease.deadline - now),
        "is_claimed": lease.claims > 0,
    }
