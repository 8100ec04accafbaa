"""What a `select` took, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..choices import ChoicesSamplingMethod, Rows, logprobs, mean
from ..errors import BackendError


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a `select`. scores: mean log-probability per token of each choice. rows: [logprob, id, text] of
    the tokens of each. answer: the server's, for the one that was taken. details: what the method says of it."""

    text: str
    scores: list[float]
    rows: list[Rows]
    answer: dict[str, Any]
    details: dict[str, Any]


def take(
    choices: Sequence[str],
    method: ChoicesSamplingMethod,
    rows: list[Rows],
    alone: list[Rows] | None,
    answers: list[dict[str, Any]],
) -> tuple[Choice, int]:
    """The choice that ``method`` takes, and its position. rows, alone: [logprob, id, text] of each one's tokens, behind
    the state's text and without it; answers: the server's. Raises BackendError for a method that takes none."""
    scores = [mean(logprobs(each)) for each in rows]
    decision = method(
        choices=list(choices),
        normalized_prompt_logprobs=scores,
        input_token_logprobs=rows,
        output_token_logprobs=[[] for _ in choices],
        unconditional_token_logprobs=alone,
    )
    if decision.decision not in choices:
        raise BackendError(f"the choices_method took {decision.decision!r}, which is none of {list(choices)}")
    taken = choices.index(decision.decision)
    return Choice(choices[taken], scores, rows, answers[taken], decision.meta_info or {}), taken
