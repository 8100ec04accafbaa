"""How soon idle KV is used again, learned per class from past uses.

A **spell** is the time for which KV lies idle. It ends when the KV is used again, or is evicted, which says only
that it was not used until then. So the chance of reuse at each idle time is that of Kaplan and Meier: reuses ÷ spells
that got so far. Few spells say little: those of a class are mixed with those of all classes of its kind, these with
a constant chance per bucket. With nothing but the latter a class goes by the time of its last access, as lru does.
"""

from __future__ import annotations

BUCKETS = 56
"""Buckets of idle times, two for each power of two; the last one holds all longer times."""

PRIOR_CHANCE = 0.05
"""The chance of reuse within a bucket while nothing is known. Each bucket is half as long again as the one before, so
the value falls with the idle time."""

PRIOR_SPELLS = 4.0
"""The constant chance counts like so many spells."""

MOST_SPELLS = 2000
"""At this many spells all counts of a class are halved, so that it follows changes."""


def bucket_of(idle: int) -> int:
    """The bucket of an idle time in ticks, at least 0: 0, 1, 2, 3, 4–5, 6–7, 8–11, 12–15, …"""
    bits = idle.bit_length()
    if bits < 2:
        return bits
    return min(2 * bits - 2 + (idle >> (bits - 2) & 1), BUCKETS - 1)


def first_of(bucket: int) -> int:
    """The shortest idle time of a bucket."""
    return bucket if bucket < 4 else (2 + bucket % 2) << (bucket // 2 - 1)


FIRSTS = [first_of(bucket) for bucket in range(BUCKETS)]

WIDTHS = [first_of(bucket + 1) - first_of(bucket) for bucket in range(BUCKETS)]


class Spells:
    """Counts, by bucket, how spells ended."""

    def __init__(self) -> None:
        self.ends = [0.0] * BUCKETS
        self.reuses = [0.0] * BUCKETS
        self.total = 0.0

    def count_spell(self, bucket: int, reused: bool) -> None:
        self.ends[bucket] += 1.0
        self.reuses[bucket] += reused
        self.total += 1.0
        if self.total > MOST_SPELLS:
            self.ends = [count / 2 for count in self.ends]
            self.reuses = [count / 2 for count in self.reuses]
            self.total /= 2

    def chances(self, prior: list[float], prior_spells: float) -> list[float]:
        """For each bucket, the chance that KV which reached it is used again within it. prior: chances that count like
        ``prior_spells`` spells."""
        found, at_risk = [0.0] * BUCKETS, prior_spells
        for bucket in range(BUCKETS - 1, -1, -1):
            at_risk += self.ends[bucket]
            found[bucket] = (self.reuses[bucket] + prior_spells * prior[bucket]) / at_risk
        return found


def values(chances: list[float]) -> list[float]:
    """For each bucket of idle time, the value of keeping such a token: the chance of a reuse ÷ the expected stay, in
    ticks, for the best time to wait for it. (Gittins' index: evicting the lowest one gives the most hits.)

    Computed from the last bucket backwards: waiting through a further stretch pays while that stretch alone has a
    higher value than the wait so far, so stretches are merged as long as the value rises.
    """
    found = [0.0] * BUCKETS
    stretches: list[tuple[float, float, float]] = []
    """(chance of reuse, expected stay, chance to get through), the nearest one last."""
    for bucket in range(BUCKETS - 1, -1, -1):
        chance = chances[bucket]
        reused, stay, through = chance, WIDTHS[bucket] * (1 - chance / 2), 1 - chance
        while stretches and stretches[-1][0] * stay > reused * stretches[-1][1]:
            further = stretches.pop()
            reused, stay, through = reused + through * further[0], stay + through * further[1], through * further[2]
        stretches.append((reused, stay, through))
        found[bucket] = reused / stay
    return found


class Reuse:
    """The value of each class of idle KV, by idle time."""

    def __init__(self, kinds: list[int], kind_spells: list[float]) -> None:
        """kinds: the kind of each class. kind_spells: for each kind, the number of spells of a class that its pooled
        spells count for."""
        self._kinds = kinds
        self._kind_spells = kind_spells
        self._of_kind = [Spells() for _ in kind_spells]
        self._of_class = [Spells() for _ in kinds]
        self._news = [0] * len(kinds)
        """Spells since the class was valued last."""
        unknown = values(Spells().chances([PRIOR_CHANCE] * BUCKETS, PRIOR_SPELLS))
        self._values = [unknown] * len(kinds)
        """By class: the value for each bucket of idle time."""

    def value(self, number: int, idle: int) -> float:
        """The value of a token of a class that has been idle for so many ticks, in reuses per tick."""
        bucket, values = bucket_of(idle), self._values[number]
        if bucket == BUCKETS - 1:
            return values[bucket]
        return values[bucket] + (values[bucket + 1] - values[bucket]) * (idle - FIRSTS[bucket]) / WIDTHS[bucket]

    def end_spell(self, number: int, idle: int, *, reused: bool) -> bool:
        """Count a spell of a class that ended after ``idle`` ticks. Returns True if the class's values have changed."""
        bucket, kind, spells = bucket_of(idle), self._kinds[number], self._of_class[number]
        self._of_kind[kind].count_spell(bucket, reused)
        spells.count_spell(bucket, reused)
        self._news[number] += 1
        if self._news[number] > 4 + spells.total / 16:  # 50 µs
            self._news[number] = 0
            pooled = self._of_kind[kind].chances([PRIOR_CHANCE] * BUCKETS, PRIOR_SPELLS)
            self._values[number] = values(spells.chances(pooled, self._kind_spells[kind]))
            return True
        return False
