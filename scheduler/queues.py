"""The tables of requests: all that have not ended, in whatever state, and those that wait for admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from .request import Request


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


class WaitingQueue:
    """Requests in order of arrival; a retracted one returns to its old place. The policy picks the next to admit."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[Request]:
        """In order of arrival; must not be changed."""
        return self._requests

    def add_requests(self, requests: list[Request]) -> None:
        queue = self._requests
        if not requests:
            return
        newest = not queue or queue[-1].serial < requests[0].serial
        if not newest and len(requests) * 16 < len(queue):
            for request in requests:
                insort(queue, request, key=_serial)
            return
        queue += requests
        if not newest or len(requests) > 1:
            queue.sort(key=_serial)

    def remove_request(self, request: Request) -> None:
        """Remove a waiting request."""
        place = bisect_left(self._requests, request.serial, key=_serial)
        assert self._requests[place] is request
        del self._requests[place]

    def discard_request(self, request: Request) -> None:
        """Remove a request if it waits here."""
        self._requests = [other for other in self._requests if other is not request]

    def replace_requests(self, requests: list[Request]) -> None:
        """Replace the queue by these requests."""
        self._requests = sorted(requests, key=_serial)

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Remove several waiting requests."""
        if len(requests) == len(self._requests):
            self._requests = []
        elif requests:
            gone = set(requests)
            self._requests = [request for request in self._requests if request not in gone]


def _serial(request: Request) -> int:
    return request.serial
