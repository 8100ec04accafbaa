"""For how long KV is worth keeping while a tool runs, given how long it took before."""

from __future__ import annotations

import numpy as np


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
