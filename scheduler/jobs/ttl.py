"""For how long KV is worth keeping while a tool runs, given how long it took before. Pure functions.

durations: float64 [n], in order of length, in seconds. weights: float64 [n], what each of them counts; None: all the
same. break_even_s: the seconds after which idle KV has cost more than it saves, T_fill (policies/fill_time.py): keeping
KV for t seconds costs t / T_fill of what computing it again costs.
"""

from __future__ import annotations

import numpy as np

LEAST_HELD_S = 1e-9
"""Time held that counts as none: keeps a rate finite."""


def cdf_ttl(durations: np.ndarray, break_even_s: float, weights: np.ndarray | None = None) -> float:
    """The τ with the greatest P(T ≤ τ) − E[min(T, τ)] / T_fill: what keeping saves on average, less what it costs. 0 if
    it never pays. After Continuum, which takes the time to live from the distribution of a tool's times."""
    if not len(durations):
        return 0.0
    longer, held = _curves(durations, weights)
    gain = 1.0 - longer - held / break_even_s
    best = int(np.argmax(gain))
    return float(durations[best]) if gain[best] > 0 else 0.0


def gittins_rate(
    durations: np.ndarray, age: float, weights: np.ndarray | None = None, at_least_s: float = 0.0
) -> float:
    """The best rate at which a tool that runs for ``age`` seconds already may still come back: the greatest
    P(T − age ≤ τ | T > age) ÷ E[min(T − age, τ) | T > age] over all τ, in 1/s. 0 if it never took longer.

    Gittins' index of a job of unknown length (Gittins 1979; Aalto, Ayesta, Righter 2009): for each second of keeping,
    no other plan brings more returns. at_least_s: the shortest τ that is looked at. Right before each duration that was
    seen the rate over ever shorter times grows without bound, which says more about the sample than about the tool.
    """
    first = int(np.searchsorted(durations, age, side="right"))
    if first == len(durations):
        return 0.0
    left = durations[first:] - age
    longer, held = _curves(left, None if weights is None else weights[first:])
    if at_least_s > 0.0:
        reached = int(np.searchsorted(left, at_least_s, side="right"))
        share, so_far, since = (
            (longer[reached - 1], held[reached - 1], left[reached - 1]) if reached else (1.0, 0.0, 0.0)
        )
        longer = np.append(longer[reached:], share)
        held = np.append(held[reached:], so_far + (at_least_s - since) * share)
    return float(np.max((1.0 - longer) / np.maximum(held, LEAST_HELD_S)))


def gittins_ttl(durations: np.ndarray, break_even_s: float, weights: np.ndarray | None = None) -> float:
    """The first age at which `gittins_rate` is no more than 1 / T_fill: from then on keeping costs more than it saves.
    0 if that is so from the start. A history ends somewhere, and right before its end the rate rises again: the first
    crossing counts.

    It is the age of the greatest gain. The rate is above 1 / T_fill just where a longer τ gains more than stopping now:
    so at each age before the best τ, and no more at it. One pass finds that, where ages tried one by one take n².
    """
    return cdf_ttl(durations, break_even_s, weights)


def _curves(durations: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """For each duration τ, float64 [n] twice: P(T > τ), equals that follow in the order taken for longer, which changes
    no maximum; and E[min(T, τ)]."""
    count = len(durations)
    if weights is None:
        longer = np.arange(count - 1, -1, -1) / count
    else:
        sums = np.cumsum(weights)
        longer = 1.0 - sums / sums[-1]
    before = np.concatenate(([1.0], longer[:-1]))
    return longer, np.cumsum(before * np.diff(durations, prepend=0.0))
