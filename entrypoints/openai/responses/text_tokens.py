"""Which tokens an answer's words and thoughts are made of, for their number and their logprobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat

import msgspec

from ....runtime.answer import Output, TokenLogprob
from ....runtime.text.incremental_decode import IncrementalDecoder
from ....runtime.text.token_bytes import TokenBytes

LogprobRow = msgspec.Raw
"""JSON of one token's logprobs: there may be many thousands, and so they take the least room."""


class TextTokens:
    """One output. A piece of it is looked up in its text, from where the last one ended; what lies between (the marks
    of thoughts and calls) belongs to none. Words behind a call may be found too early, inside of the call."""

    def __init__(self, token_bytes: TokenBytes, forced: str) -> None:
        """forced: what stands before the output's text, and may be the beginning of a piece."""
        self._token_bytes = token_bytes
        self._decoder: IncrementalDecoder | None = None
        """As the output itself was decoded."""
        self._decoded = 0
        """Characters of all tokens so far."""
        self._waiting: deque[tuple[int, int, LogprobRow | None]] = deque()
        """Tokens that no piece was made of yet: from where to where each goes in the text."""
        self._text = forced
        """The text behind the last piece, and where that piece ended."""
        self._start = -len(forced)

    def add_output(self, output: Output) -> None:
        """The output has grown."""
        if self._decoder is None:
            skips = output.prompt.sampling.skip_special_tokens
            self._decoder = IncrementalDecoder(self._token_bytes, skip_special_tokens=skips)
        self._text += output.text
        rows: Iterable[TokenLogprob | None] = output.output_logprobs if len(output.output_logprobs) else repeat(None)
        for token_id, row in zip(output.token_ids, rows, strict=False):
            start = self._decoded
            self._decoded += len(self._decoder.push_ids((token_id,)))
            # One within a character has a part in it, though it completes none.
            stop = self._decoded + self._decoder.has_pending_bytes
            self._waiting.append((start, stop, None if row is None else self._encoded(row)))

    def take_piece(self, piece: str) -> tuple[int, list[LogprobRow]]:
        """(how many tokens, their logprobs if there are any) of the next words or thoughts. Each token counts once,
        for the first piece that it has a part in."""
        found = max(0, self._text.find(piece))
        begin, end = self._start + found, self._start + found + len(piece)
        self._text, self._start = self._text[found + len(piece) :], end
        taken: list[LogprobRow | None] = []
        while self._waiting and self._waiting[0][0] < end:
            _, stop, row = self._waiting.popleft()
            if stop > begin:
                taken.append(row)
        return len(taken), [row for row in taken if row is not None]

    def _encoded(self, token: TokenLogprob) -> LogprobRow:
        top = [self._alone(other) for other in token.top or ()]
        return msgspec.Raw(msgspec.json.encode({**self._alone(token), "top_logprobs": top}))

    def _alone(self, token: TokenLogprob) -> dict:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(self._token_bytes[token.id])}
