"""How a request is refused, whoever refuses it: the scheduler, the tokenizer manager or an API."""

from __future__ import annotations


class RequestRefused(Exception):
    """A request that cannot be served as it stands. ``status`` is the HTTP status, ``param`` the field to change."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
