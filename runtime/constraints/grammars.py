"""Compiles grammars in a thread of their own, and keeps those that were asked for last.

A request gets its constraint at once and waits for it in the scheduler; meanwhile the event loop serves the others. The
thread has a lower priority than they have, and releases the interpreter's lock while it compiles. Clients take turns,
and a grammar that no request waits for any more is not compiled, so no client delays another for longer than one
grammar may take, on trial (trial.py) and then in the thread.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

import numpy as np

from ...scheduler.constraints.item_trie import ItemTrie
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import Grammar
from ..text.tokenizer import Tokenizer
from . import structural_tags
from .grammar import CompilerBroken, GrammarConstraint, GrammarError, GrammarVocabulary, Interest, Position
from .item_slots import GrammarWithItems
from .json_checks import unwrap
from .trial import LIMITS, WORKER_STACK_BYTES, NotWanted, Trial, TrialBroken, TrialFailed

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 128
"""That are kept compiled, besides those in use."""

MAX_BYTES = 512 * 2**20
"""Memory of those that are kept, as it was found on trial. Their lexers grow when they are used."""

MAX_TURNS = 1024
"""Clients with turns on record."""

_NICENESS = 5

_CLOSE_S = 5.0
"""Seconds that closing waits for a grammar that is being compiled."""


@dataclass(slots=True, eq=False)
class _Compilation:
    """A grammar that is compiled, or waits to be."""

    source: str
    has_slots: bool
    interest: ref[Interest]
    """Alive as long as a request has the grammar."""
    root: Future[Position] = field(default_factory=Future)
    num_bytes: int = 0

    def is_wanted(self) -> bool:
        return self.interest() is not None


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
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()
        """Guards all that the thread shares."""
        self._waiting: dict[str, deque[_Compilation]] = {}
        """By client."""
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Clients, the one that had its turn last at the end; a client that is not among them has the next one."""
        self._is_closed = False
        self._vocabularies: dict[bool, Future[GrammarVocabulary]] = {}
        """By whether it has slots for items."""
        self._trials: dict[bool, Trial] = {}
        self._known: OrderedDict[str, _Compilation] = OrderedDict()
        self._ends_within: WeakKeyDictionary[ItemTrie, np.ndarray] = WeakKeyDictionary()
        """Tries in use -> the tokens of their items that end outputs."""

    def constraint(self, grammar: Grammar, client: str = "") -> GrammarConstraint:
        """The constraint that a grammar sets, which may still be compiling. That of a grammar with items has slots for
        them."""
        has_slots = bool(structural_tags.item_tries(grammar.source))
        with self._news:
            known = self._known.get(grammar.source)
            interest = known.interest() if known is not None else None
            if interest is None:
                interest = Interest()
            if known is None:
                known = self._known[grammar.source] = _Compilation(grammar.source, has_slots, ref(interest))
            else:
                known.interest = ref(interest)
            # A grammar that waits behind the flood of another client also waits in this one's turn.
            own = self._waiting.get(client, ())
            if not known.root.done() and not any(each is known for each in own):
                self._waiting.setdefault(client, deque()).append(known)
            self._known.move_to_end(grammar.source)
            self._drop_oldest()
            vocabulary = self._vocabularies.setdefault(has_slots, Future())
            if self._thread is None:
                self._thread = self._started_thread()
            self._news.notify()
        return GrammarConstraint(vocabulary, known.root, grammar.name, interest)

    def with_items(self, grammar: Grammar, tries: Mapping[str, ItemTrie], client: str = "") -> GrammarWithItems:
        """The constraint of a grammar with items. tries: by name, in the order of `structural_tags.item_tries`. Raises
        RequestRefused for a trie with a token that ends outputs."""
        for name, trie in tries.items():
            self._refuse_ends(grammar.name, name, trie)
        return GrammarWithItems(self.constraint(grammar, client), list(tries.values()))

    def close(self) -> None:
        """Compile nothing else, and end the processes that compile on trial."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _started_thread(self) -> threading.Thread:
        threading.stack_size(WORKER_STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            thread.start()
            return thread
        finally:
            threading.stack_size(0)

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

    def _drop_oldest(self) -> None:
        while len(self._known) > MAX_GRAMMARS or sum(each.num_bytes for each in self._known.values()) > MAX_BYTES:
            if len(self._known) == 1:
                return
            self._known.popitem(last=False)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _lower_priority()
        while (compilation := self._next()) is not None:
            try:
                position = self._compile(compilation)
            except NotWanted:
                continue
            except CompilerBroken as error:  # the next request tries again
                with self._news:
                    self._forget_compilation(compilation)
                compilation.root.set_exception(error)
            except BaseException as error:  # a panic of Rust's is no Exception
                compilation.root.set_exception(error if isinstance(error, Exception) else GrammarError(str(error)))
            else:
                compilation.root.set_result(position)
            self._wake()
        for trial in self._trials.values():
            trial.close()

    def _next(self) -> _Compilation | None:
        """Wait for the next grammar, of the client with its turn; None once closed."""
        with self._news:
            while True:
                self._news.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return None
                client = self._client_in_turn()
                compilation = self._waiting[client].popleft()
                if not self._waiting[client]:
                    del self._waiting[client]
                if compilation.root.done():  # it had its turn with another client
                    continue
                if compilation.is_wanted():
                    return compilation
                self._forget_compilation(compilation)

    def _client_in_turn(self) -> str:
        """The waiting client whose last turn was longest ago."""
        waits_longest = {client: place for place, client in enumerate(self._turns)}
        client = min(self._waiting, key=lambda client: waits_longest.get(client, -1))
        self._turns[client] = None
        self._turns.move_to_end(client)
        while len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)
        return client

    def _forget_compilation(self, compilation: _Compilation) -> None:
        """Forget a grammar that no request waits for."""
        if self._known.get(compilation.source) is compilation:
            del self._known[compilation.source]

    def _compile(self, compilation: _Compilation) -> Position:
        """Raises GrammarError, and NotWanted if no request waits for it any more."""
        vocabulary = self._vocabulary(compilation.has_slots)
        source = structural_tags.to_llguidance(compilation.source, vocabulary.special, vocabulary.first_slot)
        source, checks = unwrap(source)
        refuse_ordinary_ids(source, vocabulary.special_texts)
        if not self._passes_trial(compilation, source):
            raise NotWanted
        return vocabulary.compile(source, LIMITS, checks)

    def _passes_trial(self, compilation: _Compilation, source: str) -> bool:
        """False if no request waits for the grammar any more, which is forgotten then. Raises GrammarError, and
        CompilerBroken where two processes have ended for another reason."""
        broken = 0
        while True:
            try:
                trial = self._trials[compilation.has_slots]
                compilation.num_bytes = trial.try_grammar(
                    source, lambda: compilation.is_wanted() and not self._is_closed
                )
                return True
            except TrialFailed as error:
                raise GrammarError(str(error)) from None
            except TrialBroken as error:
                broken += 1
                if broken == 2:
                    logger.error("grammars cannot be compiled on trial: %s", error)
                    raise CompilerBroken(str(error)) from None
            except NotWanted:
                with self._news:
                    if not compilation.is_wanted() or self._is_closed:  # else a request came meanwhile
                        self._forget_compilation(compilation)
                        return False

    def _vocabulary(self, has_slots: bool) -> GrammarVocabulary:
        future = self._vocabularies[has_slots]
        if not future.done():
            found = GrammarVocabulary(
                self._load_tokenizer(), self._vocab_size, self._eos_token_ids, has_slots=has_slots
            )
            self._trials[has_slots] = Trial(found.num_tokens, found.special_texts, self._eos_token_ids)
            future.set_result(found)
        return future.result()


def refuse_ordinary_ids(source: str, special: Collection[int]) -> None:
    """Raises GrammarError for a grammar in Lark that names a token by its id which is not a special one: llguidance
    cannot take such a token back. special: the ids that may be named."""
    parts = json.loads(source)["grammars"] if source.lstrip().startswith("{") else [{"lark_grammar": source}]
    for part in parts:
        for mark in _IDS.finditer(_QUOTED.sub("", part.get("lark_grammar") or "")):
            ids = mark[1].split(",")
            if not all(each.strip().isdigit() and int(each) in special for each in ids):
                raise GrammarError(
                    f"{mark[0]} stands for tokens that are not special; write their text, or name special tokens"
                )


_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
"""Strings, expressions and comments of Lark."""

_IDS = re.compile(r"<\[([^\]]*)\]>")


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # Linux alone has a priority for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
