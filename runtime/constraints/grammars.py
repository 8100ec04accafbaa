"""Compiles grammars in a thread of their own, and keeps those that were asked for last.

A request gets its constraint at once and waits for it in the scheduler; meanwhile the event loop serves the others. The
thread has a lower priority than they have, and releases the interpreter's lock while it compiles.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from llguidance import LLParserLimits

from ...scheduler.sampling_params import Grammar
from ..text.tokenizer import Tokenizer
from . import structural_tags
from .grammar import GrammarConstraint, GrammarVocabulary, Position
from .json_checks import unwrap

MAX_GRAMMARS = 128
"""That are kept compiled, besides those in use."""

LIMITS = LLParserLimits(max_lexer_states=60_000, verbose_errors=False)
"""States of one grammar's lexer, some 2 kB each; the rest as llguidance has it: a mask takes at most some 15 ms."""

_NICENESS = 5


class Grammars:
    """The compiled grammars of a worker, by their source."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """load_tokenizer: called with the first grammar. wake: called, from another thread, when one is compiled."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size, self._eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._wake = wake
        self._thread: ThreadPoolExecutor | None = None
        self._vocabulary: Future[GrammarVocabulary] | None = None
        self._roots: OrderedDict[str, Future[Position]] = OrderedDict()

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint that a grammar sets, which may still be compiling."""
        if self._thread is None or self._vocabulary is None:
            self._thread = ThreadPoolExecutor(1, "grammars", initializer=_lower_priority)
            self._vocabulary = self._thread.submit(self._read_vocabulary)
        root = self._roots.get(grammar.source)
        if root is None:
            root = self._roots[grammar.source] = self._thread.submit(_compile, self._vocabulary, grammar.source)
            root.add_done_callback(lambda _: self._wake())
            while len(self._roots) > MAX_GRAMMARS:
                self._roots.popitem(last=False)
        self._roots.move_to_end(grammar.source)
        return GrammarConstraint(self._vocabulary, root, grammar.name)

    def close(self) -> None:
        """Start no other compilation."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)


def _compile(vocabulary: Future[GrammarVocabulary], source: str) -> Position:
    found = vocabulary.result()
    if structural_tags.is_structural(source):
        source = structural_tags.build(source, found.special)
    source, checks = unwrap(source)
    return found.compile(source, LIMITS, checks)


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has a priority for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
