"""OpenAI's ``logprobs`` object of a completion, from the native lists of [logprob, token id, text]."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...runtime.text.incremental_decode import IncrementalDecoder, decode_all
from ...runtime.text.token_bytes import TokenBytes


class LogprobsBuilder:
    """Of one choice, as it grows: {tokens, token_logprobs, top_logprobs, text_offset}.

    text_offset: where a token's text begins, counted in characters from the start of the choice's text, the echoed
    prompt included; a token within a character begins where the character does. Tokens of a stop string that was cut
    off lie behind the end of the text.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str, *, skip_special_tokens: bool) -> None:
        """``echo``: the prompt's text where it is part of the choice's text."""
        self._token_bytes = token_bytes
        self._echo = echo
        self._decoder = IncrementalDecoder(token_bytes, skip_special_tokens=skip_special_tokens)
        self._position = len(echo)

    def add(self, meta: dict) -> dict | None:
        """What the new logprobs of ``meta`` (a meta_info) add; None if it brings none."""
        prompt, output = meta["input_token_logprobs"], meta["output_token_logprobs"]
        rows = [*prompt, *output]
        if not rows:
            return None
        tops = [
            *meta.get("input_top_logprobs", [None] * len(prompt)),
            *meta.get("output_top_logprobs", [None] * len(output)),
        ]
        offsets = self._prompt_offsets([row[1] for row in prompt]) if prompt else []
        for _, token_id, _ in output:
            offsets.append(self._position)
            self._position += len(self._decoder.push((token_id,)))
        return {
            "tokens": [text for _, _, text in rows],
            "token_logprobs": [value for value, _, _ in rows],
            "top_logprobs": [_alternatives(row, top) for row, top in zip(rows, tops, strict=True)],
            "text_offset": offsets,
        }

    def _prompt_offsets(self, ids: Iterable[int]) -> list[int]:
        """What the tokenizer put before the text (a bos token) takes no room in it."""
        ids = list(ids)
        added = len(decode_all(self._token_bytes, ids, skip_special_tokens=False)) - len(self._echo)
        decoder = IncrementalDecoder(self._token_bytes, skip_special_tokens=False)
        offsets, position = [], -max(0, added)
        for token_id in ids:
            offsets.append(max(0, position))
            position += len(decoder.push((token_id,)))
        return offsets


def _alternatives(row: list, top: list[list] | None) -> dict[str, float | None] | None:
    """Text -> logprob, of the best tokens and the one taken; of tokens with the same text the best counts. None for the
    first prompt token, which follows nothing."""
    if row[0] is None:
        return None
    entries = sorted([*(top or ()), row], key=lambda entry: -math.inf if entry[0] is None else entry[0], reverse=True)
    found: dict[str, float | None] = {}
    for value, _, text in entries:
        found.setdefault(text, value)
    return found
