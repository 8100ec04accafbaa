"""The requests that wait for admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from ..request import Request


class WaitingQueue:
    """In order of arrival; a retracted request comes back to its old place. Who goes first is the policy's business."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[Request]:
        """In order of arrival; must not be changed."""
        return self._requests

    def add(self, requests: list[Request]) -> None:
        if len(requests) * 16 < len(self._requests):
            for request in requests:
                insort(self._requests, request, key=_serial)
        elif requests:
            self._requests += requests
            self._requests.sort(key=_serial)

    def remove(self, request: Request) -> None:
        """Remove one that waits."""
        place = bisect_left(self._requests, request.serial, key=_serial)
        assert self._requests[place] is request
        del self._requests[place]

    def remove_all(self, requests: Iterable[Request]) -> None:
        """Remove several that wait."""
        gone = set(requests)
        if gone:
            self._requests = [request for request in self._requests if request not in gone]


def _serial(request: Request) -> int:
    return request.serial
