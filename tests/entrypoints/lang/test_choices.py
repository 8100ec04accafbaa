"""How one of several choices is taken."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.entrypoints.lang import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    ProgramError,
    ProgramState,
    function,
    gen,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from baton.entrypoints.lang.choices import mean
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


def decide(
    method: ChoicesSamplingMethod, logprobs: list[list[float | None]], alone: list[list[float | None]] | None = None
) -> ChoicesDecision:
    rows = [[[value, 7, "x"] for value in each] for each in logprobs]
    return method(
        choices=[f"choice {i}" for i in range(len(rows))],
        normalized_prompt_logprobs=[
            mean([-math.inf if value is None else value for value in each]) for each in logprobs
        ],
        input_token_logprobs=rows,
        output_token_logprobs=[[] for _ in rows],
        unconditional_token_logprobs=None if alone is None else [[[value, 7, "x"] for value in each] for each in alone],
    )


def test_token_length_normalized_picks_the_best_mean() -> None:
    assert decide(token_length_normalized, [[-3.0], [-1.0, -2.0], [-1.5, -1.5]]).decision == "choice 1"
    assert decide(token_length_normalized, [[None, 0.0], [-9.0]]).decision == "choice 1", "None is minus infinity"


def test_greedy_token_selection_compares_token_by_token() -> None:
    # The best mean is the first one's; but the second begins better, and what begins worse is out.
    assert decide(greedy_token_selection, [[-2.0, -0.1, -0.1], [-1.0, -9.0]]).decision == "choice 1"
    # Both begin alike; the short one goes on with its mean, -1, which is worse than -0.5 and better than -2.
    longer = decide(greedy_token_selection, [[-1.0], [-1.0, -0.5]])
    assert longer.decision == "choice 1"
    assert longer.meta_info == {"greedy_logprob_matrix": [[-1.0, -1.0], [-1.0, -0.5]]}
    assert decide(greedy_token_selection, [[-1.0], [-1.0, -2.0]]).decision == "choice 0"
    assert decide(greedy_token_selection, [[-1.0], [-1.0]]).decision == "choice 0", "the first of equals"
    assert decide(greedy_token_selection, [[None, 0.0], [-9.0, -9.0]]).decision == "choice 1"


def test_unconditional_likelihood_is_subtracted() -> None:
    decision = decide(
        unconditional_likelihood_normalized,
        [[-1.0, -2.0], [-2.0, -2.5], [-1.5]],
        [[None, -1.0], [None, -6.0], [None]],
    )
    assert decision.decision == "choice 1"
    assert decision.meta_info is not None
    # The first token of a prompt has no logprob, and counts as it is.
    assert decision.meta_info["normalized_unconditional_prompt_logprobs"] == [-1.0, (-2.0 + 3.5) / 2, -1.5]
    impossible = decide(unconditional_likelihood_normalized, [[-1.0, None], [-9.0]], [[None, None], [None]])
    assert impossible.decision == "choice 1", "impossible here, whatever it is elsewhere"
    with pytest.raises(ValueError, match="needs unconditional_token_logprobs"):
        decide(unconditional_likelihood_normalized, [[-1.0]])


# -- in programs -------------------------------------------------------------------------------------------------------


def choose(backend: FakeBackend, method: ChoicesSamplingMethod, choices: list[str]) -> ProgramState:
    @function
    def program(s: ProgramState) -> None:
        s += "is it " + select("x", choices, choices_method=method) + gen("more")

    return program.run(backend=backend)


def test_unconditional_scores_use_choices_as_prompts() -> None:
    asked = []

    def score(before: str, text: str) -> list[float]:
        asked.append((before, text))
        return (
            {"ab": [-1.0, -4.0], "cd": [-2.0, -2.0]}[text] if before else {"ab": [0.0, -4.5], "cd": [0.0, -1.0]}[text]
        )

    backend = FakeBackend(score=score)
    state = choose(backend, unconditional_likelihood_normalized, ["cd", "ab"])
    assert state["x"] == "ab", "-0.25 against -1.5, where the plain means are -2.5 and -2"
    assert asked == [("^is it ", "cd"), ("^is it ", "ab"), ("", "cd"), ("", "ab")]
    meta = state.get_meta_info("x")
    assert meta["normalized_prompt_logprobs"] == [-2.0, -2.5]
    assert meta["input_token_logprobs"][1] == [[-1.0, ord("a"), "a"], [-4.0, ord("b"), "b"]]
    assert meta["output_token_logprobs"] == [[], []], "nothing is generated"
    assert meta["unconditional_token_logprobs"][1] == [[None, ord("a"), "a"], [-4.5, ord("b"), "b"]]
    assert state.text() == "is it ab[9]" and not backend.leases
    assert not any("retain_ttl" in call for call in backend.calls if "input_ids" in call)


def test_custom_choices_methods_are_supported() -> None:
    class Last(ChoicesSamplingMethod):
        requires_unconditional_logprobs = False  # type: ignore[assignment]  # as a plain attribute

        def __call__(self, *, choices: list[str], **known: Any) -> ChoicesDecision:
            return ChoicesDecision(choices[-1], {"mine": sorted(known)})

    backend = FakeBackend()
    state = choose(backend, Last(), ["a", "b"])
    assert state["x"] == "b" and state.text() == "is it b[8]"
    assert state.meta("x")["mine"] == [
        "input_token_logprobs",
        "normalized_prompt_logprobs",
        "output_token_logprobs",
        "unconditional_token_logprobs",
    ]
    assert not backend.leases


def test_failing_choices_method_leaves_no_lease() -> None:
    class Wrong(ChoicesSamplingMethod):
        def __call__(self, *, choices: list[str], **_: Any) -> ChoicesDecision:
            return ChoicesDecision("c")

    class Broken(ChoicesSamplingMethod):
        def __call__(self, *, choices: list[str], **_: Any) -> ChoicesDecision:
            raise ZeroDivisionError("oops")

    for method, message in [(Wrong(), "the choices_method took 'c', which is not one of"), (Broken(), "oops")]:
        backend = FakeBackend()
        with pytest.raises(ProgramError, match=message):
            choose(backend, method, ["a", "b"])
        assert not backend.leases
