"""Reads ``GET /dashboard/events`` as a page does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.doubles.server_under_test import ServerUnderTest


class EventStream:
    """What one page has got: the newest of each event, and all lives merged."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()
        self.hello: dict[str, Any] = {}
        self.update: dict[str, Any] = {}
        self.tree: dict[str, Any] = {}
        self.lives: dict[tuple[str, int], dict[str, Any]] = {}
        self.count = 0

    def next(self) -> str:
        """The name of the next event; "" for a comment, StopIteration at the end."""
        lines: list[str] = []
        while (line := next(self._lines)) or not lines:
            lines += [line] if line else []
        if lines[0].startswith(":"):
            return ""
        name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
        assert len(lines) == 2 and name in ("hello", "update", "tree")
        setattr(self, name, data)
        self.count += 1
        for life in data.get("lives", ()):
            self.lives[life["rid"], life["index"]] = life
        return name

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Read until something is true; httpx's timeout bounds each wait."""
        for _ in range(400):
            if condition():
                return
            self.next()
        raise AssertionError(f"{what} did not come true: {self.update} {self.tree}")


@contextmanager
def reading(server: ServerUnderTest, **headers: str) -> Iterator[EventStream]:
    with (
        httpx.Client(base_url=server.url, timeout=40) as client,
        client.stream("GET", "/dashboard/events", headers=headers) as response,
    ):
        if response.status_code != 200:
            response.read()
        yield EventStream(response)
