"""Grammars over the KV-echo model's vocabulary: real matchers for the scheduler, which become ready when a simulation
says so, and a slow twin that reads an output from its start."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLMatcher, grammar_from

from baton.runtime.constraints.grammar import GrammarConstraint, GrammarError, GrammarVocabulary, Position
from baton.runtime.constraints.item_slots import GrammarWithItems
from baton.scheduler.constraints.item_trie import ItemTrie
from tests.doubles.kv_echo import VOCAB

_OBJECT = {
    "type": "object",
    "properties": {"kind": {"enum": ["aa", "ab"]}, "list": {"type": "array", "items": {"type": "integer"}}},
    "required": ["kind", "list"],
    "additionalProperties": False,
}
SOURCES = [
    grammar_from("regex", "[ab]{1,6}c?"),
    grammar_from("regex", "(abcabc|abcabd)*x{3}"),
    grammar_from("json_schema", json.dumps(_OBJECT)),
    grammar_from("lark", 'start: "[" start "]" | "xyz" | "a"+'),
    grammar_from("choice", json.dumps(["ab", "abcd", "the only one", "the other one"])),
    'start: "[" ITEM ("," ITEM)* "]" | "none"',
]
ITEMS = [[3], [9, 40], [9, 41, 50], [60, 61], [60, 62], [70, 9, 3]]
"""Token ids of what stands for ITEM."""


class EchoWords:
    """A tokenizer, as far as `GrammarVocabulary` needs one. Several ids may have the same text."""

    def __init__(self, eos: tuple[int, ...]) -> None:
        rng = random.Random(1)
        pieces = [bytes([letter]) for letter in range(32, 127)]
        pieces += [
            "".join(rng.choices('abcdxyzeon {}[]":,012', k=rng.choice([2, 2, 3]))).encode()
            for _ in range(VOCAB - len(pieces))
        ]
        self.token_bytes: Any = _Pieces(pieces)
        self.token_bytes.special_ids = frozenset(eos)
        ids = [i for i in range(VOCAB) if i not in eos]
        self._longest_first = sorted(((pieces[i], i) for i in ids), key=lambda each: (-len(each[0]), each[1]))

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def encode_continuation(self, text: str) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            piece, token_id = next(each for each in self._longest_first if rest.startswith(each[0]))
            ids.append(token_id)
            rest = rest[len(piece) :]
        return ids


class _Pieces(list[bytes]):
    special_ids: frozenset[int]


class SimulatedGrammars:
    """The grammars of a simulation."""

    def __init__(self, eos: tuple[int, ...]) -> None:
        self._eos = frozenset(eos)
        words: Any = EchoWords(eos)
        plain = GrammarVocabulary(words, VOCAB, sorted(eos))
        slotted = GrammarVocabulary(words, VOCAB, sorted(eos), has_slots=True)
        self._tokenizer = plain.tokenizer
        self._vocabularies: list[Future[GrammarVocabulary]] = []
        self._roots: list[Position] = []
        for source in SOURCES:
            vocabulary = slotted if "ITEM" in source else plain
            self._roots.append(vocabulary.compile(source.replace("ITEM", f"<[{vocabulary.first_slot}]>")))
            self._vocabularies.append(Future())
            self._vocabularies[-1].set_result(vocabulary)
        longest = max(map(len, ITEMS))
        self._items = ItemTrie.build(np.array([item + [-1] * (longest - len(item)) for item in ITEMS], dtype=np.int32))
        self._compiling: list[tuple[Future[Position], int | None]] = []

    def constraint(self, number: int | None, is_ready: bool) -> GrammarConstraint | GrammarWithItems:
        """number: of a source; None for one that cannot be compiled. is_ready: at once, not by `finish`."""
        root: Future[Position] = Future()
        self._compiling.append((root, number))
        if is_ready:
            self.finish(len(self._compiling) - 1)
        grammar = GrammarConstraint(self._vocabularies[number or 0], root, "grammar")
        has_items = number is not None and "ITEM" in SOURCES[number]
        return GrammarWithItems(grammar, [self._items]) if has_items else grammar

    def finish(self, place: int | None = None) -> None:
        """The compilation of one has ended; None for all."""
        ended = self._compiling[:] if place is None else [self._compiling.pop(place)]
        if place is None:
            self._compiling.clear()
        for root, number in ended:
            if number is None:
                root.set_exception(GrammarError("it has no end"))
            else:
                root.set_result(self._roots[number])

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def twin(self, number: int) -> SlowGrammar:
        spelled_out = " | ".join(" ".join(f"<[{token}]>" for token in item) for item in ITEMS)
        source = SOURCES[number].replace("ITEM", f"({spelled_out})")
        return SlowGrammar(LLMatcher(self._tokenizer, source, log_level=0), self._eos)


class SlowGrammar:
    """One matcher that reads one output."""

    def __init__(self, matcher: LLMatcher, eos: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos

    def allowed(self) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return np.flatnonzero(bits)

    def ends_with(self, token_id: int) -> bool:
        """Read a token; True if it ends the output."""
        return token_id in self._eos or not self._matcher.consume_token(token_id) or self._matcher.is_stopped()
