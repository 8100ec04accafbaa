"""The model that learns from commands; skipped without scikit-learn, but for what happens without it."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from baton.scheduler.jobs import speed
from baton.scheduler.jobs.speed import BATCH, ENOUGH, FEATURES, MIDDLE_S, LearnedSpeed, Speed, features_of

KINDS = [
    ("python train.py --epochs {0} --data {1}/x.csv", 60.0), ("python scripts/show.py {1}", 0.2),
    ("./run.sh {1} --full", 30.0), ("./run.sh {1} --check", 0.5), ("find . -name '*{1}*'", 0.3),
    ("find / -name '*{1}*' -exec grep {1} {{}} +", 20.0), ("for f in {1}/*; do python convert.py $f; done", 40.0),
    ("curl -s http://localhost:{0}/{1} | head", 0.1), ("node {1}/index.js --once", 0.6),
    ("node {1}/server.js > log{0}", 99.0),
]  # fmt: skip
"""Commands on which the tables say nothing, and a typical duration of each: their programs alone do not tell it."""


def commands(seed: int, count: int) -> list[tuple[str, float]]:
    """Log-normal about the typical durations, by a factor of 1.6."""
    rng = np.random.default_rng(seed)
    found = []
    for kind in rng.integers(len(KINDS), size=count):
        text, seconds = KINDS[kind]
        place = ("core", "api", "db", "ui")[rng.integers(4)]
        found.append((text.format(rng.integers(1000), place), float(seconds * math.exp(rng.normal(0.0, 0.5)))))
    return found


def share_right(model: LearnedSpeed, tried: list[tuple[str, float]]) -> float:
    """Share of calls that are judged correctly as fast or slow."""
    right = [model.speed(text) is (Speed.SLOW if seconds > MIDDLE_S else Speed.FAST) for text, seconds in tried]
    return sum(right) / len(right)


def test_learned_speed_improves_with_observations() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra [learned]")
    model, tried, shares = LearnedSpeed(), commands(1, 300), []
    for part in range(3):
        shares.append(share_right(model, tried))
        model.learn_durations(commands(2 + part, 500))
    shares.append(share_right(model, tried))
    assert shares[0] == 0.0 and shares[1] > 0.6 and shares[-1] > 0.95 and shares == sorted(shares)


def test_learned_speed_needs_enough_of_both_classes() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra [learned]")
    model = LearnedSpeed()
    model.learn_durations([("crawl x", 100.0)] * 2 * ENOUGH)
    assert model.slow_probability("crawl x") is None and model.speed("crawl x") is Speed.UNCERTAIN
    model.learn_durations([("hop x", 0.1)] * BATCH)
    slow, fast = model.slow_probability("crawl x"), model.slow_probability("hop x")
    assert slow is not None and fast is not None and slow > 0.8 > fast
    small = LearnedSpeed()
    small.learn_durations([("crawl", 100.0), ("hop", 0.1)] * (ENOUGH // 2 - 1))
    assert small.slow_probability("crawl") is None
    small.learn_durations([("crawl", 100.0), ("hop", 0.1)])
    assert small.slow_probability("crawl") is not None


def test_the_same_observations_give_the_same_model() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra [learned]")
    first, second = LearnedSpeed(), LearnedSpeed()
    for model in (first, second):
        model.learn_durations(commands(9, 200))
    for text, _ in commands(10, 20):
        assert first.slow_probability(text) == second.slow_probability(text)


def test_missing_scikit_learn_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'baton-serve\[learned\]'"):
        LearnedSpeed()


def test_importing_the_package_imports_no_scikit_learn() -> None:
    code = (
        "import sys, baton.scheduler.jobs.tool_time as t; t.ToolTimes(); "
        "sys.exit(bool({'sklearn', 'scipy'} & {name.split('.')[0] for name in sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_command_features() -> None:
    vector = features_of("python a/train7.py --epochs 10 | tee log")
    assert vector.shape == (FEATURES,) and np.linalg.norm(vector) == pytest.approx(1.0)
    assert np.array_equal(vector, features_of("python a/train8.py --epochs 99 | tee log"))  # numbers are alike
    assert not np.array_equal(vector, features_of("python a/train7.py --epochs 10 > log"))
    assert not features_of("").any()
    assert speed._forms("src/x.py") == {"src/x.py", "in:src", "ends:py"}
    assert np.isfinite(features_of("\ud800 x;" * 90)).all()
