"""Grammars with places for items: text around them, and items of a trie within.

A trie is a set of token sequences, a grammar a set of texts, and a million items are too many for a grammar's rules. So
where an item may stand the grammar has a *slot*: a token that the model does not have, one for each trie. A sequence is
either at a position of the grammar or, within a slot, at a node of the trie:

    grammar   … <|sid_begin|> ● ─────────── slot 0 ──────────▶ ● <|sid_end|> …
    trie                      └▶ root ─<s_a_4>─▶ ─<s_b_1>─▶ leaf ┘

The grammar takes the slot's token when the item is whole. Where both an item and other text may follow, a token that
begins an item does begin one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...scheduler.constraints.constraint import BITS, MAX_FORCED, AllowedTokens, TokenMasks, join_allowed, walk_draft
from ...scheduler.constraints.item_trie import ItemStates, ItemTrie
from ...scheduler.outcome import RequestRefused
from .grammar import GrammarConstraint, GrammarError, Position

_ROOT = 0
"""The node before an item's first token."""


class _Place(NamedTuple):
    """Where a sequence is. slot: the one whose item has begun; None in the grammar. node: of that slot's trie."""

    position: Position
    slot: int | None = None
    node: int = _ROOT


class GrammarWithItems:
    """A `Constraint`; see there for the attributes. Its grammar may still be compiling."""

    eos_ends = True
    must_complete = True
    is_uniform = False
    max_tokens: int | None = None

    def __init__(self, grammar: GrammarConstraint, tries: Sequence[ItemTrie]) -> None:
        """grammar: of a vocabulary with slots. tries: the one of each slot that the grammar names."""
        self.grammar, self.tries = grammar, tuple(tries)
        self.name, self.output_name, self.matched = grammar.name, grammar.output_name, grammar.matched

    @property
    def min_tokens(self) -> int:
        return self.grammar.min_tokens

    @property
    def is_ready(self) -> bool:
        return self.grammar.is_ready

    def failure(self) -> RequestRefused | None:
        return self.grammar.failure()

    def start(self) -> StatesWithItems:
        return StatesWithItems(self, None)

    def open_slots(self, position: Position) -> list[int]:
        """The slots that may follow. The position has its mask."""
        bits = int(position.known_mask()[self.grammar.vocabulary.first_slot // BITS])
        return [slot for slot in range(len(self.tries)) if bits >> slot & 1]

    def mask(self, position: Position) -> np.ndarray:
        """uint32 [words]: the model's tokens that may follow, those that begin an item among them."""
        mask = position.known_mask()[: self.grammar.vocabulary.first_slot // BITS]
        slots = self.open_slots(position)
        if not slots:
            return mask
        begins = np.unique(np.concatenate([_tokens_after(self.tries[slot], _ROOT) for slot in slots]))
        allowed = AllowedTokens.pack(np.zeros_like(begins), begins)
        mask = mask.copy()
        mask[allowed.words] |= allowed.bits
        return mask

    def advance(self, place: _Place, token: int) -> _Place:
        """The place behind one more token. Raises GrammarError for a token that is not allowed."""
        if place.slot is not None:
            return self._within_item(place.position, place.slot, place.node, token)
        for slot in self.open_slots(place.position):
            if token in _tokens_after(self.tries[slot], _ROOT):
                return self._within_item(place.position, slot, _ROOT, token)
        return _Place(place.position.advance(token))

    def _within_item(self, position: Position, slot: int, node: int, token: int) -> _Place:
        trie = self.tries[slot]
        if token not in _tokens_after(trie, node):
            raise GrammarError(f"token {token} is not allowed here")
        after = trie.advance(np.array([node], dtype=np.int32), np.array([token], dtype=np.int32))
        if trie.is_leaf(after)[0]:
            return _Place(position.advance(self.grammar.vocabulary.first_slot + slot))
        return _Place(position, slot, int(after[0]))


@dataclass(slots=True, frozen=True)
class StatesWithItems:
    """A `ConstraintState`: the place of each sequence."""

    constraint: GrammarWithItems
    _places: tuple[_Place, ...] | None
    """None for one sequence before its first token, whose grammar may still be compiling."""

    @property
    def places(self) -> tuple[_Place, ...]:
        return (_Place(self.constraint.grammar.root),) if self._places is None else self._places

    def __len__(self) -> int:
        return 1 if self._places is None else len(self._places)

    def allowed(self) -> AllowedTokens:
        places, parts = self.places, list[AllowedTokens]()
        outside = [row for row, place in enumerate(places) if place.slot is None]
        if outside:
            positions = [places[row].position for row in outside]
            self._fill(positions)
            masks = {id(position): self.constraint.mask(position) for position in positions}
            rows = np.array(outside, dtype=np.int32)
            parts.append(AllowedTokens.of_masks(TokenMasks.stack(rows, [masks[id(each)] for each in positions])))
        for slot in sorted({place.slot for place in places if place.slot is not None}):
            rows = np.array([row for row, place in enumerate(places) if place.slot == slot], dtype=np.int32)
            nodes = np.array([places[row].node for row in rows.tolist()], dtype=np.int32)
            items = ItemStates(self.constraint.tries[slot], nodes).allowed()
            parts.append(items.renumber(lambda own, rows=rows: rows[own]))
        merged = AllowedTokens.merge(parts)
        assert merged is not None
        return merged

    def num_allowed(self) -> np.ndarray:
        rows, _ = self.allowed().unpack()
        return np.bincount(rows, minlength=len(self))

    def select(self, sequences: np.ndarray) -> StatesWithItems:
        places = self.places
        return StatesWithItems(self.constraint, tuple(places[i] for i in sequences.tolist()))

    def advance(self, tokens: np.ndarray) -> StatesWithItems:
        places = self.places
        self._fill([place.position for place in places if place.slot is None])
        try:
            after = tuple(map(self.constraint.advance, places, tokens.tolist()))
        except GrammarError as error:
            raise self.constraint.grammar.refuse(error) from error
        return StatesWithItems(self.constraint, after)

    def at_end(self) -> np.ndarray:
        return np.array([place.slot is None and place.position.is_end for place in self.places])

    def forced(self) -> np.ndarray:
        """Up to the beginning of an item, or to the end of the one that has begun."""
        (place,) = self.places
        slot, node, found = place.slot, place.node, list[int]()
        if slot is None:
            self._fill([place.position])
            first_slot = self.constraint.grammar.vocabulary.first_slot
            for token in place.position.forced()[:MAX_FORCED]:
                if token >= first_slot:
                    slot = token - first_slot
                    break
                found.append(token)
        if slot is not None and slot < len(self.constraint.tries):
            states = ItemStates(self.constraint.tries[slot], np.array([node], dtype=np.int32))
            found += states.forced().tolist()
        return np.array(found[:MAX_FORCED], dtype=np.int32)

    def count_allowed(self, draft: np.ndarray) -> int:
        state: StatesWithItems = self
        for place, token in enumerate(draft.reshape(-1, 1)):
            if state.at_end()[0] or not state.allowed().holds(np.zeros(1, dtype=np.int32), token)[0]:
                return place
            state = state.advance(token)
        return len(draft)

    @classmethod
    def allowed_next(cls, states: Sequence[StatesWithItems]) -> AllowedTokens:
        return join_allowed(states)

    @classmethod
    def allowed_along(
        cls, states: Sequence[StatesWithItems], drafts: Sequence[np.ndarray]
    ) -> list[AllowedTokens | RequestRefused]:
        found: list[AllowedTokens | RequestRefused] = []
        for state, draft in zip(states, drafts, strict=True):
            try:
                found.append(walk_draft(state, draft))
            except RequestRefused as refusal:
                found.append(refusal)
        return found

    def _fill(self, positions: Sequence[Position]) -> None:
        """Fill the masks of these positions."""
        grammar = self.constraint.grammar
        try:
            grammar.vocabulary.fill(positions)
        except GrammarError as error:
            raise grammar.refuse(error) from error


def _tokens_after(trie: ItemTrie, node: int) -> np.ndarray:
    """int32 [n], ascending: the tokens that may follow a node."""
    return trie.children(np.array([node], dtype=np.int32))[1]
