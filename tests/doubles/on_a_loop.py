"""Tests that await."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

TIMEOUT_S = 60


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        async def in_time() -> None:
            await asyncio.wait_for(test(*given, **named), TIMEOUT_S)

        asyncio.run(in_time())

    return run
