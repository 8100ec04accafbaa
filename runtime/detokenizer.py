"""Turns token ids into text, in its own process, so that neither the worker nor the HTTP loop spends time on it.

Owns the text of every open sample (`OutputText` says what a client may see of it). A request that does not stream is
decoded once, at its end. Everything that is not a token output passes through unchanged, in order. Does not import
torch.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field

from ..scheduler.token_buffer import unpack_ids
from .channels import Endpoints, Receiver, Sender
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
from .text.output_text import OutputText
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_POLL_S = 1.0


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

    def handle(self, message: FromWorker) -> list[ToManager]:
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
                errors.append(RequestError(rid=output.rid, status=500, message=reason, code="detokenizer_failed"))
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
            text = sample.text.push(sample.unshown + ids, output.finish)
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


def run_detokenizer(tokenizer: Tokenizer, endpoints: Endpoints, stop: threading.Event) -> None:
    """Serve until ``stop`` is set, as a process or as a thread of the Engine."""
    inbox: Receiver[FromWorker] = Receiver(endpoints.to_detokenizer, FromWorker)
    outbox = Sender(endpoints.to_manager)
    detokenizer = Detokenizer(tokenizer)
    try:
        while not stop.is_set():
            for message in inbox.poll(_POLL_S):
                for answer in detokenizer.handle(message):
                    outbox.send(answer)
    finally:
        inbox.close()
        outbox.close()


def _main(process: DetokenizerProcess, stop: threading.Event) -> None:
    run_detokenizer(Tokenizer.load(process.tokenizer_path), process.endpoints, stop)


if __name__ == "__main__":
    sys.exit(run_child("detokenizer", DetokenizerProcess, _main))
