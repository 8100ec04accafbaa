"""Turns token ids into text, in its own process, so that neither the worker nor the HTTP loop spends time on it.

Owns the text of every open sample; `OutputText` holds back what a client must not see yet. A request that does not
stream is decoded once, at its end. Messages other than token outputs pass through unchanged, in order. Does not import
torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..scheduler.constraints.constraint import ENDS
from ..scheduler.outcome import FinishReason
from ..scheduler.token_buffer import unpack_ids
from .channels import Endpoints, Receiver, Sender, Waker
from .launcher.child_process import DetokenizerProcess, run_child
from .messages import (
    DetokenizeParams,
    FromWorker,
    RequestError,
    TextOutput,
    TextOutputs,
    TokenOutput,
    TokenOutputs,
    ToManager,
)
from .settled_memory import settle_memory
from .stop_signal import StopSignal
from .text.incremental_decode import IncrementalDecoder, decode_all
from .text.stop_strings import find_final_stop, held_back
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class OutputText:
    """The text of one sample as its client sees it: whole characters, no stop string, no text retracted once sent.

        text = OutputText(tokenizer, skip_special_tokens=…, stop=…, no_stop_trim=…)
        text.push_ids(new_ids)            -> the new text; a tail that may become a stop string is held back
        text.push_ids(new_ids, finish)    -> the rest, up to the stop that was matched

    Parameters as in SamplingParams; ``no_stop_trim``: the stop, and the rest of its token, stay in the text.
    """

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

    def push_ids(self, token_ids: Iterable[int], finish: FinishReason | None = None) -> str:
        """The new text. ``finish`` ends the sample: nothing may be pushed after it."""
        ids = list(token_ids)
        matched = None if finish is None or finish.type != "stop" or self._no_stop_trim else finish.matched
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids.pop()  # the stop token ends the text and is no part of it
        if self._stop:
            self._ids += ids
        if isinstance(matched, str) and self._is_stop_string(matched):
            return self._text_before(matched)[self._sent :]
        text = self._waiting + self._decoder.push_ids(ids)
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
        return matched not in ENDS or find_final_stop(self._tokenizer.token_bytes, self._ids, matched) is not None

    def _text_before(self, stop: str) -> str:
        """Text of all ids up to the stop string that the last one completed."""
        token_bytes, skip = self._tokenizer.token_bytes, self._skip_special_tokens
        found = find_final_stop(token_bytes, self._ids, stop)
        if found is None:
            raise ValueError(f"stop string {stop!r} does not end in the last of the {len(self._ids)} tokens")
        kept = self._ids[: found.kept_tokens]
        hidden = skip and self._ids[found.kept_tokens] in token_bytes.special_ids
        return decode_all(token_bytes, kept, skip_special_tokens=skip) + ("" if hidden else found.visible_tail)


@dataclass(slots=True)
class _Sample:
    """A sample that has not ended. ``unshown``: ids of a request that does not stream, to be decoded at its end."""

    text: OutputText
    stream: bool
    unshown: list[int] = field(default_factory=list)


class Detokenizer:
    """Turns the worker's messages into those that the TokenizerManager gets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._samples: dict[tuple[str, int], _Sample] = {}

    @property
    def num_open(self) -> int:
        return len(self._samples)

    def handle_message(self, message: FromWorker) -> list[ToManager]:
        """Return what to send on for one message from the worker."""
        if isinstance(message, TokenOutputs):
            return self._detokenize_step(message)
        if isinstance(message, RequestError):
            self._forget(message.rid)
        return [message]

    def _detokenize_step(self, outputs: TokenOutputs) -> list[ToManager]:
        items: list[TextOutput] = []
        errors: list[ToManager] = []
        for output in outputs.items:
            try:
                items.append(self._detokenize(output))
            except Exception as error:  # one request's failure must not cost the others their text
                logger.exception("the text of request %s failed", output.rid)
                self._forget(output.rid)
                reason = f"its text failed: {type(error).__name__}: {error}"
                errors.append(RequestError(rid=output.rid, message=reason, code="detokenizer_failed"))
        return [TextOutputs(items=items), *errors] if items else errors

    def _forget(self, rid: str) -> None:
        for key in [key for key in self._samples if key[0] == rid]:
            del self._samples[key]

    def _detokenize(self, output: TokenOutput) -> TextOutput:
        key = (output.rid, output.index)
        sample = self._samples.get(key)
        if sample is None:
            sample = self._samples[key] = self._open(output.params or DetokenizeParams())
        ids = unpack_ids(output.new_ids).tolist()
        text = ""
        if sample.stream or output.finish is not None:
            text = sample.text.push_ids(sample.unshown + ids, output.finish)
        else:
            sample.unshown += ids
        if output.finish is not None:
            del self._samples[key]
        return TextOutput(output=output, text=text)

    def _open(self, params: DetokenizeParams) -> _Sample:
        text = OutputText(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            no_stop_trim=params.no_stop_trim,
        )
        return _Sample(text, params.stream)


def run_detokenizer(tokenizer: Tokenizer, endpoints: Endpoints, stop: StopSignal) -> None:
    """Serve until ``stop`` is set, as a process or as a thread of the Engine."""
    inbox: Receiver[FromWorker] = Receiver(endpoints.to_detokenizer, FromWorker)
    outbox = Sender(endpoints.to_manager)
    waker = Waker(endpoints.to_detokenizer)
    stop.on_set(waker.wake)
    detokenizer = Detokenizer(tokenizer)
    try:
        while not stop.is_set():
            for message in inbox.poll(_POLL_S):
                for answer in detokenizer.handle_message(message):
                    outbox.send(answer)
    finally:
        for part in (waker, inbox, outbox):
            part.close()


def _main(process: DetokenizerProcess, stop: StopSignal) -> None:
    tokenizer = Tokenizer.load(process.tokenizer_path)
    settle_memory()
    run_detokenizer(tokenizer, process.endpoints, stop)


if __name__ == "__main__":
    sys.exit(run_child("detokenizer", DetokenizerProcess, _main))
