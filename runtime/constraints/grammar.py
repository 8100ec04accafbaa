"""Grammars as constraints: JSON schemas, regular expressions and context-free grammars, on llguidance's matchers.

A matcher is a parser that has read some tokens. It can be copied, at a cost that grows with what it has read, and taken
back by some tokens. So sequences share matchers along lines, and only a fork copies one:

    position 0 ──▶ 1 ──▶ 2 ──▶ 3      one line: its matcher has read three tokens, position 3 stands at its end
                   └──▶ 2' ─▶ 3'      a fork: the matcher was copied at position 3 and taken back to 1

Positions never change, so states made of them are immutable, as the scheduler asks. Sequences that reach the same
position (siblings, beams) share its mask, which is computed once. The masks that a step needs are filled in one call,
by several threads, without the interpreter's lock.

The vocabulary is that of `TokenBytes`: a grammar constrains exactly the bytes that clients get.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ...scheduler.constraints.constraint import BITS, GRAMMAR, MAX_FORCED, AllowedTokens, TokenMasks
from ...scheduler.outcome import RequestRefused
from ..text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NO_WAY_ON = "NoExtension"
"""Begins the reason of a matcher that stops where nothing may follow."""

MAX_THREADS = 8
"""That fill masks. One takes some 10 µs, so more of them are of no use."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that no output fulfils, or a matcher that ran into a limit; the message
    says why."""


class GrammarVocabulary:
    """A model's tokens, as matchers read them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model, which may have more rows than the tokenizer has tokens; those are never allowed.
        eos_token_ids: each may end an output that is whole."""
        pieces = tokenizer.token_bytes
        tokens = [pieces[token_id] for token_id in range(vocab_size)]
        special = {i: tokenizer.token_text(i) for i in sorted(pieces.special_ids) if i < vocab_size}
        self.special = {text: token_id for token_id, text in special.items() if text}
        """Text -> id of the tokens that no other spelling stands for."""
        words = _Words(tokens, list(special), eos_token_ids, tokenizer)
        self.tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(eos_token_ids) or None)
        self.num_words = -(-self.tokenizer.vocab_size // BITS)
        self.executor = LLExecutor(max(1, min(MAX_THREADS, os.cpu_count() or 1)))

    def compile(self, source: str, limits: LLParserLimits | None = None) -> Position:
        """The position before the first token of a grammar in llguidance's own form, JSON or Lark. Takes up to seconds,
        most of them without the interpreter's lock. Raises GrammarError."""
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=limits or LLParserLimits())
        root = Position(_Line(matcher, 0), 0)
        _check(matcher)
        try:
            self.fill([root])
        except GrammarError as error:
            if str(error).startswith(_NO_WAY_ON):
                raise GrammarError("no output fulfils it") from None
            raise
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError("no output fulfils it")
        return root

    def fill(self, positions: Iterable[Position]) -> None:
        """Compute the masks of these positions, in one call. Raises GrammarError for a matcher that ran into a limit,
        once the others have theirs."""
        wanted = [position for position in dict.fromkeys(positions) if position.mask is None]
        if not wanted:
            return
        masks = np.zeros((len(wanted), self.num_words), dtype=np.uint32)
        matchers = [position.matcher() for position in wanted]
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            places = [(matcher, place) for place, matcher in enumerate(matchers)]
            self.executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks[0].nbytes, len(places))
        failed: list[LLMatcher] = []
        for position, matcher, mask in zip(wanted, matchers, masks):
            if matcher.is_error():
                failed.append(matcher)  # it allows the end, which may be wrong
            else:
                position.mask = mask
        for matcher in failed:
            _check(matcher)

    def fill_along(self, wanted: Sequence[_Along]) -> dict[_Along, list[np.ndarray] | GrammarError]:
        """The masks of these positions, and those behind each token of their drafts, up to one that is not allowed or
        that ends the output: uint32 [words] each. An error stands for a matcher that ran into a limit."""
        with suppress(GrammarError):  # told below
            self.fill(position for position, draft in wanted if not draft)
        found: dict[_Along, list[np.ndarray] | GrammarError] = {}
        missing: list[_Along] = []
        for each in dict.fromkeys(wanted):
            position, draft = each
            if draft:
                missing.append(each)
            elif position.mask is not None:
                found[each] = [position.mask]
            else:
                found[each] = _error_of(position.matcher()) or GrammarError("it allows no token")
        while missing:
            # A matcher reads one draft at a time.
            batch = dict(reversed(missing))
            missing = [each for each in missing if batch[each[0]] != each[1]]
            found |= self._read_drafts(list(batch.items()))
        return found

    def _read_drafts(self, wanted: list[_Along]) -> dict[_Along, list[np.ndarray] | GrammarError]:
        """`fill_along` for positions that come once, with a draft each."""
        stops = np.cumsum([1 + len(draft) for _, draft in wanted]).tolist()
        starts = [0, *stops[:-1]]
        masks = np.zeros((stops[-1], self.num_words), dtype=np.uint32)
        matchers = [position.matcher() for position, _ in wanted]
        tasks = [(matcher, start, list(draft)) for matcher, start, (_, draft) in zip(matchers, starts, wanted)]
        self.executor.unsafe_compute_mask_ptr_with_draft_token(tasks, masks.ctypes.data, masks[0].nbytes, len(masks))
        found: dict[_Along, list[np.ndarray] | GrammarError] = {}
        for each, matcher, start, stop in zip(wanted, matchers, starts, stops):
            if (error := _error_of(matcher)) is not None:
                found[each] = error
                continue
            each[0].mask = masks[start]
            unknown = np.flatnonzero(~masks[start + 1 : stop].any(axis=1))
            found[each] = list(masks[start : start + 1 + int(unknown[0])] if len(unknown) else masks[start:stop])
        return found


class _Words:
    """What llguidance asks of a tokenizer."""

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], eos_token_ids: Sequence[int], tokenizer: Tokenizer
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else len(tokens)
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_continuation(text.decode())


def _error_of(matcher: LLMatcher) -> GrammarError | None:
    return GrammarError(matcher.get_error().split("\n<")[0]) if matcher.is_error() else None


def _check(matcher: LLMatcher) -> None:
    if (error := _error_of(matcher)) is not None:
        raise error


@dataclass(slots=True, eq=False)
class _Line:
    """A matcher, and how many tokens it has read."""

    matcher: LLMatcher
    length: int


class Position:
    """A place in a line, behind ``length`` tokens."""

    __slots__ = ("__weakref__", "_forced", "_line", "_next", "is_end", "length", "mask")

    def __init__(self, line: _Line, length: int) -> None:
        self._line, self.length = line, length
        self.mask: np.ndarray | None = None
        """uint32 [words], once computed."""
        self.is_end = line.matcher.is_stopped()
        """Nothing may follow."""
        self._next: WeakValueDictionary[int, Position] | None = None
        self._forced: list[int] | None = None

    def forced(self) -> list[int]:
        """The tokens that follow, as far as the grammar leaves no other text."""
        if self._forced is None:
            self._forced = self.matcher().compute_ff_tokens()
        return self._forced

    def matcher(self) -> LLMatcher:
        """A matcher that stands here; it must not read anything."""
        if self._line.length != self.length:
            self._line = self._branch()
        return self._line.matcher

    def _branch(self) -> _Line:
        matcher = self._line.matcher.deep_copy()
        if not matcher.rollback(self._line.length - self.length):
            raise GrammarError("a matcher could not be taken back")
        return _Line(matcher, self.length)

    def advance(self, token_id: int) -> Position:
        """The position behind one more token. Raises GrammarError for a token that is not allowed."""
        known = self._next.get(token_id) if self._next is not None else None
        if known is not None:
            return known
        moves = self._line.length == self.length and self.length > 0  # nothing moves the root's line
        line = self._line if moves else self._branch()
        if not line.matcher.try_consume_tokens([token_id]):
            _check(line.matcher)
            raise GrammarError(f"token {token_id} is not allowed here")
        line.length += 1
        if self._next is None:
            self._next = WeakValueDictionary()
        found = self._next[token_id] = Position(line, line.length)
        return found


_Along = tuple[Position, tuple[int, ...]]
"""A position, and a draft of what follows it."""


class GrammarConstraint:
    """A `Constraint`; see there for the attributes. It may still be compiling."""

    matched = GRAMMAR
    eos_ends = True
    must_complete = True
    is_uniform = False
    min_tokens = 0
    max_tokens: int | None = None
    output_name = "output"

    def __init__(self, vocabulary: Future[GrammarVocabulary], root: Future[Position], name: str) -> None:
        """root: raises GrammarError if the grammar cannot be compiled. name: for messages, e.g. "json_schema"."""
        self.name = name
        self._vocabulary, self._root = vocabulary, root

    @property
    def is_ready(self) -> bool:
        return self._root.done()

    def failure(self) -> RequestRefused | None:
        error = self._root.exception(timeout=0)
        if error is None:
            return None
        if not isinstance(error, GrammarError):
            logger.error("a grammar could not be compiled; its requests end with an error", exc_info=error)
            error = GrammarError(f"it could not be compiled ({type(error).__name__})")
        return self.refuse(error)

    @property
    def root(self) -> Position:
        return self._root.result(timeout=0)

    @property
    def vocabulary(self) -> GrammarVocabulary:
        return self._vocabulary.result(timeout=0)

    def refuse(self, error: GrammarError) -> RequestRefused:
        """The end of a request whose matcher failed."""
        return RequestRefused(f"{self.name}: {error}", code="invalid_grammar", param=self.name)

    def start(self) -> GrammarStates:
        return GrammarStates(self, None)


@dataclass(slots=True, frozen=True)
class GrammarStates:
    """A `ConstraintState`: the position of each sequence."""

    grammar: GrammarConstraint
    _positions: tuple[Position, ...] | None
    """None for one sequence before its first token, whose grammar may still be compiling."""

    @property
    def positions(self) -> tuple[Position, ...]:
        return (self.grammar.root,) if self._positions is None else self._positions

    def __len__(self) -> int:
        return 1 if self._positions is None else len(self._positions)

    def allowed(self) -> AllowedTokens:
        return AllowedTokens.of_masks(self._masks())

    def num_allowed(self) -> np.ndarray:
        return self._masks().count()

    def _masks(self) -> TokenMasks:
        positions = self.positions
        try:
            self.grammar.vocabulary.fill(positions)
        except GrammarError as error:
            raise self.grammar.refuse(error) from error
        masks = [position.mask for position in positions if position.mask is not None]
        return TokenMasks.stack(np.arange(len(positions)), masks)

    def forced(self) -> np.ndarray:
        return np.array(self.positions[0].forced()[:MAX_FORCED], dtype=np.int32)

    def count_allowed(self, draft: np.ndarray) -> int:
        return self.positions[0].matcher().validate_tokens(draft.tolist())

    @classmethod
    def allowed_along(
        cls, states: Sequence[GrammarStates], drafts: Sequence[np.ndarray]
    ) -> list[AllowedTokens | RequestRefused]:
        wanted = [(state.positions[0], tuple(draft.tolist())) for state, draft in zip(states, drafts, strict=True)]
        masks = states[0].grammar.vocabulary.fill_along(wanted)
        found: list[AllowedTokens | RequestRefused] = []
        for state, each in zip(states, wanted):
            own = masks[each]
            if isinstance(own, GrammarError):
                found.append(state.grammar.refuse(own))
            else:
                found.append(AllowedTokens.of_masks(TokenMasks.stack(np.arange(len(own)), own)))
        return found

    def select(self, sequences: np.ndarray) -> GrammarStates:
        positions = self.positions
        return GrammarStates(self.grammar, tuple(positions[i] for i in sequences.tolist()))

    def advance(self, tokens: np.ndarray) -> GrammarStates:
        pairs = zip(self.positions, tokens.tolist(), strict=True)
        try:
            return GrammarStates(self.grammar, tuple(position.advance(token_id) for position, token_id in pairs))
        except GrammarError as error:
            raise self.grammar.refuse(error) from error

    def at_end(self) -> np.ndarray:
        return np.array([position.is_end for position in self.positions])
