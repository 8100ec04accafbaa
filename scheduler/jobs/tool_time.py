"""How long a tool will take, as far as it can be known: the one place that policies ask.

finish of a step ──▶ arrival of the job's next request: that is a duration, kept under the name of what was called
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .calls import ToolCall, name_of
from .history import MAX_TOOLS, PER_TOOL, ToolHistory
from .lognormal import LogNormalBelief
from .speed import Speed, by_rules, by_times
from .ttl import cdf_ttl, gittins_rate, gittins_ttl

ENOUGH = 32
"""Durations of a tool from which on it is judged by these alone."""

_SHARES = (0.125, 0.375, 0.625, 0.875)
"""Before that, these quantiles of all tools' durations count among its own: one who has come back once may not always
come back that fast, nor never later."""

PRIOR_WORTH = 2.0
"""Durations that what is known of all tools is worth for one of them."""

Calls = tuple[ToolCall, ...] | None
"""None: not read yet."""


class ToolTimes:
    """Owns the history. ``seed``: of what is drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self.history = ToolHistory()
        self._rng = np.random.default_rng(seed)
        self._ttls: OrderedDict[tuple[str, str | None], tuple[int, float, float]] = OrderedDict()
        """By kind and name: (durations added by then, the break-even time, the time to live)."""

    def observe(self, calls: tuple[ToolCall, ...], seconds: float) -> None:
        """The tools of a step took so long, or so long passed until somebody was back."""
        self.history.add(name_of(calls), seconds)

    def durations(self, calls: Calls) -> np.ndarray:
        """float64 [n], in order of length: what to go by for these calls. Empty if nothing is known of any tool."""
        own, every = self.history.of(name_of(calls) if calls is not None else ""), self.history.of_all()
        if calls is None:
            return every
        if len(own) >= ENOUGH or not len(every):
            return own
        return np.sort(np.concatenate([own, np.quantile(every, _SHARES)]))

    def predicted_s(self, calls: Calls) -> float | None:
        """The median; None if nothing is known."""
        durations = self.durations(calls)
        return float(np.median(durations)) if len(durations) else None

    def fixed_ttl(self, calls: Calls, threshold_s: float) -> float:
        """The threshold where the tool is known to take less on average, or is not known; else 0."""
        own = self.history.of(name_of(calls)) if calls is not None else ()
        return threshold_s if not len(own) or float(np.mean(own)) <= threshold_s else 0.0

    def cdf_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """See ttl.py; None if nothing is known."""
        return self._kept("cdf", calls, break_even_s)

    def gittins_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """See ttl.py; None if nothing is known."""
        return self._kept("gittins", calls, break_even_s)

    def gittins_rate(self, calls: Calls, age: float) -> float | None:
        """In 1/s; None if nothing is known."""
        durations = self.durations(calls)
        return gittins_rate(durations, age) if len(durations) else None

    def belief(self, calls: Calls) -> LogNormalBelief:
        """What is believed of the tool: what is known of all, and its own times."""
        prior = LogNormalBelief().after(self.history.of_all()).as_prior(PRIOR_WORTH)
        return prior if calls is None else prior.after(self.history.of(name_of(calls)))

    def posterior_ttl(self, calls: Calls, share: float) -> float:
        """Seconds within which that share of the tool's calls is believed to be back."""
        return self.belief(calls).quantile(share)

    def drawn_ttl(self, calls: Calls) -> float:
        """Seconds of one call, as it may be: now and then a tool of which little is known is given more than it seems
        to deserve, and becomes known by it (Thompson sampling)."""
        return self.belief(calls).draw(self._rng)

    def speed(self, calls: tuple[ToolCall, ...], *, fast_s: float, slow_s: float) -> Speed:
        """By rules; where they say nothing, by what is believed of its times."""
        speed = by_rules(calls)
        if speed is not Speed.UNCERTAIN or not len(self.history.of(name_of(calls))):
            return speed
        belief = self.belief(calls)
        return by_times(belief.quantile(0.2), belief.quantile(0.8), fast_s=fast_s, slow_s=slow_s)

    def save(self) -> bytes:
        return self.history.save()

    def load(self, data: bytes) -> None:
        """Raises ValueError."""
        self.history.load(data)
        self._ttls.clear()

    def _kept(self, kind: str, calls: Calls, break_even_s: float) -> float | None:
        """Computed again once a sixteenth of the durations is new, or the break-even time has moved by a tenth: with a
        full history it takes a millisecond."""
        name = name_of(calls) if calls is not None else None
        added = self.history.added[name] or self.history.added[None]
        if not added:
            return None
        known = self._ttls.get((kind, name))
        if known is None or 16 * (added - known[0]) > min(added, PER_TOOL) or abs(known[1] / break_even_s - 1) > 0.1:
            ttl = (cdf_ttl if kind == "cdf" else gittins_ttl)(self.durations(calls), break_even_s)
            known = self._ttls[kind, name] = added, break_even_s, ttl
            while len(self._ttls) > 2 * MAX_TOOLS:
                self._ttls.popitem(last=False)
        return known[2]
