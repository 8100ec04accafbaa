"""What can go wrong between a program and its server."""

from __future__ import annotations


class BackendError(Exception):
    """A call the server refused or could not answer. ``message`` is the server's own; status: HTTP status, 0 where no
    answer came; code: a word for programs."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


class ProgramError(RuntimeError):
    """A step of a program failed; the state does nothing more. Raised where its result is read, and by `run`."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
