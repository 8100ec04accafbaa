"""Everything a policy may read: one object, made by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...radix.cache import RadixCache
from ..jobs.tool_time import ToolTimes
from .fill_time import FillTime

PinTime = Literal["auto", "fixed", "cdf", "posterior", "thompson", "gittins"]
"""Rule for the length of a pin; auto: the policy's own."""


@dataclass(frozen=True, slots=True)
class PolicyTools:
    """pin_time: rule that replaces the policy's own. pin_seconds: length of a fixed pin, and of one for a tool of which
    nothing is known. provisional_s: length of a pin until the step's calls are known. times: durations of tools so
    far."""

    cache: RadixCache
    fill_time: FillTime
    pin_time: PinTime = "auto"
    pin_seconds: float = 2.0
    provisional_s: float = 1.0
    times: ToolTimes = field(default_factory=ToolTimes)
