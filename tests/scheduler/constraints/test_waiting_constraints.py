"""Constraints that are still being made when their request comes, and masks that wait for the token in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.scheduler.constraints.allowed_ids import AllowedIds, AllowedIdsState
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness, Outcome
from tests.doubles.specs import make_spec

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
REFUSAL = RequestRefused("it cannot be made", code="invalid_grammar", param="regex")


class Late(AllowedIds):
    """Allows three ids once it is ``made``."""

    def __init__(self) -> None:
        super().__init__([5, 9, 11])
        self.made = False
        self.refusal: RequestRefused | None = None

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self.made

    def failure(self) -> RequestRefused | None:  # type: ignore[override]
        return self.refusal


def add(harness: Harness, rid: str, constraint: AllowedIds, **fields) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    continuation = ContinuationSpec(fields.pop("parent")) if "parent" in fields else None
    spec = make_spec(rid, prompt_of(20), params, continuation=continuation, **fields)
    for request in harness.scheduler.add_request(spec, harness.now, constraint=constraint):
        harness.outcomes[request.key] = Outcome(request=request)


@DEPTHS
def test_request_waits_for_its_constraint_and_others_do_not(depth: int) -> None:
    harness, late = Harness(depth=depth), Late()
    add(harness, "late", late)
    harness.add("after", prompt_of(20, 1), 4)
    for _ in range(12):
        harness.step()
    assert harness.outcomes["after", 0].finish is not None, "it came later and overtook"
    assert harness.scheduler.is_compiling and not harness.outcomes["late", 0].tokens
    assert harness.scheduler.stats().num_queue_reqs == 1 and harness.allocator.free_tokens + 24 >= 512 - 24
    late.made = True
    harness.run()
    assert set(harness.outcomes["late", 0].tokens) <= {5, 9, 11} and len(harness.outcomes["late", 0].tokens) == 4
    assert not harness.scheduler.is_compiling


@DEPTHS
def test_constraint_that_cannot_be_made_refuses_its_request_and_its_children(depth: int) -> None:
    harness, late = Harness(depth=depth), Late()
    add(harness, "late", late)
    add(harness, "child", AllowedIds([5]), parent="late")
    harness.add("other", prompt_of(20, 1), 4)
    harness.step()
    late.made, late.refusal = True, REFUSAL
    harness.run()
    assert harness.outcomes["late", 0].refusal is REFUSAL and not harness.outcomes["late", 0].tokens
    child = harness.outcomes["child", 0].refusal
    assert child is not None and "late" in child.message
    assert harness.outcomes["other", 0].tokens == expected_output(prompt_of(20, 1), 4)


class Sudden(Late):
    """Fails in the middle of a turn: it is not ready yet when it is first asked, and ready from then on."""

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        made, self.made = self.made, True
        self.refusal = REFUSAL
        return made


def test_constraint_that_fails_in_the_middle_of_a_turn_refuses_its_request() -> None:
    harness, sudden = Harness(), Sudden()
    add(harness, "late", sudden)
    sudden.made = False
    harness.step()
    assert harness.allocator.free_tokens == 512, "it has not entered"
    harness.run()
    assert harness.outcomes["late", 0].refusal is REFUSAL and not harness.outcomes["late", 0].tokens


@pytest.mark.parametrize("made", [False, True])
def test_request_can_be_aborted_while_its_constraint_is_made(made: bool) -> None:
    harness, late = Harness(), Late()
    add(harness, "late", late)
    harness.step()
    harness.abort("late")
    late.made, late.refusal = made, REFUSAL
    harness.step()
    outcome = harness.outcomes["late", 0]
    assert outcome.finish is not None and outcome.finish.type == "abort" and outcome.refusal is None
    late.made = True
    harness.run()
    assert not harness.scheduler.is_compiling


def test_recovery_keeps_requests_that_wait_for_their_constraint() -> None:
    harness, late = Harness(), Late()
    add(harness, "late", late)
    harness.add("bad", prompt_of(20, 1), 4)
    harness.step()
    harness.scheduler.contain(ValueError(), harness.scheduler.live_of("bad"), harness.now)
    late.made = True
    del harness.outcomes["bad", 0]
    harness._results.clear()
    harness.scheduler._in_flight.clear()
    harness.run()
    assert len(harness.outcomes["late", 0].tokens) == 4


# -- overlapped steps --------------------------------------------------------------------------------------------------

TRIE = ItemTrie.build(np.random.default_rng(0).integers(0, 90, (40, 12), dtype=np.int32))


def steps_of(depth: int, jumps: bool = False, **request) -> int:
    harness = Harness(depth=depth, disable_jump_forward=not jumps)
    harness.add("r", prompt_of(20), 12, **request)
    harness.run()
    assert len(harness.outcomes["r", 0].tokens) == 12
    return harness.scheduler.stats().steps


def test_constrained_request_takes_part_in_every_overlapped_step() -> None:
    assert steps_of(2, trie=TRIE) == steps_of(2) <= steps_of(1) + 1


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_take_one_step(depth: int) -> None:
    """The first token of an item says which one it is, and the other eleven are forced."""
    assert steps_of(depth, jumps=True, trie=TRIE) == depth + 1


@dataclass(slots=True, frozen=True)
class Raising(AllowedIdsState):
    """Raises for the mask after ``left`` tokens."""

    left: int = 0
    asked: list[int] = field(default_factory=list)

    def allowed(self) -> AllowedTokens:
        self.asked.append(self.left)
        if not self.left:
            raise REFUSAL
        return self.packed

    def advance(self, tokens: np.ndarray) -> Raising:
        return Raising(self.packed, self.count, self.left - 1, self.asked)

    @classmethod
    def prepare(cls, states: Sequence[Raising]) -> None:  # type: ignore[override]
        assert all(type(state) is Raising for state in states)


@DEPTHS
@pytest.mark.parametrize("left", [1, 2, 3])
def test_mask_that_raises_ends_its_request_alone_with_its_reason(depth: int, left: int) -> None:
    harness, constraint = Harness(depth=depth), AllowedIds([5, 9, 11])
    plain = constraint.start()
    constraint.start = lambda: Raising(plain.packed, plain.count, left)  # type: ignore[method-assign, assignment]
    for number in range(3):
        harness.add(f"before{number}", prompt_of(20, number), 12, trie=TRIE if number == 1 else None)
    add(harness, "raises", constraint)
    harness.add("after", prompt_of(20, 4), 12)
    for _ in range(40):
        harness.step()
    outcome = harness.outcomes["raises", 0]
    assert outcome.refusal is not None and outcome.refusal.code == "invalid_grammar", outcome
    assert len(outcome.tokens) <= left
    for number, rid in ((0, "before0"), (2, "before2"), (4, "after")):
        assert harness.outcomes[rid, 0].tokens == expected_output(prompt_of(20, number), 12)
    assert harness.outcomes["before1", 0].tokens == expected_output(prompt_of(20, 1), 12, trie=TRIE)
    harness.run()


def test_no_mask_is_asked_of_request_that_token_in_flight_ended() -> None:
    harness, constraint = Harness(depth=2, eos=(5,)), AllowedIds([5])
    plain = constraint.start()
    asked: list[int] = []
    constraint.start = lambda: Raising(plain.packed, plain.count, 1, asked)  # type: ignore[method-assign, assignment]
    add(harness, "ends", constraint)
    harness.add("other", prompt_of(20, 1), 9)
    harness.run()
    assert harness.outcomes["ends", 0].tokens == [5] and harness.outcomes["ends", 0].refusal is None
    assert asked == [1]
