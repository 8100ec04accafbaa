"""Which choice a `select` takes: from the log-probabilities of their tokens to one of them.

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

Rows = Sequence[Sequence[Any]]
"""The tokens of one choice: [logprob, token id, text] each."""


@dataclass(slots=True)
class ChoicesDecision:
    """``decision``: one of the choices. meta_info: goes into the step's meta."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(Protocol):
    """Takes one of the choices."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether it needs the logprobs of each choice as a prompt of its own; that is a second request."""
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
        in input_token_logprobs, whose first logprob is None."""
        ...


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The highest mean log-probability per token; the first of equals."""

    def __call__(self, *, choices: list[str], normalized_prompt_logprobs: list[float], **_: Any) -> ChoicesDecision:
        return ChoicesDecision(choices[_first_best(normalized_prompt_logprobs)])


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token: the choices whose token is likeliest stay, until one is left. A choice that has ended goes on
    with its mean. The first of equals."""

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
    """The highest mean of what the text before a choice adds to its tokens' log-probabilities: common words gain
    nothing from being common. The first token of a prompt follows nothing and has no logprob: it counts as it is."""

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
                # What cannot follow here is out, however impossible it is elsewhere.
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


def logprobs(rows: Rows) -> list[float]:
    """The logprobs of rows."""
    return [-math.inf if row[0] is None else row[0] for row in rows]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
