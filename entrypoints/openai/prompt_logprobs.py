"""vLLM's ``prompt_logprobs``: how likely each token of the prompt was, and which would have been likelier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...runtime.answer import Output, TokenLogprob
from ...scheduler.outcome import RequestRefused
from ..fields.reading import typed

_MINUS_INFINITY = -9999.0
"""As in vLLM: JSON has no other."""


def read_prompt_logprobs(fields: dict[str, Any]) -> int | None:
    """Alternatives wanted for each token of the prompt; None for nothing at all. Raises RequestRefused."""
    name = "prompt_logprobs"
    if name not in fields:
        return None
    wanted = typed(fields[name], int, name)
    if wanted == -1:
        raise RequestRefused(
            f"{name} is -1, the whole vocabulary, which this server does not give; use 0 to --max-logprobs", param=name
        )
    if wanted < 0:
        raise RequestRefused(f"{name} is {wanted}; use 0 (no alternatives) to --max-logprobs", param=name)
    if fields.get("stream"):
        raise RequestRefused(f"{name} comes with whole answers only; leave out stream, or {name}", param=name)
    return wanted


def prompt_logprobs(output: Output, num_top: int) -> Iterator[dict[str, dict[str, Any]] | None]:
    """For each token of the prompt an object, by id, of the token itself and the ``num_top`` likeliest. None for the
    first, which follows nothing."""
    for position, token in enumerate(output.input_logprobs):
        yield None if position == 0 else _entries(token, num_top)


def _entries(token: TokenLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    entries = {str(token.id): _entry(token, token.rank)}
    for rank, other in enumerate((token.top or [])[:num_top], 1):
        entries.setdefault(str(other.id), _entry(other, rank))
    return entries


def _entry(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    logprob = _MINUS_INFINITY if token.logprob is None else token.logprob
    return {"logprob": logprob, "rank": rank, "decoded_token": token.text}
