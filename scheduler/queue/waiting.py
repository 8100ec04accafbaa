"""The requests that wait for admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection

from ..request import Request


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
