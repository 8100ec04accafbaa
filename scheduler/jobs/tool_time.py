"""How long tools take: the one owner of what is known about it, and of every estimate made from that.

A key (calls.name_of) has few durations at first, and few samples must not be read as "never longer than the longest
seen": that would end leases a moment before the return. So what the TTL rules see is a mixture. Its samples weigh 1
each, and the log-normal posterior predictive (posterior.py), cut into ATOMS equal parts, weighs PSEUDO in all: the
predictive distribution of a Dirichlet process with that base. For a tool never seen it is the prior, which comes from
all tools; with many samples the base only adds a tail, so that a tool that is a little slower than ever is still
waited for. On seven kinds of tools, 0 to 256 samples and three benefits the mixture lost 0.037 benefits a call against
the best TTL of the true law, where samples alone lost 0.157 and the base alone 0.041.
"""

from __future__ import annotations

import numpy as np

from .calls import ToolCall, name_of, text_of
from .history import History
from .learned import LearnedSpeed
from .posterior import LogNormal
from .speed import Speed, rule_of, speed_between
from .ttl import FIXED_S, Durations, best_ttl, fixed_ttl, gittins_rate, gittins_ttl

PSEUDO, ATOMS = 2.0, 32

LEVELS = (np.arange(ATOMS) + 0.5) / ATOMS

CLEAR = 0.8
"""A tool is fast or slow if the next call is so with this probability."""

ENOUGH = 16
"""Durations of a key from which they say more than a rule about its name."""

AHEAD = 0.1
"""The rate of a lease looks ahead at least by this share of its age, and AHEAD_S: samples are no smooth law."""
AHEAD_S = 0.01


class _Known:
    """What was worked out about one key, until its durations or the prior change."""

    def __init__(self, seconds: np.ndarray, prior: LogNormal) -> None:
        self.prior = prior
        self.mean_s = float(seconds.mean()) if len(seconds) else None
        self.samples = np.sort(seconds)
        self.samples.flags.writeable = False
        self.posterior = prior.after(seconds)
        weights = np.concatenate((np.ones(len(seconds)), np.full(ATOMS, PSEUDO / ATOMS)))
        self.durations = Durations.of(np.concatenate((seconds, self.posterior.quantiles(LEVELS))), weights)
        self.speed = speed_between(self.posterior.quantile(1.0 - CLEAR), self.posterior.quantile(CLEAR))


class ToolTimes:
    """Durations of tool calls, and estimates. learned: also learn from the commands themselves, which needs
    scikit-learn and writes them to the history file. Calls side by side that were never seen together are taken for the
    slowest of them, if each is known alone. Nothing here is random but draw_s, and that takes its rng."""

    def __init__(self, learned: bool = False) -> None:
        self._history = History(keep_commands=learned)
        self._learned = LearnedSpeed() if learned else None
        self._known: dict[str | None, _Known] = {}

    def observe(self, calls: tuple[ToolCall, ...], seconds: float) -> None:
        """These calls came back: their job's next request arrived so long after the step that made them."""
        name, command = name_of(calls), text_of(calls)
        for forgotten in (name, *self._history.add(name, command, seconds)):
            self._known.pop(forgotten, None)
        if self._learned is not None and calls:
            self._learned.observe(command, seconds)

    def samples(self, calls: tuple[ToolCall, ...]) -> np.ndarray:
        """Durations of such calls, seconds, float64 ascending, read-only; empty if none is known."""
        return self._know(calls).samples

    def predicted_s(self, calls: tuple[ToolCall, ...]) -> float | None:
        """The median of the durations of such calls; None if none is known."""
        samples = self._know(calls).samples
        return float(np.median(samples)) if len(samples) else None

    def fixed_ttl(self, calls: tuple[ToolCall, ...], threshold_s: float = FIXED_S) -> float:
        """All or nothing, by the mean of the durations of such calls (ttl.fixed_ttl)."""
        return fixed_ttl(self._know(calls).mean_s, threshold_s)

    def cdf_ttl(
        self, calls: tuple[ToolCall, ...], benefit_s: float, price: float = 1.0, default_s: float = FIXED_S
    ) -> float:
        """The TTL of the largest expected gain (ttl.best_ttl). default_s: if no tool was ever seen."""
        return best_ttl(self._know(calls).durations, benefit_s, price) if self._any else default_s

    def gittins_ttl(self, calls: tuple[ToolCall, ...], t_fill: float, default_s: float = FIXED_S) -> float:
        """The age at which waiting on stops to pay (ttl.gittins_ttl). default_s: if no tool was ever seen."""
        return gittins_ttl(self._know(calls).durations, t_fill) if self._any else default_s

    def gittins_rate(self, calls: tuple[ToolCall, ...], age: float) -> float:
        """How likely such calls, out for ``age`` seconds, return, per second of waiting: what their lease is worth. 0
        beyond all that is known or expected. Where no tool was ever seen, the assumptions of posterior.py speak."""
        return gittins_rate(self._know(calls).durations, age, max(AHEAD_S, AHEAD * age))

    def posterior_ttl(self, calls: tuple[ToolCall, ...], q: float, default_s: float = FIXED_S) -> float:
        """Waits for a share q of such calls, by the posterior predictive. default_s: if no tool was ever seen."""
        return self._know(calls).posterior.quantile(q) if self._any else default_s

    def draw_s(self, calls: tuple[ToolCall, ...], rng: np.random.Generator) -> float:
        """Thompson sampling: a median duration of such calls, drawn from what is known about it."""
        return self._know(calls).posterior.draw_median(rng)

    def speed(self, calls: tuple[ToolCall, ...]) -> Speed:
        """Rules on the words; durations, which overrule a rule that knows no more than the tool's name; the model."""
        known, rule = self._know(calls), rule_of(calls)
        measured = known.speed if len(known.samples) else Speed.UNCERTAIN
        overruled = measured is not Speed.UNCERTAIN and len(known.samples) >= ENOUGH
        if rule is not None and not (rule.by_name and overruled):
            return rule.speed
        if measured is Speed.UNCERTAIN and self._learned is not None and calls:
            return self._learned.speed(text_of(calls))
        return measured

    def save(self) -> bytes:
        """All durations, as JSON (history.py)."""
        return self._history.save()

    def load(self, data: bytes) -> None:
        """Take what was saved instead of all that is known. Raises ValueError, with nothing changed, if it cannot."""
        self._history.load(data)
        self._known = {}
        if self._learned is not None:
            self._learned = LearnedSpeed()
            self._learned.observe_all(self._history.commands)

    @property
    def _any(self) -> bool:
        return self._history.overall.count > 0

    def _know(self, calls: tuple[ToolCall, ...]) -> _Known:
        name = name_of(calls)
        if name not in self._history and len(calls) > 1:
            alone = [name_of((call,)) for call in calls]
            if all(one in self._history for one in alone):
                name = max(alone, key=lambda one: self._know_name(one).posterior.mean)
        return self._know_name(name)

    def _know_name(self, name: str) -> _Known:
        key = name if name in self._history else None  # all that were never seen are alike
        known = self._known.get(key)
        if known is None or known.prior is not self._history.prior:
            known = self._known[key] = _Known(self._history.seconds(name), self._history.prior)
        return known
