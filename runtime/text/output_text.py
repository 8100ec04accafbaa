"""The text of one sample as its client sees it: whole characters, no stop string, nothing taken back once it was sent.

This is all the detokenizer needs of a request, streaming or not:

    text = OutputText(tokenizer, skip_special_tokens=…, stop=…, no_stop_trim=…)
    text.push(new_ids)            -> what is new; a tail that may become a stop string waits
    text.push(new_ids, finish)    -> the rest, up to the stop that was matched
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...scheduler.constraints.items import ITEM
from ...scheduler.outcome import FinishReason
from .incremental_decode import IncrementalDecoder, decode_all
from .stop_strings import find_final_stop, held_back
from .tokenizer import Tokenizer


class OutputText:
    """Parameters as in SamplingParams; ``no_stop_trim``: the stop, and the rest of its token, stay in the text."""

    __slots__ = (
        "_decoder",
        "_ids",
        "_no_stop_trim",
        "_sent",
        "_skip_special_tokens",
        "_stop",
        "_tokenizer",
        "_waiting",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = () if no_stop_trim else tuple(stop)
        self._no_stop_trim = no_stop_trim
        self._decoder = IncrementalDecoder(tokenizer.token_bytes, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        """All ids, kept only if a stop string may have to be found in them."""
        self._sent = 0
        """Characters returned so far."""
        self._waiting = ""
        """Decoded, not yet returned."""

    def push(self, token_ids: Iterable[int], finish: FinishReason | None = None) -> str:
        """The new text. ``finish`` ends the sample: nothing may be pushed after it."""
        ids = list(token_ids)
        matched = None if finish is None or finish.type != "stop" or self._no_stop_trim else finish.matched
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids.pop()  # the stop token ends the text and is no part of it
        if self._stop:
            self._ids += ids
        if isinstance(matched, str) and self._is_stop_string(matched):
            return self._text_before(matched)[self._sent :]
        text = self._waiting + self._decoder.push(ids)
        if finish is not None:
            return text + self._decoder.flush()
        hold = held_back(text, self._stop) if self._stop else 0
        ready = text[: len(text) - hold]
        self._waiting = text[len(text) - hold :]
        self._sent += len(ready)
        return ready

    def _is_stop_string(self, matched: str) -> bool:
        """False if the sample ended as a whole item of a trie, or where a stop regex matched: nothing is cut off then.
        (A user's stop string may equal the marker of an item. None equals a regex of the same request.)"""
        if matched not in self._stop:
            return False
        return matched != ITEM or find_final_stop(self._tokenizer.token_bytes, self._ids, ITEM) is not None

    def _text_before(self, stop: str) -> str:
        """Text of all ids up to the stop string that the last one completed."""
        token_bytes, skip = self._tokenizer.token_bytes, self._skip_special_tokens
        found = find_final_stop(token_bytes, self._ids, stop)
        if found is None:
            raise ValueError(f"stop string {stop!r} does not end in the last of the {len(self._ids)} tokens")
        kept = self._ids[: found.kept_tokens]
        hidden = skip and self._ids[found.kept_tokens] in token_bytes.special_ids
        return decode_all(token_bytes, kept, skip_special_tokens=skip) + ("" if hidden else found.visible_tail)
