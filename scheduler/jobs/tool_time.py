"""Estimates how long a tool will take; policies take all their estimates from here.

a step ends ──▶ the job's next request arrives: the time between is a duration, kept under the name of the called tools

Few durations must not be read as "never longer than the longest": leases would end a moment before the return. So times
to live are computed from a mixture: the observed durations, each of weight 1, and the belief about the tool
(`LogNormalBelief`), of total weight BELIEF_WORTH. This is the prediction of a Dirichlet process with that base. For a
tool never seen, the durations of all tools are used; for one seen often, its own dominate, and the belief adds only a
tail.

After an answer without calls the user is the tool. Users read and think, tools run: neither says anything about the
other, so the user's durations are learned alone, and nothing stands in for them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .calls import USER, ToolCall, name_of, text_of
from .history import MAX_TOOLS, PER_TOOL, ToolHistory
from .speed import LearnedSpeed, Speed, by_rules, by_times

BELIEF_WORTH = 2.0
"""Weight of the belief about a tool, in observed durations."""

_NORMAL = np.array([NormalDist().inv_cdf((part + 0.5) / 32) for part in range(32)])
"""Points that stand for the belief in the mixture, all of one weight: normal quantiles in the middle of equal
shares."""

PRIOR_WORTH = 2.0
"""Weight of the belief about all tools, in observed durations, when it is the prior for one tool."""

ENOUGH = 8
"""Observed durations from which the chance of a return is judged by them alone."""

LEAST_S = 1e-3
"""Shorter durations count as this: 0 has no logarithm, and such differences do not matter."""

MOST_LOG = 50.0
"""Upper bound of a duration's logarithm: keeps the far tail finite where there is little data."""

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
        self._usual: dict[tuple[str, float, float], tuple[int, float | None]] = {}
        """Results of `usual_s`, by its arguments: (durations added by then, the result)."""

    def record_duration(self, calls: tuple[ToolCall, ...], seconds: float) -> None:
        """Record how long the tools of a step took; without calls, how long the user took to answer."""
        self.history.add_duration(name_of(calls), seconds)
        if self._learned is not None and calls:
            self.history.commands.append((text_of(calls), seconds))
            self._learned.learn_duration(text_of(calls), seconds)

    def expected(self, calls: Calls) -> tuple[np.ndarray, np.ndarray | None]:
        """(durations, their weights), float64 [n] each, ascending: the mixture to use for these calls; weights None:
        all the same. Empty if nothing is known of any tool."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        if not len(own) or calls is None:
            return self._of_unseen(calls), None
        both = np.concatenate([own, self.belief(calls).quantiles(_NORMAL)])
        weights = np.concatenate([np.ones(len(own)), np.full(len(_NORMAL), BELIEF_WORTH / len(_NORMAL))])
        order = np.argsort(both, kind="stable")
        return both[order], weights[order]

    def predicted_s(self, calls: Calls) -> float | None:
        """Median duration in seconds, over all tools if this one was never seen; None if nothing is known."""
        own = self.history.durations_of(name_of(calls)) if calls is not None else ()
        durations = own if len(own) else self._of_unseen(calls)
        middle = durations[(len(durations) - 1) // 2 : len(durations) // 2 + 1]  # ascending
        return float(np.mean(middle)) if len(durations) else None

    def _of_unseen(self, calls: Calls) -> np.ndarray:
        """The durations that stand in for those of a tool never seen: of all tools. float64 [n], ascending; empty for
        the user."""
        return self.history.all_durations() if calls != () else np.empty(0)

    def chance(self, calls: tuple[ToolCall, ...], within_s: float) -> float | None:
        """The share of the observed durations that are no longer than ``within_s``; None of fewer than `ENOUGH`."""
        durations = self.history.durations_of(name_of(calls))
        if len(durations) < ENOUGH:
            return None
        return float(np.searchsorted(durations, within_s, "right")) / len(durations)

    def stay_s(self, calls: tuple[ToolCall, ...], within_s: float, chance: float, never_s: float) -> float | None:
        """The longest time away after which a return within another ``within_s`` seconds was still at least as likely
        as ``chance``, by the observed durations; None of fewer than `ENOUGH`. never_s: such a duration stands for a job
        that never returned."""
        durations = self.history.durations_of(name_of(calls))
        return longest_stay(durations, within_s, chance, never_s) if len(durations) >= ENOUGH else None

    def usual_s(self, calls: tuple[ToolCall, ...], share: float, never_s: float) -> float | None:
        """Seconds within which ``share`` of the calls that returned did so; None of fewer than `ENOUGH`. never_s: such
        a duration stands for a job that never returned."""
        name = name_of(calls)
        key, added = (name, share, never_s), self.history.added[name]
        known = self._usual.get(key)
        if known is None or known[0] != added:
            durations = self.history.durations_of(name)
            returned = int(np.searchsorted(durations, never_s))
            found = float(durations[math.ceil(share * returned) - 1]) if returned >= ENOUGH else None
            known = self._usual[key] = added, found
            if len(self._usual) > MAX_TOOLS:
                del self._usual[next(iter(self._usual))]
        return known[1]

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

    def may_return(self, calls: Calls, within_s: float) -> bool:
        """Too little is known to rule out that the called tool returns within this time: it, or all tools if it was
        never seen, have fewer than `ENOUGH` durations, and not all of those are longer. False for the user."""
        if not calls:
            return False
        own = self.history.durations_of(name_of(calls))
        durations = own if len(own) else self.history.all_durations()
        return len(durations) < ENOUGH and (not len(durations) or float(durations[0]) <= within_s)

    def belief(self, calls: Calls) -> LogNormalBelief:
        """The belief about the tool: the one about all tools as a prior, updated with its own durations."""
        prior = LogNormalBelief().after(self._of_unseen(calls)).as_prior(PRIOR_WORTH)
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
        self._usual.clear()
        if self._learned is not None:
            self._learned = LearnedSpeed()
            self._learned.learn_durations(self.history.commands)

    def _kept(self, kind: str, calls: Calls, break_even_s: float) -> float | None:
        """The best time to live, cached: computed again once a sixteenth of the durations is new or the break-even time
        has moved by a tenth. With a full history it takes a millisecond."""
        name = name_of(calls) if calls is not None else None
        seen = name if self.history.added[name] else None  # a tool never seen uses the durations of all tools
        added = self.history.added[seen]
        if not added or (name == USER and seen is None):
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


def best_ttl(durations: np.ndarray, break_even_s: float, weights: np.ndarray | None = None) -> float:
    """The τ, of 0 and the durations, with the greatest P(T ≤ τ) − E[min(T, τ)] / T_fill: what keeping saves on average,
    less what it costs. The smallest, if there are several; 0 where computing again costs nothing.

    durations: float64 [n], in order of length, in seconds. weights: float64 [n], what each of them counts; None: all
    the same. break_even_s: the seconds after which idle KV has cost more than it saves, T_fill
    (policies/fill_time.py): keeping KV for t seconds costs t / T_fill of what computing it again costs.

    It is also the first age at which Gittins' index of the tool, the greatest P(T − age ≤ τ | T > age) ÷
    E[min(T − age, τ) | T > age] over all τ, is no more than 1 / T_fill (Gittins 1979; Aalto, Ayesta, Righter 2009):
    the index is above that just where some longer τ gains more than stopping now, so at each age before the best τ, and
    no more at it. A history ends somewhere, and right before its end the index rises again: the first crossing counts.
    Continuum takes its time to live from the distribution of a tool's times in such a way, too.
    """
    if not len(durations) or break_even_s <= 0:
        return 0.0
    counts = np.arange(1, len(durations) + 1) if weights is None else np.cumsum(weights)
    longer = 1.0 - counts / counts[-1]
    before = np.concatenate(([1.0], longer[:-1]))
    held = np.cumsum(before * np.diff(durations, prepend=0.0))  # E[min(T, τ)] for each duration τ
    gain = 1.0 - longer - held / break_even_s
    best = int(np.argmax(gain))
    return float(durations[best]) if gain[best] > 0 else 0.0


def longest_stay(durations: np.ndarray, within_s: float, chance: float, never_s: float) -> float:
    """See `ToolTimes.stay_s`. 0 if no return was ever that likely. durations: float64 [n], n > 0, ascending."""
    count, returned = len(durations), int(np.searchsorted(durations, never_s))
    ages = durations[:returned]
    gone = np.searchsorted(durations, ages)
    back = np.minimum(np.searchsorted(durations, ages + within_s, "right"), returned)
    likely = np.flatnonzero((back - gone) >= chance * (count - gone))
    return float(ages[likely[-1]]) if len(likely) else 0.0


@dataclass(frozen=True, slots=True)
class LogNormalBelief:
    """mean, weight: the expected mean of the log durations, and the number of durations which that belief is worth.
    shape, scale: inverse-gamma parameters of their variance. The default knows next to nothing: a second, give or take
    a factor of ten."""

    mean: float = 0.0
    weight: float = 1.0
    shape: float = 2.0
    scale: float = 5.0

    def after(self, durations: np.ndarray) -> LogNormalBelief:
        """The belief updated with these durations in seconds, float64 [n]."""
        count = len(durations)
        if not count:
            return self
        logs = np.log(np.maximum(durations, LEAST_S))
        seen, spread = float(logs.mean()), float(((logs - logs.mean()) ** 2).sum())
        weight = self.weight + count
        between = self.weight * count * (seen - self.mean) ** 2 / (2 * weight)
        return LogNormalBelief(
            (self.weight * self.mean + count * seen) / weight,
            weight,
            self.shape + count / 2,
            self.scale + spread / 2 + between,
        )

    def as_prior(self, worth: float) -> LogNormalBelief:
        """The same belief, but worth at most ``worth`` durations: turns the belief about all tools into a prior for
        one."""
        shape = min(self.shape, 2.0 + worth / 2)
        return LogNormalBelief(
            self.mean, min(self.weight, worth), shape, self.scale * max(shape - 1, 1) / max(self.shape - 1, 1)
        )

    def quantile(self, share: float) -> float:
        """Seconds within which ``share`` of the tool's calls is expected to return."""
        return float(self.quantiles(np.array([NormalDist().inv_cdf(share)]))[0])

    def quantiles(self, normal: np.ndarray) -> np.ndarray:
        """As `quantile` for several shares, given as quantiles of the normal distribution, float64 [n]: computing those
        takes longest, and the caller can keep them."""
        spread = math.sqrt(self.scale * (self.weight + 1) / (self.shape * self.weight))
        return np.exp(np.minimum(self.mean + spread * _student_t(normal, 2 * self.shape), MOST_LOG))

    def draw(self, rng: np.random.Generator) -> float:
        """A duration in seconds, under parameters drawn from the belief (Thompson 1933)."""
        variance = self.scale / rng.gamma(self.shape)
        mean = rng.normal(self.mean, math.sqrt(variance / self.weight))
        return _exp(rng.normal(mean, math.sqrt(variance)))


def student_t_quantile(share: float, freedom: float) -> float:
    """Quantile of Student's t distribution with ``freedom`` degrees of freedom, at least 3. The relative error is at
    most 1 % up to a share of 0.99 with 4 degrees (Abramowitz and Stegun, 26.7.5)."""
    return float(_student_t(np.array([NormalDist().inv_cdf(share)]), freedom)[0])


def _student_t(z: np.ndarray, freedom: float) -> np.ndarray:
    """z: quantiles of the normal distribution, float64 [n]. Returns the quantiles of Student's t at the same shares."""
    z2 = z * z
    terms = (
        (z2 + 1) * z / 4,
        ((5 * z2 + 16) * z2 + 3) * z / 96,
        (((3 * z2 + 19) * z2 + 17) * z2 - 15) * z / 384,
        ((((79 * z2 + 776) * z2 + 1482) * z2 - 1920) * z2 - 945) * z / 92160,
    )
    return z + sum((term / freedom**power for power, term in enumerate(terms, 1)), np.zeros_like(z))


def _exp(log: float) -> float:
    return math.exp(min(log, MOST_LOG))
