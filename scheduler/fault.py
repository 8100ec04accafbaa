"""Says which request an exception came from, so that it ends alone (see recovery.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class RequestFault(Exception):
    """Something failed while one request was handled; ``__cause__`` says what."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{request}")
        self.request = request
