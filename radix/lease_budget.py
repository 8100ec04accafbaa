"""The budgets of all leases together and of one client's leases: rows, and tokens of the pool.

One client may hold more than its share while no other needs it: a lease of a client within its share breaks leases of
one that is above. So a single user has the whole budget, and no client can keep another from its share.

Tokens that several leases share count once, for the lease that brought them; when that ends, for another of those
leases. ``lease_ref`` of a node counts the leases on it, as ``lock_ref`` counts locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .kv_sequence import KVSequence
from .node import TreeNode

Limit = Literal["all", "client"]
"""The budget that is used up: that of all leases together, or that of one client."""


@dataclass(slots=True)
class _Share:
    """The leases of one client."""

    tokens: int = 0
    serials: set[int] = field(default_factory=set)


class LeaseBudget:
    """Counts what live leases hold. Clients without a name ("") cannot be told apart: no client's limit binds them.

    max_tokens, max_leases: of all leases. max_client_tokens, max_client_leases: a client's share, which it may exceed
    while the whole is not used up; None for all of it.
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
        self._counted = 0
        """The part of ``tokens`` that counts for some lease."""
        self._shares: dict[str, _Share] = {}

    def exceeded_by(self, client: str, tokens: int) -> Limit | None:
        """The limit that one more lease would break: none unless the whole is used up, and then the client's first.
        tokens: that would count for it."""
        if self.leases < self.max_leases and self.tokens <= self.max_tokens:
            return None
        leases, held = self._held_by(client)
        if client and (leases >= self.max_client_leases or held + tokens > self.max_client_tokens):
            return "client"
        return "all"

    def clients_above_share(self) -> list[str]:
        """The clients that hold more than their share."""
        most, tokens = self.max_client_leases, self.max_client_tokens
        return [name for name, share in self._shares.items() if len(share.serials) > most or share.tokens > tokens]

    def never_holds(self, client: str, tokens: int) -> bool:
        """True if one more lease with this many tokens of its own would be too large were it the client's only one."""
        if tokens > self.max_tokens:
            return True
        _, held = self._held_by(client)
        return bool(client) and tokens > self.max_client_tokens and self.tokens - held > self.max_tokens

    def _held_by(self, client: str) -> tuple[int, int]:
        """(leases, tokens) of a client."""
        share = self._shares.get(client)
        return (len(share.serials), share.tokens) if share is not None else (0, 0)

    def serials_of(self, client: str) -> list[int]:
        """The serials of a client's leases, oldest first."""
        share = self._shares.get(client)
        return sorted(share.serials) if share is not None else []

    def add_lease(self, client: str, serial: int, tokens: int) -> None:
        """Count a new lease. tokens: its `uncounted_tokens`."""
        self.leases += 1
        self._counted += tokens
        if client:
            share = self._shares.setdefault(client, _Share())
            share.tokens += tokens
            share.serials.add(serial)

    def remove_lease(self, client: str, serial: int, tokens: int) -> None:
        """Count a lease no more. tokens: those that count for it."""
        self.leases -= 1
        self._counted -= tokens
        share = self._shares.get(client)
        if share is not None:
            share.tokens -= tokens
            share.serials.remove(serial)
            if not share.serials:
                del self._shares[client]

    def add_tokens(self, client: str, tokens: int) -> None:
        """Count more tokens for a lease of this client."""
        self._counted += tokens
        if client:
            self._shares[client].tokens += tokens

    @property
    def uncounted_tokens(self) -> int:
        """Tokens that are held but count for no lease yet: those of a sequence between `hold` and `add_lease`."""
        return self.tokens - self._counted

    def clear(self) -> None:
        self.tokens = self.leases = self._counted = 0
        self._shares.clear()

    def hold(self, kv: KVSequence) -> None:
        """Mark the path of ``kv`` as leased once more."""
        assert kv.node is not None
        node = kv.node
        while node.lease_ref == 0 and node.parent is not None:
            node.lease_ref = 1
            node = node.parent
        node.lease_ref += 1
        self.tokens += kv.node.prefix_len - node.prefix_len + self._tail(kv)

    def unhold(self, kv: KVSequence) -> tuple[int, TreeNode]:
        """Undo `hold`. Returns the tokens that no lease holds any more, and the last node of the path that one does, or
        the root."""
        assert kv.node is not None
        node = kv.node
        node.lease_ref -= 1
        while node.lease_ref == 0 and node.parent is not None:
            node = node.parent
            node.lease_ref -= 1
        freed = kv.node.prefix_len - node.prefix_len + self._tail(kv)
        self.tokens -= freed
        return freed, node

    def _tail(self, kv: KVSequence) -> int:
        page = self._page_size
        return -(-kv.length // page) * page - kv.tree_len
