"""What a policy may ask and look at: one object, made by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...radix.cache import RadixCache
from ..jobs.tool_time import ToolTimes
from .fill_time import FillTime

PinTime = Literal["auto", "fixed", "cdf", "posterior", "thompson", "gittins"]
"""How the time of a pin is chosen; auto: as the policy does."""


@dataclass(frozen=True, slots=True)
class PolicyTools:
    """pin_time: asked for instead of what the policy takes by itself. pin_seconds: of a fixed time, and for a tool of
    which nothing is known. provisional_s: until the step's calls are known. times: of tools, so far."""

    cache: RadixCache
    fill_time: FillTime
    pin_time: PinTime = "auto"
    pin_seconds: float = 2.0
    provisional_s: float = 1.0
    times: ToolTimes = field(default_factory=ToolTimes)
