"""How long a step's KV is pinned once its calls are known: a rule for each name that ``--pin-time`` takes."""

from __future__ import annotations

from collections.abc import Callable

from ..jobs.job import FinishedStep
from .tools import PinTime, PolicyTools

MAX_PIN_S = 600.0
"""No tool is waited for longer; a lease would have been broken long before."""

POSTERIOR_SHARE = 0.8
"""Of the calls, those that are back within the time that `posterior` gives."""


def pin_seconds(tools: PolicyTools, own: PinTime, step: FinishedStep) -> float:
    """For how long a step is worth keeping, counted from its end. own: the rule of the policy that asks."""
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
    """If most calls are back before keeping costs more than it saves."""
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
