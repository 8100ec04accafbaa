"""OpenAI's ``logprobs`` object of a completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from ...runtime.answer import Logprobs, Output, TokenLogprob
from ...runtime.text.incremental_decode import IncrementalDecoder, decode_all
from ...runtime.text.token_bytes import TokenBytes


class LogprobsBuilder:
    """Builds {tokens, token_logprobs, top_logprobs, text_offset} for one choice, as it grows.

    text_offset: where a token's text begins, in characters from the start of the choice's text, echoed prompt included.
    A token inside a character begins where the character does. Tokens of a stop string that was cut off lie past the
    end of the text.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str | None, *, num_top: int, skip_special_tokens: bool) -> None:
        """``echo``: the prompt's text if the choice's text starts with it. num_top: alternatives of each token."""
        self._token_bytes = token_bytes
        self._echo = echo
        self._num_top = num_top
        self._decoder = IncrementalDecoder(token_bytes, skip_special_tokens=skip_special_tokens)
        self._position = len(echo or "")

    def add(self, output: Output, rows: Callable[[Iterable], Any] = list) -> dict | None:
        """The logprobs object for the new tokens of ``output``; None if it has no new logprobs. rows: what is made of
        the alternatives of all tokens; ``iter`` makes them as they are read."""
        echoed = Logprobs() if self._echo is None else output.input_logprobs
        prompt, new = list(echoed.without_top()), list(output.output_logprobs.without_top())
        if not prompt and not new:
            return None
        offsets = self._prompt_offsets([token.id for token in prompt]) if prompt else []
        for token in new:
            offsets.append(self._position)
            self._position += len(self._decoder.push((token.id,)))
        return {
            "tokens": [token.text for token in prompt + new],
            "token_logprobs": [token.logprob for token in prompt + new],
            "top_logprobs": rows(map(self._alternatives, chain(echoed, output.output_logprobs))),
            "text_offset": offsets,
        }

    def _prompt_offsets(self, ids: list[int]) -> list[int]:
        """Offsets of the prompt's tokens. A bos token that the tokenizer put before the text takes no room in it."""
        added = len(decode_all(self._token_bytes, ids, skip_special_tokens=False)) - len(self._echo or "")
        decoder = IncrementalDecoder(self._token_bytes, skip_special_tokens=False)
        offsets, position = [], -max(0, added)
        for token_id in ids:
            offsets.append(max(0, position))
            position += len(decoder.push((token_id,)))
        return offsets

    def _alternatives(self, token: TokenLogprob) -> dict[str | None, float | None] | None:
        """Text -> logprob, for the best tokens and the chosen one; of tokens with the same text the best counts. None
        for the first prompt token, which follows nothing."""
        if token.logprob is None:
            return None
        entries = sorted([*(token.top or ())[: self._num_top], token], key=_likelihood, reverse=True)
        found: dict[str | None, float | None] = {}
        for entry in entries:
            found.setdefault(entry.text, entry.logprob)
        return found


def _likelihood(token: TokenLogprob) -> float:
    return -math.inf if token.logprob is None else token.logprob
