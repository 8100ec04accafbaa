"""The curve, the histogram, the filter of what was forgotten, the working set, what is shared, turns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from baton.entrypoints.analyze.analysis import RunningPeak
from baton.entrypoints.analyze.reuse.curve import Curve, sizes
from baton.entrypoints.analyze.reuse.forgotten import Forgotten
from baton.entrypoints.analyze.reuse.histogram import Histogram
from baton.entrypoints.analyze.reuse.reuse_tree import Recency, ReuseTree
from baton.entrypoints.analyze.reuse.sharing import SharedPrefix, top_prefixes
from baton.entrypoints.analyze.reuse.turns import Turns
from baton.entrypoints.analyze.reuse.working_set import POINTS, WorkingSet


def test_recency_counts_units_used_later() -> None:
    rng = random.Random(1)
    recency, plain = Recency(100), [0] * 100
    for _ in range(500):
        time, units = rng.randrange(100), rng.randrange(-3, 9)
        recency.add_units(time, units)
        plain[time] += units
        since = rng.randrange(-1, 100)
        assert recency.units_after(since) == sum(plain[since + 1 :])
    assert recency.total == sum(plain)


def test_curve_counts_every_reuse_distance() -> None:
    rng = random.Random(2)
    grid = sorted(rng.sample(range(400), 40))
    curve, distances = Curve(grid), []
    for _ in range(200):
        above, units = rng.randrange(300), rng.randrange(0, 60)
        curve.add_run(above, units)
        distances += range(above + 1, above + units + 1)
    assert curve.hits() == [sum(distance <= size for distance in distances) for size in grid]
    assert curve.units == len(distances)
    half = next(size for size, hits in zip(grid, curve.hits()) if hits >= curve.units / 2)
    assert curve.least_size(curve.units / 2) == half and curve.least_size(curve.units / 2, half - 1) is None
    assert curve.least_size(curve.units + 1) is None


def test_curve_sizes_are_two_percent_apart() -> None:
    found = sizes()
    assert found[:5] == [0, 1, 2, 3, 4] and found[-1] > 10**13 and len(found) < 1600
    assert all(low < high <= 1.022 * low + 1 for low, high in pairwise(found))


def test_histogram_quantiles_are_exact_to_a_bucket() -> None:
    values = [random.Random(3).lognormvariate(2, 2) for _ in range(2000)] + [0.0] * 20
    histogram = Histogram()
    for value in values:
        histogram.add_value(value, 2.0)
    assert histogram.total == 2 * len(values)
    for share in (0.5, 0.9, 0.99):
        true = sorted(values)[int(share * len(values)) - 1]
        found = histogram.quantile(share)
        assert found is not None and true <= found * 1.0001 <= 1.05 * true + 1e-9
    assert histogram.quantile(0.001) == 0.0 and Histogram().quantile(0.5) is None


def test_forgotten_content_is_recognised_in_whole_chunks() -> None:
    filled = Forgotten(1, 4, max_bytes=1 << 12)
    key = bytes(range(1, 31))
    filled.add_path("s", key, 6)  # chunks end at 4, 8, 12, …; those from 8 on end in what is forgotten
    assert filled.count_known("s", key, 6, 30) == 22 and filled.count_known("s", key, 6, 15) == 6
    assert filled.count_known("s", key, 3, 30) == 0, "the chunk up to 4 is not among it"
    assert filled.count_known("t", key, 6, 30) == 0 and filled.count_known("s", b"x" + key, 6, 30) == 0
    assert filled.count_known("s", key[:20] + b"new" + key, 6, 40) == 14
    assert 0 < filled.false_share < 1e-4


def test_full_filter_reports_high_false_positive_share() -> None:
    full = Forgotten(8, 1, max_bytes=1 << 6)
    rng = random.Random(4)
    for _ in range(2000):
        full.add_path("", rng.randbytes(8), 0)
    assert full.false_share > 0.9


def test_working_set_counts_units_used_within_the_window() -> None:
    tree = ReuseTree(1)
    follower = WorkingSet(tree, (10.0, 1000.0))
    used: list[tuple[float, bytes]] = []
    rng = random.Random(5)
    at = 0.0
    for _ in range(1000):
        at += rng.expovariate(5)
        key = bytes([rng.randrange(30)])
        follower.before_access(at)
        tree.access("", key)
        used.append((at, key))
        follower.after_access(at, len(used), 0)
    follower.after_access(at, len(used), 0, last=True)
    assert follower.points[-1].at == at and len(follower.points) > 20
    for point in follower.points:
        in_window = {key for time, key in used if point.at - 10 < time <= point.at}
        before = max((time for time, _ in used if time <= point.at - 10), default=0.0) - 10 / 128
        longer = {key for time, key in used if before <= time <= point.at}
        if point.units[0] is None:
            assert point.at < 10
        else:
            assert len(in_window) <= point.units[0] <= len(longer)
        assert point.units[1] is None
    assert any(point.units[0] is not None and point.units[0] < 30 for point in follower.points)
    assert len(tree._marks) < 300


def test_working_set_points_stay_few_and_evenly_spaced() -> None:
    tree = ReuseTree(1)
    follower = WorkingSet(tree, (4.0,))
    for second in range(20_000):
        follower.before_access(float(second))
        tree.access("", b"x")
        follower.after_access(float(second), second, 0)
    assert POINTS / 2 <= len(follower.points) <= POINTS
    steps = [late.at - early.at for early, late in pairwise(follower.points)]
    assert max(steps) <= 2 * min(steps)


def test_top_prefixes_are_reported_in_full() -> None:
    tree = ReuseTree(1)
    for number in range(20):
        tree.access("", b"system" + (b"more" if number else b"less") + bytes([number]) * 3)
    for number in range(3):
        tree.access("", b"other" + bytes([number]))
    assert top_prefixes(tree, 2, 5) == [SharedPrefix(20, 20, 2 * (19 * 6 + 18 * 4)), SharedPrefix(10, 3, 2 * 2 * 5)]
    assert len(top_prefixes(tree, 2, 1)) == 1


class Talk:
    def __init__(self) -> None:
        self.tree, self.turns = ReuseTree(1), Turns(Curve(sizes()))

    def turn(self, prompt: bytes, output: bytes, at: float | None, seconds: float = 1.0) -> int:
        access = self.tree.access("", (prompt + output)[:-1])
        inherited = self.turns.note_arrival(access, len(prompt) - 1, len(prompt), 1, at)
        self.turns.note_end(access.last, len(prompt + output), None if at is None else at + seconds)
        return inherited


def test_turns_inherit_from_their_longest_parent() -> None:
    talk = Talk()
    assert talk.turn(b"first", b"answer", 0.0) == 0
    assert talk.turn(b"firstanswer more", b"again", 6.0) == len(b"firstanswe"), "the last token has no KV"
    assert talk.turn(b"firstanswer moreagain x", b"y", 7.0) == len(b"firstanswer moreagai")
    assert talk.turn(b"firstanswer other", b"z", 100.0) == len(b"firstanswe"), "a second child of the first"
    assert talk.turn(b"first but not the answer", b"z", 101.0) == 0
    turns = talk.turns
    assert (turns.count, turns.parents) == (3, 2) and turns.inherited_units == 10 + 20 + 10
    assert turns.gaps.total == 2 and turns.gaps.quantile(1.0) == pytest.approx(5.0, rel=0.05)
    assert turns.curve.units == turns.inherited_units


def test_repeated_prompt_is_not_a_turn() -> None:
    talk = Talk()
    for at in (0.0, 1.0, 2.0):
        assert talk.turn(b"same prompt", b"out", at) == 0
    assert talk.turn(b"same promptout!", b"x", None) == len(b"same promptou") and talk.turns.gaps.total == 0


def test_peak_concurrency_matches_arrival_and_service_times() -> None:
    running, rng = RunningPeak(), random.Random(6)
    requests = [(float(came), rng.expovariate(0.1), rng.randrange(1, 100)) for came in range(300)]
    for request in requests:
        running.add_request(*request)
    at_once = [[t for c, s, t in requests if c <= came < c + s] for came, _, _ in requests]
    assert running.peak_requests == max(map(len, at_once)) > 5
    assert running.peak_tokens == max(map(sum, at_once))
