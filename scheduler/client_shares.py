"""Which entry of a bounded table is forgotten first: the oldest of the client that holds most of the table.

    alice   a1 a2                   the table is full:  b1 goes, then b2, b3
    bob     b1 b2 b3 b4 b5          carol, alone, may fill a whole table

So a client that floods a table makes it forget its own entries, and others keep theirs up to an equal share. This is
max-min fairness; among clients that hold equally many, the one that has held so many for longest loses one first. A
table may have as many clients as entries, so the first key is found without looking at each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ClientShares(Generic[Key]):
    """The keys of one table, by client. The table calls `put_key` and `remove_key` for each entry, and takes what it
    may forget from `in_order_of_forgetting`. Each change is made whole or not at all."""

    def __init__(self) -> None:
        self._entries: dict[str, OrderedDict[Key, int]] = {}
        """Each client's entries as sizes by key, oldest first; clients without entries are absent."""
        self._sizes: dict[str, int] = {}
        """The sum of each client's sizes."""
        self._client_of: dict[Key, str] = {}
        self._by_number: dict[int, dict[str, None]] = {}
        """Clients by the number of their entries; those that have held so many for longest first."""

    def __len__(self) -> int:
        return len(self._client_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._client_of

    @property
    def num_clients(self) -> int:
        """Clients with at least one entry."""
        return len(self._entries)

    def put_key(self, client: str, key: Key, size: int = 0) -> None:
        """Add an entry as the client's newest, or make one of the same key that. size: in the table's own unit."""
        self.remove_key(key)
        if client not in self._entries:
            self._entries[client], self._sizes[client] = OrderedDict(), 0
        self._entries[client][key] = size
        self._sizes[client] += size
        self._client_of[key] = client
        self._note_number(client, len(self._entries[client]) - 1)

    def renew_key(self, key: Key) -> None:
        """Make an entry its client's newest."""
        self._entries[self._client_of[key]].move_to_end(key)

    def remove_key(self, key: Key) -> None:
        """Remove an entry, if it is there."""
        if (client := self._client_of.pop(key, None)) is None:
            return
        entries = self._entries[client]
        self._sizes[client] -= entries.pop(key)
        self._note_number(client, len(entries) + 1)
        if not entries:
            del self._entries[client], self._sizes[client]

    def _note_number(self, client: str, before: int) -> None:
        """The number of a client's entries is another than before."""
        if (others := self._by_number.get(before)) is not None:
            del others[client]
            if not others:
                del self._by_number[before]
        if now := len(self._entries[client]):
            self._by_number.setdefault(now, {})[client] = None

    def in_order_of_forgetting(self, *, by_size: bool = False, least: int = -1) -> Iterator[Key]:
        """All keys: those of the client that holds most first, and of each client the oldest first. Valid until the
        next change.

        by_size: clients are compared by the sizes of their entries, not by their number. least: clients that hold no
        more than that are left out.
        """
        if by_size:
            # sorted keeps the order of equals: that in which the clients began to hold something
            for client in sorted(self._sizes, key=self._sizes.__getitem__, reverse=True):
                if self._sizes[client] <= least:
                    return
                yield from self._entries[client]
            return
        for number in sorted(self._by_number, reverse=True):
            if number <= least:
                return
            for client in self._by_number[number]:
                yield from self._entries[client]
