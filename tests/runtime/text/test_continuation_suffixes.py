"""Suffixes at the border: what was visible of a cut token goes before the suffix, and only then."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from baton.runtime.text.continuation_suffixes import ContinuationSuffixes
from baton.scheduler.request_spec import ContinuationSpec


class Letters:
    """One token per letter; counts how often it was loaded."""

    loads = 0

    def encode_continuation(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def make(max_rests: int = 10) -> ContinuationSuffixes:
    def load() -> Any:
        Letters.loads += 1
        return cast(Any, Letters())

    Letters.loads = 0
    return ContinuationSuffixes(load, max_rests)


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def test_suffix_without_rest_loads_no_tokenizer() -> None:
    suffixes = make()
    came = np.array([7, 8], dtype=np.int32)
    assert suffixes.complete_suffix(ContinuationSpec(parent_rid="p", suffix_text="ab"), came) is came
    assert Letters.loads == 0


def test_rest_and_suffix_text_are_tokenised_together() -> None:
    suffixes = make()
    suffixes.remember_tail(("p", 0), "done.")
    got = suffixes.complete_suffix(ContinuationSpec(parent_rid="p", suffix_text="ab"), np.array([7], dtype=np.int32))
    assert got.dtype == np.int32 and got.tolist() == ids("done.ab").tolist()


def test_rest_precedes_suffix_ids() -> None:
    suffixes = make()
    suffixes.remember_tail(("p", 1), "x")
    seven = np.array([7], dtype=np.int32)
    assert suffixes.complete_suffix(ContinuationSpec(parent_rid="p", index=1), seven).tolist() == [ord("x"), 7]
    assert suffixes.complete_suffix(ContinuationSpec(parent_rid="p", index=0), seven).tolist() == [7]


def test_rest_arriving_while_child_waits_is_used() -> None:
    suffixes = make()
    suffixes.open_suffix("child", ContinuationSpec(parent_rid="p", suffix_text="b"), ids("b"))
    suffixes.remember_tail(("p", 0), "a")
    assert suffixes.suffix_ids("child").tolist() == ids("ab").tolist()
    suffixes.close_suffix("child")
    suffixes.close_suffix("child")


def test_rests_are_pruned_with_parent_records() -> None:
    suffixes = make(max_rests=2)
    for parent in "pqrst":
        suffixes.remember_tail((parent, 0), parent)
    suffixes.prune_tails(lambda rid: rid in "pt")
    kept = [
        parent
        for parent in "pqrst"
        if len(suffixes.complete_suffix(ContinuationSpec(parent_rid=parent), ids("z"))) == 2
    ]
    assert kept == ["p", "t"]


def test_reused_rid_has_no_rest() -> None:
    suffixes = make()
    suffixes.remember_tail(("p", 0), "a")
    suffixes.forget_tails("p")
    assert suffixes.complete_suffix(ContinuationSpec(parent_rid="p"), ids("z")).tolist() == ids("z").tolist()
