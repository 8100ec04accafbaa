"""A text that grows in one thread, and that other threads or asyncio tasks follow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any


class TextStream:
    """Every follower gets the whole text, piece by piece, and then its end, or the error that ended it."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._meta: Any = None
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text

    @property
    def is_closed(self) -> bool:
        return self._closed

    def append_piece(self, piece: str, meta: Any = None) -> None:
        """Add a piece. meta: the server's meta_info of the text up to this piece."""
        with self._changed:
            self._text += piece
            self._meta = meta
            self._notify()

    def close(self, error: Exception | None = None) -> None:
        """End the text. Later calls change nothing."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
                self._notify()

    def follow(self) -> Iterator[str]:
        """Pieces of text, waiting for each. Raises the error that ended the text."""
        position = 0
        while True:
            with self._changed:
                while len(self._text) == position and not self._closed:
                    self._changed.wait()
                piece = self._text[position:]
            if not piece:
                break
            position += len(piece)
            yield piece
        if self._error is not None:
            raise self._error

    async def follow_async(self) -> AsyncIterator[str]:
        """`follow` for asyncio; does not block the loop."""
        async for piece, _ in self.follow_with_meta():
            if piece:
                yield piece

    async def follow_with_meta(self) -> AsyncIterator[tuple[str, Any]]:
        """`follow_async`, each piece with the meta of the text up to its end. The last piece may be empty, with the
        last meta."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(wake)
        try:
            position, told = 0, None
            while True:
                changed.clear()
                with self._changed:
                    piece, meta, closed = self._text[position:], self._meta, self._closed
                if piece or (closed and meta is not told):
                    position, told = position + len(piece), meta
                    yield piece, meta
                elif closed:
                    break
                else:
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(wake)
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._listeners:
            wake()
