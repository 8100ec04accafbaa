"""Compiles grammars in a thread of their own, and keeps those that were asked for last.

A request gets its constraint at once and waits for it in the scheduler; meanwhile the event loop serves the others. The
thread has a lower priority than they have, and releases the interpreter's lock while it compiles.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLParserLimits

from ...scheduler.constraints.item_trie import ItemTrie
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import Grammar
from ..text.tokenizer import Tokenizer
from . import structural_tags
from .grammar import GrammarConstraint, GrammarVocabulary, Position
from .item_slots import GrammarWithItems
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
        self._vocabularies: dict[bool, Future[GrammarVocabulary]] = {}
        """By whether it has slots for items."""
        self._roots: OrderedDict[str, Future[Position]] = OrderedDict()
        self._ends_within: WeakKeyDictionary[ItemTrie, np.ndarray] = WeakKeyDictionary()
        """Tries in use -> the tokens of their items that end outputs."""

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """The constraint that a grammar sets, which may still be compiling. That of a grammar with items has slots for
        them."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars", initializer=_lower_priority)
        has_slots = bool(structural_tags.item_tries(grammar.source))
        vocabulary = self._vocabularies.get(has_slots)
        if vocabulary is None:
            vocabulary = self._vocabularies[has_slots] = self._thread.submit(self._read_vocabulary, has_slots)
        root = self._roots.get(grammar.source)
        if root is None:
            root = self._roots[grammar.source] = self._thread.submit(_compile, vocabulary, grammar.source)
            root.add_done_callback(lambda _: self._wake())
            while len(self._roots) > MAX_GRAMMARS:
                self._roots.popitem(last=False)
        self._roots.move_to_end(grammar.source)
        return GrammarConstraint(vocabulary, root, grammar.name)

    def with_items(self, grammar: Grammar, tries: Mapping[str, ItemTrie]) -> GrammarWithItems:
        """The constraint of a grammar with items. tries: by name, in the order of `structural_tags.item_tries`. Raises
        RequestRefused for a trie with a token that ends outputs."""
        for name, trie in tries.items():
            self._refuse_ends(grammar.name, name, trie)
        return GrammarWithItems(self.constraint(grammar), list(tries.values()))

    def _refuse_ends(self, where: str, name: str, trie: ItemTrie) -> None:
        ends = self._ends_within.get(trie)
        if ends is None:
            ends = self._ends_within[trie] = np.intersect1d(trie.edges[1:].astype(np.int32), self._eos_token_ids)
        if len(ends):
            raise RequestRefused(
                f"{where}: items of {name!r} have the token {ends[0]}, which ends the model's outputs; use it as "
                "item_trie, or build it without that token",
                code="invalid_grammar",
                param=where,
            )

    def close(self) -> None:
        """Start no other compilation."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_vocabulary(self, has_slots: bool) -> GrammarVocabulary:
        return GrammarVocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids, has_slots=has_slots)


def _compile(vocabulary: Future[GrammarVocabulary], source: str) -> Position:
    found = vocabulary.result()
    if structural_tags.is_structural(source):
        source = structural_tags.build(source, found.special, found.first_slot)
    source, checks = unwrap(source)
    return found.compile(source, LIMITS, checks)


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has a priority for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
