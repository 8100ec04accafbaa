"""For how long KV is worth keeping while a tool runs, given how long it took before. Pure functions.

durations: float64 [n], in order of length, in seconds. break_even_s: the seconds after which idle KV has cost more than
it saves, T_fill (policies/fill_time.py): keeping KV for t seconds costs t / T_fill of what computing it again costs.
"""

from __future__ import annotations

import numpy as np


def cdf_ttl(durations: np.ndarray, break_even_s: float) -> float:
    """The τ with the greatest P(T ≤ τ) − E[min(T, τ)] / T_fill: what keeping saves on average, less what it costs. 0 if
    it never pays. After Continuum, which takes the time to live from the distribution of a tool's times."""
    if not len(durations):
        return 0.0
    count = len(durations)
    back = np.arange(1, count + 1) / count
    held = (np.cumsum(durations) + (count - np.arange(1, count + 1)) * durations) / count
    gain = back - held / break_even_s
    best = int(np.argmax(gain))
    return float(durations[best]) if gain[best] > 0 else 0.0


def gittins_rate(durations: np.ndarray, age: float) -> float:
    """The best rate at which a tool that runs for ``age`` seconds already may still come back: the greatest
    P(T − age ≤ τ | T > age) ÷ E[min(T − age, τ) | T > age] over all τ, in 1/s. 0 if it never took longer.

    Gittins' index of a job of unknown length (Gittins 1979; Aalto, Ayesta, Righter 2009): for each second of keeping,
    no other plan brings more returns.
    """
    left = durations[np.searchsorted(durations, age, side="right") :] - age
    return float(_best_rate(left[None, :])[0]) if len(left) else 0.0


def gittins_ttl(durations: np.ndarray, break_even_s: float) -> float:
    """The first age at which `gittins_rate` is no more than 1 / T_fill: from then on keeping costs more than it saves.
    0 if that is so from the start.

    Between two durations the rate only rises, as the next one comes nearer; so it is looked at right after each. A
    history ends somewhere, and right before its end the rate rises again: the first crossing counts.
    """
    if not len(durations):
        return 0.0
    ages = np.unique(np.concatenate([[0.0], durations]))
    left = durations[None, :] - ages[:, None]
    rates = _best_rate(np.where(left > 0, left, np.nan))
    return float(ages[int(np.argmax(rates * break_even_s <= 1.0))])  # behind the longest the rate is 0


def _best_rate(left: np.ndarray) -> np.ndarray:
    """left: float64 [ages, n], in order; what is left of each duration, NaN where it is over. Returns float64 [ages]:
    over k, the greatest share that is back by the k-th, per mean time held until then."""
    counts = np.cumsum(~np.isnan(left), axis=1)
    known = np.nan_to_num(left)
    held = np.cumsum(known, axis=1) + (counts[:, -1:] - counts) * known
    return np.max(np.divide(counts, held, out=np.zeros_like(held), where=held > 0), axis=1)
