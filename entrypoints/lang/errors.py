"""Errors of programs and of their calls to a server."""

from __future__ import annotations


class BackendError(Exception):
    """The server refused a call or could not answer it. ``message`` is the server's own. status: the HTTP status, 0
    without an answer. code: a word for programs to test."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


class ProgramError(RuntimeError):
    """A step of a program failed, so its state runs no further steps. Raised by `run`, and where the result is read."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
