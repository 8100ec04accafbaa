"""Speculation in a whole scheduler: who drafts, how a draft ends, what becomes of its slots."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.scheduler.batch import ForwardMode, ScheduleBatch
from baton.scheduler.speculation.drafts import Draft, Drafter, Source
from baton.scheduler.speculation.speculation import FIRST_GAP, LONGEST_GAP, PROBE, can_draft
from tests.doubles.drafting import draft_by_echo
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


class Watched(Harness):
    """Keeps its steps. Drafts are right; ``wrong``: or are not."""

    def __init__(self, *, wrong: bool = False, most: int = 7, **options: Any) -> None:
        super().__init__(speculative_algorithm="NGRAM", speculative_num_draft_tokens=most, **options)
        self.batches: list[ScheduleBatch] = []
        self.speculation = self.scheduler._speculation
        self.drafter = self.speculation._drafter
        self.drafter.find_draft = self.find  # type: ignore[method-assign]
        self._wrong = wrong

    def find(self, request, memory, skipped: int, most: int) -> Draft | None:
        tokens = expected_output(request.token_ids.view().tolist(), skipped + most)[skipped:]
        if self._wrong:
            tokens = [(token + 1) % 1000 for token in tokens]
        return Draft(Source.PATH, np.array(tokens, dtype=np.int32))

    def _launch(self, batch: ScheduleBatch):
        self.batches.append(batch)
        return super()._launch(batch)

    @property
    def drafted(self) -> list[list[int]]:
        return [[] if batch.draft_lens is None else batch.draft_lens.tolist() for batch in self.batches]


@PAGES
def test_right_drafts_save_steps(page_size: int) -> None:
    harness = Watched(page_size=page_size)
    harness.add("r", prompt_of(20), 41)
    harness.run()
    assert harness.outcomes["r", 0].tokens == expected_output(prompt_of(20), 41)
    assert [batch.mode for batch in harness.batches] == [ForwardMode.EXTEND] * 6
    assert harness.drafted == [[], [7], [7], [7], [7], [7]], "1 + 5 × 8 tokens"
    request = harness.outcomes["r", 0].request
    assert request is not None and harness.speculation.counts == request.drafts
    assert (request.drafts.verified, request.drafts.drafted, request.drafts.accepted) == (5, 35, 35)
    assert harness.scheduler.stats().drafts == request.drafts


@PAGES
def test_wrong_drafts_leave_no_slots_or_cached_tokens(page_size: int) -> None:
    """Neither slots nor tokens in the tree; and what is cached is right."""
    harness = Watched(page_size=page_size, wrong=True)
    harness.add("r", prompt_of(20), 30)
    harness.run()
    said = expected_output(prompt_of(20), 30)
    assert harness.outcomes["r", 0].tokens == said and harness.model.verified[0] > 3
    cached = harness.cache.match_prefix("", np.array(prompt_of(20) + said, dtype=np.int32)).device_len
    assert cached == 49 // page_size * page_size
    assert harness.scheduler.stats().evictable_tokens == cached
    harness.add("next", prompt_of(20) + said, 5)
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(prompt_of(20) + said, 5)


def test_rejected_drafts_are_retried_at_growing_intervals() -> None:
    harness = Watched(wrong=True, context=1024, num_tokens=1024)
    harness.add("r", prompt_of(5), 400)
    harness.run()
    steps = [place for place, drafted in enumerate(harness.drafted) if drafted]
    gaps = np.diff(steps).tolist()
    assert gaps[-1] == LONGEST_GAP and FIRST_GAP in gaps and sorted(gaps) == gaps
    assert harness.drafted[steps[-1]] == [PROBE]
    assert len(steps) < 25


@pytest.mark.parametrize(("step_s", "looked_up"), [(1.0, 300), (1e-4, 40)])
def test_draft_lookups_are_limited_when_steps_are_short(step_s: float, looked_up: int) -> None:
    """With wrong drafts; a look-up takes a hundredth of a step, or is left out."""
    harness = Watched(wrong=True, context=1024, num_tokens=1024)
    for tokens in (1, 3):
        harness.speculation._cost.record_step(tokens, step_s * tokens)
    count, find = 0, harness.find

    def counted(*args):
        nonlocal count
        count += 1
        return find(*args)

    harness.speculation._drafter.find_draft = counted  # type: ignore[method-assign]
    harness.add("r", prompt_of(5), 350)
    harness.run()
    assert count > looked_up if step_s == 1.0 else count < looked_up


@DEPTHS
@pytest.mark.parametrize(
    ("sampling", "taken", "matched"),
    [
        ({"max_new_tokens": 5}, 5, None),
        ({"max_new_tokens": 60, "stop_token_ids": "fourth"}, 4, "fourth"),
        ({"max_new_tokens": 60, "stop_token_ids": "fourth", "min_new_tokens": 4}, 60, None),
    ],
    ids=["length", "stop id", "not before the minimum"],
)
def test_end_within_accepted_draft_is_at_its_usual_place(
    sampling: dict[str, Any], taken: int, matched: str | None, depth: int
) -> None:
    said = expected_output(prompt_of(20), 60)
    sampling = {name: (said[3],) if value == "fourth" else value for name, value in sampling.items()}
    harness = Watched(depth=depth, most=12)
    harness.speculation._stopping_criteria.end_ids = lambda request: frozenset()  # so that drafts go on behind the end
    harness.add("r", prompt_of(20), **sampling)
    harness.run()
    outcome = harness.outcomes["r", 0]
    assert outcome.tokens == said[:taken]
    assert outcome.finish is not None and outcome.finish.matched == (said[3] if matched else None)
    kept = np.array(prompt_of(20) + said, dtype=np.int32)
    assert harness.cache.match_prefix("", kept).device_len == 20 + taken - 1, "as without speculation"
    request = outcome.request
    assert request is not None and request.drafts.accepted <= taken


class Even:
    """The oracle's twin of the even ``allowed_token_ids``."""

    def allowed(self) -> np.ndarray:
        return np.arange(0, 1000, 2)

    def ends_with(self, token_id: int) -> bool:
        return False


@DEPTHS
@pytest.mark.parametrize(("change", "longest"), [(0, 7), (2, 7), (1, 3)], ids=["right", "wrong", "forbidden"])
def test_drafts_follow_the_constraint(change: int, longest: int, depth: int) -> None:
    """The fourth token of each draft is changed. A draft ends before a token that the constraint forbids."""
    harness = Watched(depth=depth)
    drafter = Drafter(harness.drafter._tree)

    def find(request, memory, ids: np.ndarray, most: int) -> Draft:
        tokens = expected_output(ids.tolist(), most, constraint=Even())
        tokens[3:4] = [(token + change) % 1000 for token in tokens[3:4]]
        return Draft(Source.PATH, np.array(tokens, dtype=np.int32))

    drafter._find = find  # type: ignore[method-assign]
    harness.speculation._drafter = drafter
    harness.add("r", prompt_of(20), 40, allowed_token_ids=tuple(range(0, 1000, 2)))
    harness.run()
    assert harness.outcomes["r", 0].tokens == expected_output(prompt_of(20), 40, constraint=Even())
    drafted = {length for batch in harness.drafted for length in batch} - {0}
    assert drafted and max(drafted) == longest
    assert harness.speculation.counts.accepted >= (30 if change == 0 else 3)


def test_draft_length_is_limited_by_max_new_tokens() -> None:
    harness = Watched(most=7)
    harness.add("r", prompt_of(20), 4)
    harness.run()
    assert harness.drafted == [[], [2]], "the last token is not guessed: it is sampled behind the guesses"


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"beam_width": 2},
    ],
    ids=str,
)
def test_penalties_and_beams_disable_drafts(wish: dict[str, Any]) -> None:
    harness = Watched()
    harness.add("plain", prompt_of(9), 20)
    harness.add("r", prompt_of(10, 1), 20, **wish)
    harness.run()
    request = harness.outcomes["r", 0].request
    assert request is not None and request.drafts.verified == 0
    plain = harness.outcomes["plain", 0].request
    assert plain is not None and plain.drafts.verified > 0


def test_multi_token_bans_disable_drafts() -> None:
    harness = Watched()
    harness.add("r", prompt_of(9), 20)
    request = harness.outcomes["r", 0].request
    assert request is not None and can_draft(request)
    request.spec = msgspec.structs.replace(request.spec, banned=((3,), (4,)))
    assert can_draft(request)
    request.spec = msgspec.structs.replace(request.spec, banned=((3,), (4, 5)))
    assert not can_draft(request)


def test_speculation_is_off_by_default() -> None:
    harness = Harness()
    for rid in ("first", "again"):
        harness.add(rid, prompt_of(20), 30)
        harness.run()
    assert harness.scheduler._speculation.counts.verified == 0


def test_overlapped_draft_spans_token_in_flight() -> None:
    """So that only a step that verifies is waited for."""
    harness = Watched(depth=2)
    harness.add("r", prompt_of(20), 41)
    harness.run()
    assert harness.outcomes["r", 0].tokens == expected_output(prompt_of(20), 41)
    first = harness.batches[1]
    assert first.draft_lens is not None and first.input_ids[0] == -1 and first.draft_lens.tolist() == [7]


def test_drafts_take_memory_from_the_cache_only() -> None:
    """A lease stays, and nobody is retracted; without room there are no drafts."""
    harness = Watched(num_tokens=64, leased_ratio=1.0, rows=2)
    harness.add("kept", prompt_of(30), 4, retain_ttl=1000.0)
    harness.run()
    assert harness.scheduler.stats().leased_tokens == 33
    harness.add("r", prompt_of(10, 1), 21)
    harness.run()
    assert harness.outcomes["r", 0].tokens == expected_output(prompt_of(10, 1), 21)
    stats = harness.scheduler.stats()
    assert stats.leases_broken == 0 and stats.retractions == 0
    assert any(harness.drafted)


def test_sampled_tokens_per_step_are_limited() -> None:
    harness = Watched(num_tokens=2048, rows=16, most=16, chunk=500)
    for number in range(16):
        harness.add(f"r{number}", prompt_of(10, number), 40)
    harness.run()
    assert harness.config.max_sampled_tokens == 64
    sampled = [int(batch.sampled_counts.sum()) for batch in harness.batches]
    assert 40 < max(sampled) <= 64


def test_child_continues_from_accepted_tokens() -> None:
    harness = Watched()
    harness.add("parent", prompt_of(20), 17, retain_ttl=1000.0)
    harness.run()
    harness.continue_from("parent", "child", [5, 6], 12)
    harness.run()
    whole = prompt_of(20) + expected_output(prompt_of(20), 17) + [5, 6]
    child = harness.outcomes["child", 0]
    assert child.tokens == expected_output(whole, 12)
    assert child.request is not None and child.request.inheritance is not None
    assert child.request.inheritance.path == "handoff" and child.request.inheritance.recomputed_tokens == 1


def test_nonfinite_kv_of_rejected_guess_fails_no_request() -> None:
    harness = Watched(wrong=True)
    said = expected_output(prompt_of(20), 30)
    harness.model.spoiling = {(token + 1) % 1000 for token in said} - set(said) - set(prompt_of(20))
    harness.add("r", prompt_of(20), 30)
    harness.run()
    outcome = harness.outcomes["r", 0]
    assert outcome.refusal is None and outcome.tokens == said and harness.model.verified[0] > 3


def test_random_drafts_with_samples_and_abort() -> None:
    harness = Harness(speculative_algorithm="NGRAM", num_tokens=1024)
    drafter = draft_by_echo(harness.scheduler._speculation, random.Random(1), 0.5)
    harness.add("three", prompt_of(20), 30, n=3)
    harness.add("gone", prompt_of(20, 1), 30)
    for _ in range(4):
        harness.step()
    harness.abort("gone")
    harness.run()
    assert all(harness.outcomes["three", index].tokens == expected_output(prompt_of(20), 30) for index in range(3))
    assert drafter.drafts > 5 and not harness.scheduler._speculation._sequences
