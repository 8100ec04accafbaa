"""Which mutants are drawn, and which tests are run on each."""

from __future__ import annotations

from tests.mutants.sample import drawn, place, within

NAMES = {folder: [f"{folder}.function__mutmut_{n}" for n in range(50)] for folder in ("beam", "memory")}
TOOK = {"slow": 5.0, "quick": 1.0, "quicker": 0.5, "simulation[1]": 4.0}


def test_sample_is_deterministic_and_nested_in_larger_samples() -> None:
    few, many = drawn(NAMES, 5), drawn(NAMES, 20)
    assert len(few) == 10 and len(many) == 40
    assert few < many
    assert drawn({folder: names[::-1] for folder, names in NAMES.items()}, 5) == few


def test_folders_are_sampled_independently_up_to_their_size() -> None:
    assert drawn({"beam": NAMES["beam"]}, 5) < drawn(NAMES, 5)
    assert drawn(NAMES, 1000) == {name for names in NAMES.values() for name in names}


def test_sample_order_is_not_alphabetical() -> None:
    assert sorted(NAMES["beam"], key=place) != NAMES["beam"]


def test_quickest_tests_are_run_within_the_time_budget() -> None:
    assert within(1.5, TOOK, TOOK) == ["quicker", "quick"]
    assert within(100.0, TOOK, TOOK) == ["quicker", "quick", "simulation[1]", "slow"]


def test_broad_tests_always_run_and_use_the_budget() -> None:
    assert within(4.7, TOOK, TOOK, always=("simulation[",)) == ["simulation[1]", "quicker"]
    assert within(0.0, TOOK, TOOK, always=("simulation[", "slow")) == ["simulation[1]", "slow"]


def test_at_least_one_test_is_run() -> None:
    assert within(0.1, ["slow"], TOOK) == ["slow"]
