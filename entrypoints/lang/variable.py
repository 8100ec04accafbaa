"""The result of a named step of a program."""

from __future__ import annotations

import threading
from typing import Any

from .errors import ProgramError
from .text_stream import TextStream


class Variable:
    """Empty until its step is done; then it holds a value and meta (the server's meta_info), or an error."""

    def __init__(self) -> None:
        self.stream = TextStream()
        self._value: Any = None
        self._meta: Any = None
        self._error: ProgramError | None = None
        self._done = threading.Event()

    def finish(self, value: Any, meta: Any) -> None:
        self._value, self._meta = value, meta
        self.stream.close()
        self._done.set()

    def fail(self, error: ProgramError) -> None:
        """Store the error, unless the step is done."""
        if not self._done.is_set():
            self._error = error
            self.stream.close(error)
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def value(self) -> Any:
        """The value; waits for it. Raises ProgramError if the step failed or was skipped."""
        self._wait()
        return self._value

    def meta(self) -> Any:
        """The meta; waits and raises like `value`."""
        self._wait()
        return self._meta

    def _wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error
