"""Grammars as constraints: JSON schemas, regular expressions and context-free grammars, on llguidance's matchers.

A matcher is a parser that has read some tokens. It can be copied, at a cost that grows with what it has read, and taken
back by some tokens. So sequences share matchers along lines, and only a fork copies one:

    position 0 ──▶ 1 ──▶ 2 ──▶ 3      one line: its matcher has read three tokens, position 3 stands at its end
                   └──▶ 2' ─▶ 3'      a fork: the matcher was copied at position 3 and taken back to 1

Positions never change, so states made of them are immutable, as the scheduler asks. Sequences that reach the same
position (siblings, beams) share its mask, which is computed once. The masks that a step needs are filled together, many
of them by several threads, without the interpreter's lock.

The vocabulary is that of `TokenBytes`: a grammar constrains exactly the bytes that clients get.

Where a schema has keywords that no grammar can express, a position also has a `Reader` (json_checks.py), which
withholds tokens from its mask. An array with few possible items could then run into a dead end, so the few tokens that
are left are tried out before they are allowed (`_Search`).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ...scheduler.constraints.constraint import BITS, GRAMMAR, MAX_FORCED, AllowedTokens, TokenMasks, walk_draft
from ...scheduler.outcome import RequestRefused
from ..text.tokenizer import Tokenizer
from .json_checks import JSONChecks, Reader, Tokens, ids_of, without
from .structural_tags import MAX_SLOTS
from .trial import NO_WAY_ON

logger = logging.getLogger(__name__)

MAX_THREADS, MIN_THREADS = 8, 4
"""That fill masks. One takes 5 to 10 µs, so more of them are of no use; shared among threads, twice that, so fewer than
four are slower than one."""

MIN_SHARED = 32
"""Fewer masks are filled by one thread."""


MAX_TRIED = 64
"""Tokens that are tried out before they are allowed, at one position; of more, those that repeat a string are."""

NOTHING_LEFT = "no value is left that uniqueItems or minProperties would allow here"

MAX_AHEAD = 48
"""Tokens that are looked ahead. Where so many may follow, as digits of a number, the token is allowed."""

MAX_SEARCHED = 800
"""Tokens that are read ahead for one mask, which takes some 10 ms. If that does not decide, the token is allowed."""


MAX_CHECKED_DRAFT = 8
"""Tokens of a draft where masks may have to be read ahead for: each takes up to tens of milliseconds."""

MAX_FORCED_BYTES = 1024
"""Bytes of the text that all outputs begin with that are divided into tokens, to find the shortest output."""

MAX_LEFT = 256
"""References to dead next positions that a position may hold before it drops them."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that no output fulfils, or a matcher that ran into a limit; the message
    says why."""


class CompilerBroken(Exception):
    """A grammar could not be compiled for a reason that says nothing of it."""


class GrammarVocabulary:
    """A model's tokens, as matchers read them."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, has_slots: bool = False
    ) -> None:
        """vocab_size: of the model, which may have more rows than the tokenizer has tokens; those are never allowed.
        eos_token_ids: each may end an output that is whole. has_slots: behind the model's tokens are those of
        `MAX_SLOTS` slots (item_slots.py)."""
        pieces = tokenizer.token_bytes
        tokens = [pieces[token_id] for token_id in range(vocab_size)]
        special = {i: tokenizer.token_text(i) for i in sorted(pieces.special_ids) if i < vocab_size}
        self.special = {text: token_id for token_id, text in special.items() if text}
        """Text -> id of the tokens that no other spelling stands for."""
        marks = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or r"(?!)")
        self.readable = Tokens(tokens)
        self._spellings = sorted({token for token_id, token in enumerate(tokens) if token and token_id not in special})
        self._known_spellings = frozenset(self._spellings)
        self._longest = max(map(len, self._spellings), default=1)
        self.first_slot = -(-vocab_size // BITS) * BITS
        """Id of the first slot's token; the slots have a word of a mask to themselves."""
        if has_slots:
            tokens += [b""] * (self.first_slot - vocab_size)
            slots = {self.first_slot + slot: f"<|slot {slot}|>" for slot in range(MAX_SLOTS)}
            tokens += [text.encode() for text in slots.values()]
            special |= slots
        self.num_tokens, self.special_texts = len(tokens), special
        """Tokens, slots among them; id -> text of the special ones."""
        words = _Words(tokens, list(special), eos_token_ids, tokenizer, marks)
        self.tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(eos_token_ids) or None)
        self.num_words = -(-self.tokenizer.vocab_size // BITS)
        threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self.executor = LLExecutor(threads)
        self.min_shared = MIN_SHARED if threads >= MIN_THREADS else sys.maxsize
        """So many masks are shared among threads."""

    def compile(self, source: str, limits: LLParserLimits | None = None, checks: JSONChecks | None = None) -> Position:
        """The position before the first token of a grammar in llguidance's own form, JSON or Lark. Takes up to seconds,
        most of them without the interpreter's lock. Raises GrammarError."""
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=limits or LLParserLimits())
        reader = Reader.start(self.readable, checks) if checks is not None else None
        root = Position(_Line(matcher, 0), 0, reader)
        _check(matcher)
        try:
            self.fill([root])
        except GrammarError as error:
            if str(error).startswith(NO_WAY_ON):
                raise GrammarError("no output fulfils it") from None
            raise
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError("no output fulfils it")
        root.min_tokens = self.fewest_tokens(matcher.compute_ff_bytes()[:MAX_FORCED_BYTES])
        return root

    def fewest_tokens(self, text: bytes) -> int:
        """The fewest tokens of an output that begins with this text; the last one may go beyond it."""
        fewest = [0] + [len(text)] * len(text)  # a byte at least each
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - self._longest), end)
            known = (fewest[start] + 1 for start in starts if text[start:end] in self._known_spellings)
            fewest[end] = min(known, default=fewest[end - 1] + 1)
        beyond = (
            fewest[start] + 1
            for start in range(max(0, len(text) - self._longest), len(text))
            if self._begins_a_token(text[start:])
        )
        return min(fewest[-1], *beyond, len(text))

    def _begins_a_token(self, text: bytes) -> bool:
        place = bisect_left(self._spellings, text)
        return place < len(self._spellings) and self._spellings[place].startswith(text)

    def fill(self, positions: Sequence[Position]) -> np.ndarray | None:
        """Compute the masks of these positions, in one call. Raises GrammarError for a matcher that ran into a limit,
        once the others have theirs.

        Returns uint32 [positions, words], where none of them was known; else None, and `Position.mask` has each."""
        wanted = [position for position in dict.fromkeys(positions) if position.mask is None]
        if not wanted:
            return None
        masks = np.zeros((len(wanted), self.num_words), dtype=np.uint32)
        matchers = [position.matcher() for position in wanted]
        address, size = masks.ctypes.data, masks[0].nbytes
        if len(matchers) < self.min_shared:
            for place, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        else:
            places = [(matcher, place) for place, matcher in enumerate(matchers)]
            self.executor.unsafe_compute_mask_ptr(places, address, size, len(places))
        failed: list[LLMatcher] = []
        is_whole = len(wanted) == len(positions)
        for position, matcher, mask in zip(wanted, matchers, masks):
            if matcher.is_error():
                failed.append(matcher)  # it allows the end, which may be wrong
            elif position.reader is None:
                position.mask = mask
            else:
                position.mask, is_whole = self._checked(position, mask), False
        for matcher in failed:
            _check(matcher)
        return masks if is_whole else None

    def _checked(self, position: Position, mask: np.ndarray) -> np.ndarray:
        assert position.reader is not None
        mask = position.reader.withhold(mask)
        if not position.reader.is_exhaustible or position.is_end:
            return mask
        ids = ids_of(mask)
        if len(ids) > MAX_TRIED:
            ids = np.intersect1d(ids, [*position.reader.repeating()])
        search = _Search(self, position)
        return without(mask, [token_id for token_id in ids.tolist() if search.is_dead(token_id)])

    def fill_each(self, positions: Sequence[Position]) -> list[TokenMasks | GrammarError]:
        """The mask of each of these positions; those that are computed together share an array. An error stands for a
        matcher that ran into a limit."""
        masks = None
        with suppress(GrammarError):  # told below
            masks = self.fill(positions)
        if masks is not None:
            places = np.arange(len(masks), dtype=np.int32)
            return [TokenMasks(places[:1], places[place : place + 1], masks) for place in range(len(masks))]
        row = np.zeros(1, dtype=np.int32)
        return [
            TokenMasks(row, row, each.mask.reshape(1, -1)) if each.mask is not None else _no_mask(each)
            for each in positions
        ]

    def fill_along(self, wanted: Sequence[_Along]) -> list[TokenMasks | GrammarError]:
        """The masks of these positions, and those behind each token of their drafts, up to one that is not allowed or
        that ends the output. An error stands for a matcher that ran into a limit."""
        found: dict[_Along, TokenMasks | GrammarError] = {}
        without_draft = [each for each in wanted if not each[1]]
        if without_draft:
            found.update(zip(without_draft, self.fill_each([position for position, _ in without_draft])))
        missing = [each for each in dict.fromkeys(wanted) if each[1]]
        while missing:
            # A matcher reads one draft at a time.
            batch = dict(reversed(missing))
            missing = [each for each in missing if batch[each[0]] != each[1]]
            found |= self._read_drafts(list(batch.items()))
        return [found[each] for each in wanted]

    def _read_drafts(self, wanted: list[_Along]) -> dict[_Along, TokenMasks | GrammarError]:
        """`fill_along` for positions that come once, with a draft each."""
        stops = np.cumsum([1 + len(draft) for _, draft in wanted]).tolist()
        starts = [0, *stops[:-1]]
        masks = np.zeros((stops[-1], self.num_words), dtype=np.uint32)
        matchers = [position.matcher() for position, _ in wanted]
        tasks = [(matcher, start, list(draft)) for matcher, start, (_, draft) in zip(matchers, starts, wanted)]
        address, size = masks.ctypes.data, masks[0].nbytes
        if len(masks) < self.min_shared:
            matcher: Any  # its types lack this method
            for matcher, start, draft in tasks:
                matcher.unsafe_compute_mask_ptr_with_draft_token(address + start * size, size, draft)
        else:
            self.executor.unsafe_compute_mask_ptr_with_draft_token(tasks, address, size, len(masks))
        found: dict[_Along, TokenMasks | GrammarError] = {}
        places = np.arange(len(masks), dtype=np.int32)
        for each, matcher, start, stop in zip(wanted, matchers, starts, stops):
            if (error := _error_of(matcher)) is not None:
                found[each] = error
                continue
            each[0].mask = masks[start]
            unknown = np.flatnonzero(~masks[start + 1 : stop].any(axis=1))
            stop = start + 1 + int(unknown[0]) if len(unknown) else stop
            found[each] = TokenMasks(places[: stop - start], places[start:stop], masks)
        return found


class _Search:
    """Looks for a next item that may stand in an array, behind tokens that are allowed so far."""

    def __init__(self, vocabulary: GrammarVocabulary, position: Position) -> None:
        assert position.reader is not None
        self._vocabulary, self._from = vocabulary, position.reader
        self._matcher = position.matcher().deep_copy()
        self._mask = np.zeros(vocabulary.num_words, dtype=np.uint32)
        self._depth, self._left = 0, MAX_SEARCHED
        self._known: dict[bytes, bool] = {}
        """What came of the texts that were tried; there are several divisions of one into tokens."""

    def is_dead(self, token_id: int) -> bool:
        """True if it is certain that no output continues with this token."""
        return self._are_dead(self._from, [token_id])

    def _are_dead(self, reader: Reader, token_ids: Sequence[int]) -> bool:
        self._left -= len(token_ids)
        if self._left < 0:
            return False
        later = [(token_id, after) for token_id in token_ids if (after := reader.advance(token_id)) is not None]
        ends = self._vocabulary.tokenizer.eos_tokens
        if any(token_id in ends or self._from.got_further(after) for token_id, after in later):
            return False
        return all(self._is_dead(token_id, after) for token_id, after in later)

    def _is_dead(self, token_id: int, after: Reader) -> bool:
        if (known := self._known.get(after.text)) is not None:
            return known
        if self._depth >= MAX_AHEAD or self._left < 0 or not self._matcher.try_consume_tokens([token_id]):
            return False
        dead = self._known[after.text] = False
        self._depth += 1
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if len(ids_of(self._mask)) <= 2 * MAX_TRIED:  # of more, not all are withheld
                ids = ids_of(after.withhold(self._mask))
                dead = self._known[after.text] = len(ids) <= MAX_TRIED and self._are_dead(after, ids.tolist())
        self._matcher.rollback(1)
        self._depth -= 1
        return dead


class _Words:
    """What llguidance asks of a tokenizer."""

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: list[int],
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        marks: re.Pattern[str],
    ) -> None:
        """marks: finds the spellings of special tokens."""
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else len(tokens)
        self.bos_token_id = None
        self._tokenizer, self._marks = tokenizer, marks

    def __call__(self, text: bytes) -> list[int]:
        """The spelling of a special token is text here, as any other: it is cut, so that no token stands for it."""
        words = text.decode()
        cuts = [mark.start() + 1 for mark in self._marks.finditer(words)]
        parts = [words[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(words)])]
        return [token_id for part in parts if part for token_id in self._tokenizer.encode_continuation(part)]


def _error_of(matcher: LLMatcher) -> GrammarError | None:
    return GrammarError(matcher.get_error().split("\n<")[0]) if matcher.is_error() else None


def _no_mask(position: Position) -> GrammarError:
    return _error_of(position.matcher()) or GrammarError("it allows no token")


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

    __slots__ = ("__weakref__", "_forced", "_line", "_next", "is_end", "length", "mask", "min_tokens", "reader")

    def __init__(self, line: _Line, length: int, reader: Reader | None = None) -> None:
        self._line, self.length = line, length
        self.reader = reader
        self.mask: np.ndarray | None = None
        """uint32 [words], once computed."""
        self.min_tokens = 0
        """For a root: the fewest tokens an output can have, given the text with which all outputs begin."""
        self.is_end = line.matcher.is_stopped()
        """Nothing may follow."""
        self._next: dict[int, ref[Position]] = {}
        """Positions behind one more token; they live as long as a sequence stands there."""
        self._forced: list[int] | None = None

    def known_mask(self) -> np.ndarray:
        assert self.mask is not None, "its mask has not been filled"
        return self.mask

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
        known = self._next.get(token_id)
        if known is not None and (found := known()) is not None:
            return found
        reader = self.reader
        if reader is not None and (reader := reader.advance(token_id)) is None:
            raise GrammarError(f"token {token_id} is not allowed here")
        moves = self._line.length == self.length and self.length > 0  # nothing moves the root's line
        line = self._line if moves else self._branch()
        if not line.matcher.try_consume_tokens([token_id]):
            _check(line.matcher)
            raise GrammarError(f"token {token_id} is not allowed here")
        line.length += 1
        if len(self._next) >= MAX_LEFT and len(self._next) % MAX_LEFT == 0:
            self._next = {token: each for token, each in self._next.items() if each() is not None}
        found = Position(line, line.length, reader)
        self._next[token_id] = ref(found)
        return found


_ENDED, _OPEN = np.array([True]), np.array([False])
for _answer in (_ENDED, _OPEN):
    _answer.flags.writeable = False

_Along = tuple[Position, tuple[int, ...]]
"""A position, and a draft of what follows it."""


class Interest:
    """Held by all requests that wait for one grammar; without it, the grammar is not compiled."""

    __slots__ = ("__weakref__",)


class GrammarConstraint:
    """A `Constraint`; see there for the attributes. It may still be compiling."""

    matched = GRAMMAR
    eos_ends = True
    must_complete = True
    is_uniform = False
    max_tokens: int | None = None

    def __init__(
        self,
        vocabulary: Future[GrammarVocabulary],
        root: Future[Position],
        name: str,
        interest: Interest | None = None,
    ) -> None:
        """root: raises GrammarError if the grammar cannot be compiled. name: for messages, e.g. "json_schema".
        interest: what keeps the grammar from being dropped before it is compiled."""
        self.name, self.output_name = name, f"output of {name}"
        self._vocabulary, self._root, self._interest = vocabulary, root, interest

    @property
    def is_ready(self) -> bool:
        return self._root.done()

    def failure(self) -> RequestRefused | None:
        error = self._root.exception(timeout=0)
        if error is None:
            return None
        if isinstance(error, CompilerBroken):
            return RequestRefused(f"{self.name} could not be compiled ({error}); try again", code="request_failed")
        if not isinstance(error, GrammarError):
            logger.error("a grammar could not be compiled; its requests end with an error", exc_info=error)
            error = GrammarError(f"it could not be compiled ({type(error).__name__})")
        return self.refuse(error)

    @property
    def min_tokens(self) -> int:
        """0 as long as it is compiling, or if it cannot be compiled."""
        return self.root.min_tokens if self.is_ready and self._root.exception(timeout=0) is None else 0

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


class GrammarStates:
    """A `ConstraintState`: the position of each sequence. It never changes."""

    __slots__ = ("_positions", "grammar")

    def __init__(self, grammar: GrammarConstraint, positions: tuple[Position, ...] | None) -> None:
        """positions: None for one sequence before its first token, whose grammar may still be compiling."""
        self.grammar, self._positions = grammar, positions

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
            found = self.grammar.vocabulary.fill(positions)
        except GrammarError as error:
            raise self.grammar.refuse(error) from error
        if found is not None:
            places = np.arange(len(positions), dtype=np.int32)
            return TokenMasks(places, places, found)
        return TokenMasks.stack(np.arange(len(positions)), [position.known_mask() for position in positions])

    def forced(self) -> np.ndarray:
        found = np.array(self.positions[0].forced()[:MAX_FORCED], dtype=np.int32)
        return found if self.positions[0].reader is None else found[: self._count_checked(found)]

    def count_allowed(self, draft: np.ndarray) -> int:
        if self.positions[0].reader is not None:
            return self._count_checked(draft)
        return self.positions[0].matcher().validate_tokens(draft.tolist())

    def _count_checked(self, draft: np.ndarray) -> int:
        """`count_allowed` of the first `MAX_CHECKED_DRAFT` tokens, up to one behind which no token may follow."""
        state, draft = self, draft[:MAX_CHECKED_DRAFT]
        for place, token in enumerate(draft.reshape(-1, 1)):
            if state.at_end()[0] or not state.allowed().holds(np.zeros(1, dtype=np.int32), token)[0]:
                return place
            state = state.advance(token)
            if not state.at_end()[0] and not state.num_allowed()[0]:
                return place
        return len(draft)

    @classmethod
    def allowed_next(cls, states: Sequence[GrammarStates]) -> AllowedTokens:
        positions = [state.positions[0] for state in states]
        grammar = states[0].grammar
        try:
            masks = grammar.vocabulary.fill(positions)
        except GrammarError as error:
            raise grammar.refuse(error) from error
        for state, position in zip(states, positions):
            if position.reader is not None and not state.num_allowed()[0]:
                raise state.grammar.refuse(GrammarError(NOTHING_LEFT))
        places = np.arange(len(positions), dtype=np.int32)
        if masks is not None:
            return AllowedTokens.of_masks(TokenMasks(places, places, masks))
        return AllowedTokens.of_masks(TokenMasks.stack(places, [position.known_mask() for position in positions]))

    @classmethod
    def allowed_along(
        cls, states: Sequence[GrammarStates], drafts: Sequence[np.ndarray]
    ) -> list[AllowedTokens | RequestRefused]:
        checked = [state.positions[0].reader is not None for state in states]
        plain = [(state, draft) for state, draft, is_checked in zip(states, drafts, checked) if not is_checked]
        masks = iter(cls._along(*zip(*plain)) if plain else ())
        return [
            state._checked_along(draft) if is_checked else next(masks)
            for state, draft, is_checked in zip(states, drafts, checked, strict=True)
        ]

    def _checked_along(self, draft: np.ndarray) -> AllowedTokens | RequestRefused:
        try:
            found = walk_draft(self, draft)
        except RequestRefused as refusal:
            return refusal
        return found if self.num_allowed()[0] else self.grammar.refuse(GrammarError(NOTHING_LEFT))

    @classmethod
    def _along(
        cls, states: Sequence[GrammarStates], drafts: Sequence[np.ndarray]
    ) -> list[AllowedTokens | RequestRefused]:
        wanted = [(state.positions[0], tuple(draft.tolist())) for state, draft in zip(states, drafts, strict=True)]
        masks = states[0].grammar.vocabulary.fill_along(wanted)
        return [
            state.grammar.refuse(own) if isinstance(own, GrammarError) else AllowedTokens.of_masks(own)
            for state, own in zip(states, masks, strict=True)
        ]

    def select(self, sequences: np.ndarray) -> GrammarStates:
        positions = self.positions
        return GrammarStates(self.grammar, tuple(positions[i] for i in sequences.tolist()))

    def advance(self, tokens: np.ndarray) -> GrammarStates:
        positions, ids = self.positions, tokens.tolist()
        try:
            if len(positions) == 1:
                return GrammarStates(self.grammar, (positions[0].advance(ids[0]),))
            pairs = zip(positions, ids, strict=True)
            return GrammarStates(self.grammar, tuple([position.advance(token_id) for position, token_id in pairs]))
        except GrammarError as error:
            raise self.grammar.refuse(error) from error

    def at_end(self) -> np.ndarray:
        positions = self.positions
        if len(positions) == 1:
            return _ENDED if positions[0].is_end else _OPEN
        return np.array([position.is_end for position in positions])
