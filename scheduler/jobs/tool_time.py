"""How long a tool will take, as far as it can be known: the one place that policies ask.

finish of a step ──▶ arrival of the job's next request: that is a duration, kept under the name of what was called

Few durations must not be read as "never longer than the longest": leases would end a moment before the return. So
times to live go by a mixture of the durations, each of weight 1, and of what is believed of the tool (lognormal.py), of
weight BELIEF_WORTH in all: what a Dirichlet process with that base predicts. A tool never seen goes by all tools; one
seen often goes by its own durations, and gets no more than a tail from its belief.
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import NormalDist

import numpy as np

from .calls import ToolCall, name_of, text_of
from .history import MAX_TOOLS, PER_TOOL, ToolHistory
from .learned import LearnedSpeed
from .lognormal import LogNormalBelief
from .speed import Speed, by_rules, by_times
from .ttl import best_ttl

BELIEF_WORTH = 2.0
"""Durations that what is believed of a tool is worth beside those that were seen."""

_NORMAL = np.array([NormalDist().inv_cdf((part + 0.5) / 32) for part in range(32)])
"""It counts as so many durations of equal weight: the quantiles in the middle of equal shares."""

PRIOR_WORTH = 2.0
"""Durations that what is known of all tools is worth for one of them."""

Calls = tuple[ToolCall, ...] | None
"""None: not read yet."""


class ToolTimes:
    """Owns the history. ``seed``: of what is drawn at random. ``learn``: also from the words of commands, which needs
    scikit-learn and puts them into the saved history."""

    def __init__(self, seed: int = 0, learn: bool = False) -> None:
        self.history = ToolHistory(with_commands=learn)
        self._learned = LearnedSpeed() if learn else None
        self._rng = np.random.default_rng(seed)
        self._ttls: OrderedDict[tuple[str, str | None], tuple[int, float, float]] = OrderedDict()
        """By kind and name, None for all tools: (durations added by then, the break-even time, the time to live)."""

    def observe(self, calls: tuple[ToolCall, ...], seconds: float) -> None:
        """The tools of a step took so long, or so long passed until somebody was back."""
        self.history.add_duration(name_of(calls), seconds)
        if self._learned is not None and calls:
            self.history.commands.append((text_of(calls), seconds))
            self._learned.observe(text_of(calls), seconds)

    def expected(self, calls: Calls) -> tuple[np.ndarray, np.ndarray | None]:
        """(durations, their weights), float64 [n] each, in order of length: what to go by for these calls. Empty if
        nothing is known of any tool."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        if not len(own) or calls is None:
            return self.history.all_durations(), None
        both = np.concatenate([own, self.belief(calls).quantiles(_NORMAL)])
        weights = np.concatenate([np.ones(len(own)), np.full(len(_NORMAL), BELIEF_WORTH / len(_NORMAL))])
        order = np.argsort(both, kind="stable")
        return both[order], weights[order]

    def predicted_s(self, calls: Calls) -> float | None:
        """The median, of all tools where this one was never seen; None if nothing is known."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        durations = own if len(own) else self.history.all_durations()
        middle = durations[(len(durations) - 1) // 2 : len(durations) // 2 + 1]  # they are in order
        return float(np.mean(middle)) if len(durations) else None

    def fixed_ttl(self, calls: Calls, threshold_s: float) -> float:
        """The threshold where the tool is known to take less on average, or is not known; else 0."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        return threshold_s if not len(own) or float(np.mean(own)) <= threshold_s else 0.0

    def cdf_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """The best by the tool's durations alone, or by those of all tools if it was never seen; None if nothing is
        known."""
        return self._kept("cdf", calls, break_even_s)

    def gittins_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """The best by what is `expected`; None if nothing is known."""
        return self._kept("gittins", calls, break_even_s)

    def belief(self, calls: Calls) -> LogNormalBelief:
        """What is believed of the tool: what is known of all, and its own times."""
        prior = LogNormalBelief().after(self.history.all_durations()).as_prior(PRIOR_WORTH)
        return prior if calls is None else prior.after(self.history.durations_of(name_of(calls)))

    def posterior_ttl(self, calls: Calls, share: float) -> float:
        """Seconds within which that share of the tool's calls is believed to be back."""
        return self.belief(calls).quantile(share)

    def drawn_ttl(self, calls: Calls) -> float:
        """Seconds of one call, as it may be: now and then a tool of which little is known is given more than it seems
        to deserve, and becomes known by it (Thompson sampling)."""
        return self.belief(calls).draw(self._rng)

    def speed(self, calls: tuple[ToolCall, ...], *, fast_s: float, slow_s: float) -> Speed:
        """By rules; where they say nothing, by what is believed of its times; where that is unclear, by what was
        learned from commands."""
        speed = by_rules(calls)
        if speed is Speed.UNCERTAIN and len(self.history.durations_of(name_of(calls))):
            belief = self.belief(calls)
            speed = by_times(belief.quantile(0.2), belief.quantile(0.8), fast_s=fast_s, slow_s=slow_s)
        if speed is Speed.UNCERTAIN and self._learned is not None and calls:
            speed = self._learned.speed(text_of(calls))
        return speed

    def save(self) -> bytes:
        return self.history.save()

    def load(self, data: bytes) -> None:
        """Raises ValueError."""
        self.history.load(data)
        self._ttls.clear()
        if self._learned is not None:
            self._learned = LearnedSpeed()
            self._learned.observe_all(self.history.commands)

    def _kept(self, kind: str, calls: Calls, break_even_s: float) -> float | None:
        """Computed again once a sixteenth of the durations is new, or the break-even time has moved by a tenth: with a
        full history it takes a millisecond."""
        name = name_of(calls) if calls is not None else None
        seen = name if self.history.added[name] else None  # one never seen goes by all tools, until it has been
        added = self.history.added[seen]
        if not added:
            return None
        known = self._ttls.get((kind, seen))
        if (
            known is None
            or 16 * abs(added - known[0]) > min(added, PER_TOOL)  # less, too: it was forgotten, and is back
            or abs(known[1] - break_even_s) > 0.1 * break_even_s
        ):
            durations, weights = self.expected(calls)
            if kind == "cdf":
                durations = self.history.durations_of(seen) if seen is not None else self.history.all_durations()
                weights = None
            known = self._ttls[kind, seen] = added, break_even_s, best_ttl(durations, break_even_s, weights)
            while len(self._ttls) > 2 * MAX_TOOLS:
                self._ttls.popitem(last=False)
        return known[2]
