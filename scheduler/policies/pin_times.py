"""How long a step's KV is pinned once its calls are known: one rule for each value of ``--pin-time``."""

from __future__ import annotations

from collections.abc import Callable

from ..jobs.job import FinishedStep
from .tools import PinTime, PolicyTools

MAX_PIN_S = 600.0
"""Longest pin; a lease would have been broken long before."""

POSTERIOR_SHARE = 0.8
"""Share of a tool's calls that return within the time that `posterior` gives."""


def pin_seconds(tools: PolicyTools, own: PinTime, step: FinishedStep) -> float:
    """Seconds for which a step is worth keeping, counted from its end. own: the calling policy's rule, used for
    ``auto``."""
    rule = own if tools.pin_time == "auto" else tools.pin_time
    return min(MAX_PIN_S, _RULES[rule](tools, step))


def _fixed(tools: PolicyTools, step: FinishedStep) -> float:
    return tools.times.fixed_ttl(step.calls, tools.pin_seconds)


def _cdf(tools: PolicyTools, step: FinishedStep) -> float:
    found = tools.times.cdf_ttl(step.calls, tools.fill_time.seconds)
    return tools.pin_seconds if found is None else found


def _gittins(tools: PolicyTools, step: FinishedStep) -> float:
    found = tools.times.gittins_ttl(step.calls, tools.fill_time.seconds)
    return tools.pin_seconds if found is None else found


def _posterior(tools: PolicyTools, step: FinishedStep) -> float:
    """Pins only if most calls return before keeping the KV costs more than it saves."""
    seconds = tools.times.posterior_ttl(step.calls, POSTERIOR_SHARE)
    return seconds if seconds <= tools.fill_time.seconds else 0.0


def _thompson(tools: PolicyTools, step: FinishedStep) -> float:
    seconds = tools.times.drawn_ttl(step.calls)
    return seconds if seconds <= tools.fill_time.seconds else 0.0


_RULES: dict[str, Callable[[PolicyTools, FinishedStep], float]] = {
    "fixed": _fixed,
    "cdf": _cdf,
    "posterior": _posterior,
    "thompson": _thompson,
    "gittins": _gittins,
}
