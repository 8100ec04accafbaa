"""The table of every request that has not ended, in whatever state."""

from __future__ import annotations

from collections.abc import Iterator

from ..request import Request


class LiveRequests:
    """The live sequences of each rid, in order of arrival."""

    def __init__(self) -> None:
        self._by_rid: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """Number of rids."""
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        return (request for siblings in self._by_rid.values() for request in siblings)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    @property
    def rids(self) -> list[str]:
        return list(self._by_rid)

    def siblings_of(self, rid: str) -> list[Request]:
        """The sequences of a rid that have not ended; none if it has."""
        return self._by_rid.get(rid, [])

    def add_siblings(self, rid: str, siblings: list[Request]) -> None:
        self._by_rid[rid] = siblings

    def remove_request(self, request: Request) -> None:
        siblings = self._by_rid[request.rid]
        siblings.remove(request)
        if not siblings:
            del self._by_rid[request.rid]

    def discard_request(self, request: Request) -> None:
        """Remove a sequence if it is there."""
        siblings = self._by_rid.get(request.rid, [])
        if request in siblings:
            siblings.remove(request)
        if not siblings:
            self._by_rid.pop(request.rid, None)

    def rids_before(self, arrival: float) -> list[str]:
        """The rids that arrived before a time."""
        found: list[str] = []
        for rid, siblings in self._by_rid.items():
            if siblings[0].arrival >= arrival:
                break
            found.append(rid)
        return found
