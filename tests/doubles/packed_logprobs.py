"""Logprobs as they cross the processes, made from readable ones."""

from __future__ import annotations

import struct

from baton.runtime.answer import Logprobs, TokenLogprob
from baton.runtime.messages import LogprobChunk
from baton.scheduler.token_buffer import pack_ids


def chunk(*tokens: tuple[int, float], top: list[tuple[int, float]] | None = None) -> LogprobChunk:
    """``top``: of all tokens, one after the other."""
    (ids, values), (top_ids, top_values) = _packed(list(tokens)), _packed(top or [])
    return LogprobChunk(ids=ids, values=values, top_ids=top_ids, top_values=top_values)


def packed(tokens: list[TokenLogprob]) -> Logprobs:
    """What unpacks to these tokens, all with a text or all without one, and with as many top entries."""
    width = max((len(token.top or ()) for token in tokens), default=0)
    missing = TokenLogprob(None, 0)
    top = [entry for token in tokens for entry in token.top or [missing] * width]
    texts = {entry.id: entry.text for entry in (*tokens, *top) if entry.text is not None}
    return Logprobs([chunk(*map(_entry, tokens), top=list(map(_entry, top)))], texts.__getitem__ if texts else None)


def _entry(token: TokenLogprob) -> tuple[int, float]:
    return token.id, float("nan") if token.logprob is None else token.logprob


def _packed(entries: list[tuple[int, float]]) -> tuple[bytes, bytes]:
    return pack_ids([token_id for token_id, _ in entries]), struct.pack(
        f"<{len(entries)}f", *(value for _, value in entries)
    )
