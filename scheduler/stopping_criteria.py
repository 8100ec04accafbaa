"""When a sequence ends: which token, stop string, constraint or length ends it, and what a child inherits of it.

If several apply, the first of these counts: an eos or stop id, a stop string, a stop regex, the constraint, the length.
The first three do not count until min_new_tokens are generated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batch import StepResult, StopMatch
from .outcome import FinishReason
from .request import Request


@dataclass(slots=True, frozen=True)
class Ending:
    """Why a sequence ends. kept_tokens: output tokens that a child inherits; None for all."""

    reason: FinishReason
    kept_tokens: int | None = None


class StoppingCriteria:
    """The rules for one model."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)

    def end_ids(self, request: Request) -> frozenset[int]:
        """Every token id that ends the request: eos and its stop ids."""
        eos = self._eos_token_ids if request.ends_at_eos else frozenset()
        return eos.union(request.sampling.stop_token_ids)

    def ends_by_id(self, request: Request, token_id: int) -> bool:
        """True if this token id ends the request."""
        is_eos = token_id in self._eos_token_ids and request.ends_at_eos
        return is_eos or token_id in request.sampling.stop_token_ids

    def ends_within_token(self, requests: list[Request], result: StepResult) -> list[tuple[Request, StopMatch]]:
        """The requests (one for each row of a step) that ``result`` will end within a token, each with its match."""
        matches = result.stop_matches.items()
        if not matches:
            return []
        tokens_of = result.rows()
        return [(requests[row], m) for row, m in matches if self.cuts_token(requests[row], tokens_of[row], m)]

    def cuts_token(self, request: Request, token_ids: list[int], match: StopMatch) -> bool:
        """True if the match, found in the text of these new tokens, ends the request and leaves text between the last
        kept token and the match: a child's own tokens must then begin with that text."""
        if not match.visible_tail or request.finish is not None or request.sampling.no_stop_trim:
            return False
        return not any(self.ends_by_id(request, token_id) for token_id in token_ids[: match.token + 1])

    def ends_with_prompt(self, request: Request) -> bool:
        """True if the request needs only its prompt computed, and it is."""
        return request.max_new_tokens == 0 and request.committed_len == request.prompt_len

    def take_tokens(
        self, request: Request, token_ids: list[int], stop_match: StopMatch | None
    ) -> tuple[tuple[int, ...], Ending | None]:
        """Append the tokens a step gave a request, up to the one that ends it. Returns what was appended, and the
        ending if there is one. stop_match: found in the text up to one of these tokens."""
        request.num_output_placeholders -= 1
        for place, token_id in enumerate(token_ids):
            match = stop_match if stop_match is not None and stop_match.token == place else None
            ending = self._take_token(request, token_id, match)
            if ending is not None:
                return tuple(token_ids[: place + 1]), ending
        return tuple(token_ids), None

    def _take_token(self, request: Request, token_id: int, stop_match: StopMatch | None) -> Ending | None:
        request.token_ids.append(token_id)
        num_tokens = request.num_output_tokens
        sampling, constraint, state = request.sampling, request.constraint, request.constraint_state
        if state is not None:
            state = request.constraint_state = state.advance(np.array([token_id], dtype=np.int32))
        may_stop = num_tokens > sampling.min_new_tokens
        if may_stop and self.ends_by_id(request, token_id):
            kept = None if sampling.no_stop_trim else num_tokens - 1
            return Ending(FinishReason(type="stop", matched=token_id), kept)
        if may_stop and stop_match is not None and stop_match.is_regex:
            return Ending(FinishReason(type="stop", matched=sampling.stop_regex[stop_match.stop_index]))
        if may_stop and stop_match is not None:
            kept = None if sampling.no_stop_trim else stop_match.kept_tokens
            return Ending(FinishReason(type="stop", matched=sampling.stop[stop_match.stop_index]), kept)
        if constraint is not None and state is not None and state.at_end()[0]:
            return Ending(FinishReason(type="stop", matched=constraint.matched))
        if num_tokens >= request.max_new_tokens:
            return Ending(FinishReason(type="length"))
        return None
