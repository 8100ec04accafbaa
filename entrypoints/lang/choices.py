"""The methods by which a `select` takes one of its choices, from the log-probabilities of their tokens.

    choices        input_token_logprobs          mean
    "yes"          [[-0.1, 17, "yes"]]           -0.1  ◀ token_length_normalized
    "not at all"   [[-2.0, 5, "not"], …]         -0.9

A method is any `ChoicesSamplingMethod`, also one of your own. The names and the arguments are SGLang's. A logprob of
None in what the server sent stands for minus infinity, which JSON cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import BackendError

Rows = Sequence[Sequence[Any]]
"""The tokens of one choice: [logprob, token id, text] each."""


@dataclass(slots=True)
class ChoicesDecision:
    """decision: one of the choices. meta_info: added to the step's meta."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(Protocol):
    """Takes one of the choices."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """True if the method needs the logprobs of each choice as a prompt of its own, which takes a second request."""
        return False

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[Any],
        output_token_logprobs: list[Any],
        unconditional_token_logprobs: list[Any] | None = None,
    ) -> ChoicesDecision:
        """normalized_prompt_logprobs: the mean logprob of each choice. input_token_logprobs: the rows of each choice.
        output_token_logprobs: an empty list each, because nothing is generated. unconditional_token_logprobs: rows as
        in input_token_logprobs, with None as their first logprob."""
        ...


class TokenLengthNormalized(ChoicesSamplingMethod):
    """Takes the choice with the highest mean log-probability per token; the first of equals."""

    def __call__(self, *, choices: list[str], normalized_prompt_logprobs: list[float], **_: Any) -> ChoicesDecision:
        return ChoicesDecision(choices[_first_best(normalized_prompt_logprobs)])


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Keeps, token by token, the choices with the likeliest token, until one is left; a choice that has ended counts
    with its mean. Takes the first of equals."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[Any],
        **_: Any,
    ) -> ChoicesDecision:
        longest = max(map(len, input_token_logprobs))
        matrix = [
            logprobs(rows) + [average] * (longest - len(rows))
            for rows, average in zip(input_token_logprobs, normalized_prompt_logprobs, strict=True)
        ]
        left = list(range(len(choices)))
        for position in range(longest):
            best = max(matrix[choice][position] for choice in left)
            left = [choice for choice in left if matrix[choice][position] == best]
        return ChoicesDecision(choices[left[0]], {"greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """Takes the choice with the highest mean gain of its tokens' log-probabilities from the text before it, so that
    common words have no advantage. A prompt's first token has no logprob, so there the gain is the logprob itself."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(
        self,
        *,
        choices: list[str],
        input_token_logprobs: list[Any],
        unconditional_token_logprobs: list[Any] | None = None,
        **_: Any,
    ) -> ChoicesDecision:
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional_likelihood_normalized needs unconditional_token_logprobs")
        scores = []
        for rows, alone in zip(input_token_logprobs, unconditional_token_logprobs, strict=True):
            gains = [
                # An impossible token rules the choice out, even if it is impossible elsewhere, too.
                here if here == -math.inf else here - there
                for here, there in zip(logprobs(rows), [0.0, *logprobs(alone[1:])], strict=True)
            ]
            scores.append(mean(gains))
        meta = {
            "unconditional_token_logprobs": unconditional_token_logprobs,
            "normalized_unconditional_prompt_logprobs": scores,
        }
        return ChoicesDecision(choices[_first_best(scores)], meta)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()

CHOICES_METHODS: dict[str, ChoicesSamplingMethod] = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a `select`. text: the choice taken. scores: mean log-probability per token of each choice. rows:
    [logprob, id, text] of each choice's tokens. answer: the server's answer for the choice taken. details: the
    method's meta_info."""

    text: str
    scores: list[float]
    rows: list[Rows]
    answer: dict[str, Any]
    details: dict[str, Any]


def take_choice(
    choices: Sequence[str],
    method: ChoicesSamplingMethod,
    rows: list[Rows],
    alone: list[Rows] | None,
    answers: list[dict[str, Any]],
) -> tuple[Choice, int]:
    """(the choice that ``method`` takes, its position). rows, alone: [logprob, id, text] of each choice's tokens after
    the state's text and without it. answers: the server's, one per choice. Raises BackendError for a method that takes
    none of them."""
    scores = [mean(logprobs(each)) for each in rows]
    decision = method(
        choices=list(choices),
        normalized_prompt_logprobs=scores,
        input_token_logprobs=rows,
        output_token_logprobs=[[] for _ in choices],
        unconditional_token_logprobs=alone,
    )
    if decision.decision not in choices:
        raise BackendError(f"the choices_method took {decision.decision!r}, which is not one of {list(choices)}")
    taken = choices.index(decision.decision)
    return Choice(choices[taken], scores, rows, answers[taken], decision.meta_info or {}), taken


def logprobs(rows: Rows) -> list[float]:
    """The logprobs of rows."""
    return [-math.inf if row[0] is None else row[0] for row in rows]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
