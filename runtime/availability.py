"""Tracks whether the worker can be asked anything: not before it is ready, and not once the server ends."""

from __future__ import annotations

import asyncio

from ..scheduler.refusal import RequestRefused
from .prompt import ModelLimits


class Availability:
    """The TokenizerManager sets it; everything that sends to the worker checks it."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._limits: ModelLimits | None = None
        self._closed_because: RequestRefused | None = None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self._closed_because is None

    def check(self) -> ModelLimits:
        """Return the served model's limits. Raises RequestRefused if nothing can be asked."""
        if self._closed_because is not None:
            raise self._closed_because
        if self._limits is None:
            raise RequestRefused("the model is still loading; try again soon", status=503, code="not_ready")
        return self._limits

    async def wait_ready(self) -> None:
        """Wait until the worker has said that it can serve."""
        await self._ready.wait()

    def open(self, limits: ModelLimits) -> None:
        """The worker is ready."""
        self._limits = limits
        self._ready.set()

    def close(self, error: RequestRefused) -> None:
        """Refuse everything with ``error`` from now on."""
        self._closed_because = error
