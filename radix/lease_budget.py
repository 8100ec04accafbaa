"""The budgets of all leases together and of one client's leases: rows, and tokens of the pool.

Tokens that several leases share count once, for the lease that brought them. ``lease_ref`` of a node counts the leases
on it, as ``lock_ref`` counts locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .kv_sequence import KVSequence

Limit = Literal["all", "client"]
"""The budget that is used up: that of all leases together, or that of one client."""


@dataclass(slots=True)
class _Share:
    """The leases of one client."""

    tokens: int = 0
    serials: set[int] = field(default_factory=set)


class LeaseBudget:
    """Counts what live leases hold. Clients without a name ("") cannot be told apart: no client's limit binds them.

    max_tokens, max_leases: of all leases. max_client_tokens, max_client_leases: of one client's; None for no limit.
    """

    def __init__(
        self,
        page_size: int,
        *,
        max_tokens: int,
        max_leases: int,
        max_client_tokens: int | None = None,
        max_client_leases: int | None = None,
    ) -> None:
        self._page_size = page_size
        self.max_tokens = max_tokens
        self.max_leases = max_leases
        self.max_client_tokens = max_tokens if max_client_tokens is None else max_client_tokens
        self.max_client_leases = max_leases if max_client_leases is None else max_client_leases
        self.tokens = 0
        """Pool tokens that are held, in whole pages."""
        self.leases = 0
        self._shares: dict[str, _Share] = {}

    def exceeded_by(self, client: str, tokens: int) -> Limit | None:
        """The limit that one more lease would break, the client's first. tokens: what `hold` has returned for it."""
        share = self._shares.get(client)  # those without a name have none
        if share is not None and (
            len(share.serials) >= self.max_client_leases or share.tokens + tokens > self.max_client_tokens
        ):
            return "client"
        if self.leases >= self.max_leases or self.tokens > self.max_tokens:
            return "all"
        return None

    def never_holds(self, client: str, tokens: int) -> bool:
        """True if a lease with this many tokens of its own would be too large were it the only one."""
        return tokens > (min(self.max_tokens, self.max_client_tokens) if client else self.max_tokens)

    def serials_of(self, client: str) -> list[int]:
        """The serials of a client's leases, oldest first."""
        share = self._shares.get(client)
        return sorted(share.serials) if share is not None else []

    def add_lease(self, client: str, serial: int, tokens: int) -> None:
        """Count a new lease. tokens: what `hold` returned for it."""
        self.leases += 1
        if client:
            share = self._shares.setdefault(client, _Share())
            share.tokens += tokens
            share.serials.add(serial)

    def remove_lease(self, client: str, serial: int, tokens: int) -> None:
        """Count a lease no more. tokens: as it was added."""
        self.leases -= 1
        share = self._shares.get(client)
        if share is not None:
            share.tokens -= tokens
            share.serials.remove(serial)
            if not share.serials:
                del self._shares[client]

    def clear(self) -> None:
        self.tokens = self.leases = 0
        self._shares.clear()

    def hold(self, kv: KVSequence) -> int:
        """Mark the path of ``kv`` as leased once more; returns the tokens that no other lease held."""
        assert kv.node is not None
        node = kv.node
        while node.lease_ref == 0 and node.parent is not None:
            node.lease_ref = 1
            node = node.parent
        node.lease_ref += 1
        added = kv.node.prefix_len - node.prefix_len + self._tail(kv)
        self.tokens += added
        return added

    def unhold(self, kv: KVSequence) -> None:
        """Undo `hold`."""
        assert kv.node is not None
        node = kv.node
        node.lease_ref -= 1
        while node.lease_ref == 0 and node.parent is not None:
            node = node.parent
            node.lease_ref -= 1
        self.tokens -= kv.node.prefix_len - node.prefix_len + self._tail(kv)

    def _tail(self, kv: KVSequence) -> int:
        page = self._page_size
        return -(-kv.length // page) * page - kv.tree_len
