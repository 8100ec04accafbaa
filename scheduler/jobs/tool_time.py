"""Estimates how long a tool will take; policies take all their estimates from here.

a step ends ──▶ the job's next request arrives: the time between is a duration, kept under the name of the called tools

Few durations must not be read as "never longer than the longest": leases would end a moment before the return. So times
to live are computed from a mixture: the observed durations, each of weight 1, and the belief about the tool
(lognormal.py), of total weight BELIEF_WORTH. This is the prediction of a Dirichlet process with that base. For a tool
never seen, the durations of all tools are used; for one seen often, its own dominate, and the belief adds only a tail.
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
"""Weight of the belief about a tool, in observed durations."""

_NORMAL = np.array([NormalDist().inv_cdf((part + 0.5) / 32) for part in range(32)])
"""Points that stand for the belief in the mixture, all of one weight: normal quantiles in the middle of equal
shares."""

PRIOR_WORTH = 2.0
"""Weight of the belief about all tools, in observed durations, when it is the prior for one tool."""

Calls = tuple[ToolCall, ...] | None
"""The calls of a step; None while its text has not been parsed."""


class ToolTimes:
    """Owns the history. seed: for random draws. learn: also train a model on the words of commands, which needs
    scikit-learn and puts the commands into the saved history."""

    def __init__(self, seed: int = 0, learn: bool = False) -> None:
        self.history = ToolHistory(with_commands=learn)
        self._learned = LearnedSpeed() if learn else None
        self._rng = np.random.default_rng(seed)
        self._ttls: OrderedDict[tuple[str, str | None], tuple[int, float, float]] = OrderedDict()
        """Cached times to live, by kind and name (None for all tools): (durations added by then, the break-even time,
        the time to live)."""

    def observe(self, calls: tuple[ToolCall, ...], seconds: float) -> None:
        """Record how long the tools of a step took; without calls, how long the user took to answer."""
        self.history.add_duration(name_of(calls), seconds)
        if self._learned is not None and calls:
            self.history.commands.append((text_of(calls), seconds))
            self._learned.observe(text_of(calls), seconds)

    def expected(self, calls: Calls) -> tuple[np.ndarray, np.ndarray | None]:
        """(durations, their weights), float64 [n] each, ascending: the mixture to use for these calls; weights None:
        all the same. Empty if nothing is known of any tool."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        if not len(own) or calls is None:
            return self.history.all_durations(), None
        both = np.concatenate([own, self.belief(calls).quantiles(_NORMAL)])
        weights = np.concatenate([np.ones(len(own)), np.full(len(_NORMAL), BELIEF_WORTH / len(_NORMAL))])
        order = np.argsort(both, kind="stable")
        return both[order], weights[order]

    def predicted_s(self, calls: Calls) -> float | None:
        """Median duration in seconds, over all tools if this one was never seen; None if nothing is known."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        durations = own if len(own) else self.history.all_durations()
        middle = durations[(len(durations) - 1) // 2 : len(durations) // 2 + 1]  # ascending
        return float(np.mean(middle)) if len(durations) else None

    def fixed_ttl(self, calls: Calls, threshold_s: float) -> float:
        """``threshold_s`` if the tool is unknown or takes at most that long on average; else 0."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        return threshold_s if not len(own) or float(np.mean(own)) <= threshold_s else 0.0

    def cdf_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """The best time to live by the tool's durations alone, or by those of all tools if it was never seen; None if
        nothing is known."""
        return self._kept("cdf", calls, break_even_s)

    def gittins_ttl(self, calls: Calls, break_even_s: float) -> float | None:
        """The best time to live by the `expected` mixture; None if nothing is known."""
        return self._kept("gittins", calls, break_even_s)

    def belief(self, calls: Calls) -> LogNormalBelief:
        """The belief about the tool: the one about all tools as a prior, updated with its own durations."""
        prior = LogNormalBelief().after(self.history.all_durations()).as_prior(PRIOR_WORTH)
        return prior if calls is None else prior.after(self.history.durations_of(name_of(calls)))

    def posterior_ttl(self, calls: Calls, share: float) -> float:
        """Seconds within which ``share`` of the tool's calls is believed to return."""
        return self.belief(calls).quantile(share)

    def drawn_ttl(self, calls: Calls) -> float:
        """A duration in seconds, drawn from the belief (Thompson sampling): now and then a little-known tool gets more
        time than it seems to deserve, and becomes known by it."""
        return self.belief(calls).draw(self._rng)

    def speed(self, calls: tuple[ToolCall, ...], *, fast_s: float, slow_s: float) -> Speed:
        """Classify by rules; where those are uncertain, by the belief about its durations; where that is uncertain,
        too, by the model trained on commands."""
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
        """The best time to live, cached: computed again once a sixteenth of the durations is new or the break-even time
        has moved by a tenth. With a full history it takes a millisecond."""
        name = name_of(calls) if calls is not None else None
        seen = name if self.history.added[name] else None  # a tool never seen uses the durations of all tools
        added = self.history.added[seen]
        if not added:
            return None
        known = self._ttls.get((kind, seen))
        if (
            known is None
            or 16 * abs(added - known[0]) > min(added, PER_TOOL)  # fewer, too: the tool was forgotten and is back
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
