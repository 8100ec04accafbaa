"""How a sequence ends, and what is kept of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended. ``matched`` is the stop token id or stop string, ``message`` explains an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


@dataclass(slots=True, frozen=True)
class Retained:
    """The outcome of ``retain_ttl``: ``tokens`` leased until ``deadline`` (scheduler clock), or why it was refused."""

    tokens: int = 0
    deadline: float = 0.0
    refused: str | None = None
