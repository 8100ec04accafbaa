"""Grammars as constraints: masks against fresh matchers, forks, sharing, limits, and what cannot be compiled."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, grammar_from

from baton.runtime.constraints import grammar
from baton.runtime.constraints.grammar import (
    GrammarConstraint,
    GrammarError,
    GrammarStates,
    GrammarVocabulary,
    Position,
)
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.constraints.constraint import ConstraintState, join_allowed, walk_draft
from baton.scheduler.outcome import RequestRefused
from tests.doubles.trained_tokenizers import CONFIG, byte_level, write_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["one", "two", "once"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1200}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SOURCES = {
    "schema": grammar_from("json_schema", json.dumps(SCHEMA)),
    "regex": grammar_from("regex", r"(ab|a)*c{2,5}(é|ü)?"),
    "choice": grammar_from("choice", json.dumps(["a", "ab", "abc", "b"])),
    "recursive": grammar_from("lark", 'start: "(" start ")" | "x"'),
}


NOTHING = np.empty(0, dtype=np.int32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level(), CONFIG))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    assert tokenizer.eos_token_id is not None
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size + 70, (tokenizer.eos_token_id,))


def constraint(vocabulary: GrammarVocabulary, source: str) -> GrammarConstraint:
    known: Future[GrammarVocabulary] = Future()
    root: Future[Position] = Future()
    known.set_result(vocabulary)
    root.set_result(vocabulary.compile(source))
    return GrammarConstraint(known, root, "the grammar")


def tokens_of(state: ConstraintState) -> list[list[int]]:
    """What each sequence may have."""
    rows, tokens = state.allowed().unpack()
    return [tokens[rows == row].tolist() for row in range(len(state))]


def fresh_tokens(vocabulary: GrammarVocabulary, source: str, output: list[int]) -> list[int]:
    """The slow twin: a new matcher reads the whole output."""
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0)
    assert matcher.consume_tokens(output)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_masks_of_all_forks_are_those_of_fresh_matchers(vocabulary: GrammarVocabulary, name: str) -> None:
    rng = random.Random(name)
    known: list[tuple[list[int], ConstraintState]] = [([], constraint(vocabulary, SOURCES[name]).start())]
    for _ in range(150):
        output, state = rng.choice(known[-6:] if rng.random() < 0.7 else known)
        if state.at_end()[0]:
            continue
        assert tokens_of(state) == [fresh_tokens(vocabulary, SOURCES[name], output)]
        token = rng.choice(tokens_of(state)[0])
        if rng.random() < 0.5:
            state = state.select(np.array([0, 0]))  # a fork, of which one dies
            state = state.advance(np.array([token, rng.choice(tokens_of(state)[0])])).select(np.array([0]))
        else:
            state = state.advance(np.array([token]))
        known.append(([*output, token], state))
    assert max(len(output) for output, _ in known) >= 3


def test_masks_along_drafts_are_those_of_the_way(vocabulary: GrammarVocabulary) -> None:
    """Right and wrong drafts of many states at once, of which some are in the same position."""
    rng, lengths = random.Random(8), []
    starts: list[Any] = [constraint(vocabulary, source).start() for source in SOURCES.values()]
    for _ in range(40):
        states, drafts = [], []
        for state in rng.choices(starts, k=6):
            state = advanced(state, rng, rng.randrange(4))[0]
            for _ in range(rng.choice([1, 1, 3])):
                draft = advanced(state, rng, rng.randrange(8))[1]
                if draft and rng.random() < 0.4:
                    draft[rng.randrange(len(draft))] = rng.randrange(vocabulary.tokenizer.vocab_size)
                states.append(state)
                drafts.append(np.array(draft, dtype=np.int32))
        together, alone = GrammarStates.allowed_next(states), join_allowed(states)
        assert [part.tolist() for part in together.unpack()] == [part.tolist() for part in alone.unpack()]
        found = GrammarStates.allowed_along(states, drafts)
        for state, draft, allowed in zip(states, drafts, found, strict=True):
            expected = walk_draft(state, draft)
            assert not isinstance(allowed, RequestRefused)
            assert [part.tolist() for part in allowed.unpack()] == [part.tolist() for part in expected.unpack()]
            lengths.append(state.count_allowed(draft))
            assert lengths[-1] == sum(1 for row in range(1, len(draft) + 1) if row in reach(state, draft))
    assert {0, 1, 4, 7} <= set(lengths)


def advanced(state: Any, rng: random.Random, steps: int) -> tuple[Any, list[int]]:
    """The state behind up to so many random tokens that may follow, and these."""
    taken: list[int] = []
    while len(taken) < steps and not state.at_end()[0]:
        taken.append(rng.choice(tokens_of(state)[0]))
        state = state.advance(np.array(taken[-1:]))
    return state, taken


def reach(state: Any, draft: np.ndarray) -> set[int]:
    """The numbers of leading tokens of a draft that may follow."""
    found = {0}
    for place, token in enumerate(draft.tolist(), 1):
        if state.at_end()[0] or token not in tokens_of(state)[0]:
            break
        state = state.advance(np.array([token]))
        found.add(place)
    return found


def test_forced_tokens_are_the_only_text(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    state: Any = constraint(vocabulary, grammar_from("regex", "abc(x|y)the end")).start()
    assert tokenizer.decode(state.forced().tolist()) == "abc"
    while len(state.forced()):
        state = state.advance(state.forced()[:1])
    state = state.advance(np.array(tokenizer.encode("x")))
    assert tokenizer.decode(state.forced().tolist()) == "the end"
    free: Any = constraint(vocabulary, grammar_from("regex", "[ab]+")).start()
    assert not len(free.forced())


def test_siblings_in_same_position_share_mask(vocabulary: GrammarVocabulary) -> None:
    start = constraint(vocabulary, SOURCES["schema"]).start()
    (first,) = {*tokens_of(start)[0]} & {vocabulary_id(vocabulary, b'{"')} or {tokens_of(start)[0][0]}
    forks = start.select(np.zeros(512, dtype=np.int64)).advance(np.full(512, first))
    masks = forks.allowed().dense
    assert masks is not None and len(masks.masks) == 1 and masks.mask_of.tolist() == [0] * 512
    assert forks.num_allowed().tolist() == [len(tokens_of(forks.select(np.array([3])))[0])] * 512


def vocabulary_id(vocabulary: GrammarVocabulary, piece: bytes) -> int:
    return vocabulary.tokenizer.greedy_tokenize(piece.decode())[0]


def test_rows_behind_tokenizer_and_special_tokens_are_never_allowed(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    (allowed,) = tokens_of(constraint(vocabulary, grammar_from("regex", "(?s:.*)")).start())
    assert max(allowed) < tokenizer.vocab_size and tokenizer.eos_token_id in allowed
    assert tokenizer.special_ids & set(allowed) == {tokenizer.eos_token_id}


def test_output_ends_where_nothing_may_follow(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    state = constraint(vocabulary, SOURCES["recursive"]).start()
    for char in "((x)":
        assert not state.at_end()[0]
        state = state.advance(np.array(tokenizer.encode(char)))
    assert not state.at_end()[0]
    assert state.advance(np.array(tokenizer.encode(")"))).at_end().tolist() == [True]


def test_token_that_is_not_allowed_raises_and_leaves_its_state(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    start = constraint(vocabulary, SOURCES["recursive"]).start()
    opened = start.advance(np.array(tokenizer.encode("(")))
    with pytest.raises(RequestRefused, match="is not allowed here"):
        opened.advance(np.array(tokenizer.encode(")")))
    assert tokens_of(opened) == [fresh_tokens(vocabulary, SOURCES["recursive"], tokenizer.encode("("))]
    assert opened.advance(np.array(tokenizer.encode("x"))).at_end().tolist() == [False]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            grammar_from("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
            "no output fulfils it",
        ),
        (grammar_from("json_schema", json.dumps({"type": "array", "uniqueItems": True})), "uniqueItems"),
        (grammar_from("json_schema", json.dumps({"$ref": "http://elsewhere.org/x"})), "elsewhere.org"),
        (grammar_from("json_schema", "false"), "Unsatisfiable"),
        (grammar_from("regex", "a(?=b)"), "look"),
        (grammar_from("regex", "("), ""),
        (grammar_from("lark", "start: nothing"), "nothing"),
    ],
)
def test_what_cannot_be_compiled_says_why(vocabulary: GrammarVocabulary, source: str, message: str) -> None:
    with pytest.raises(GrammarError) as refused:
        vocabulary.compile(source)
    assert message in str(refused.value) and 5 < len(str(refused.value)) < 1000


def test_matcher_over_its_limit_fails_alone(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    hard = grammar_from("regex", "[ab]*a[ab]{14}c")
    limits = LLParserLimits(max_lexer_states=300, precompute_large_lexemes=False)
    root = vocabulary.compile(hard, limits)
    known: Future[GrammarVocabulary] = Future()
    known.set_result(vocabulary)
    future: Future[Position] = Future()
    future.set_result(root)
    state: Any = GrammarConstraint(known, future, "the regex").start()
    sound = constraint(vocabulary, SOURCES["regex"]).start()
    rng = random.Random(5)
    with pytest.raises(RequestRefused, match="the regex: ") as refused:
        for _ in range(400):
            state = state.advance(np.array(tokenizer.encode(rng.choice("ab"))))
            failed, found = type(state).allowed_along([state, sound], [NOTHING, NOTHING])
            assert not isinstance(found, RequestRefused)
            if isinstance(failed, RequestRefused):
                raise failed
    assert refused.value.code == "invalid_grammar"
    fresh = constraint(vocabulary, SOURCES["regex"]).start()
    assert isinstance(GrammarStates.allowed_along([state, fresh], [NOTHING] * 2)[0], RequestRefused)
    with pytest.raises(RequestRefused):
        GrammarStates.allowed_next([fresh, state])
    assert tokens_of(fresh) == [fresh_tokens(vocabulary, SOURCES["regex"], [])]


def test_spelling_of_a_special_token_is_text(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Forced text is written with ordinary tokens."""
    spelled = next(text for text in vocabulary.special if len(text) > 3)
    text = f"see {spelled} and {spelled}{spelled[0]}"
    state: Any = constraint(vocabulary, grammar_from("choice", json.dumps([text]))).start()
    forced, output = state.forced(), list[int]()
    assert len(forced) and state.count_allowed(forced) == len(forced)
    while not state.at_end()[0] and tokens_of(state)[0] != [tokenizer.eos_token_id]:
        output.append(tokens_of(state)[0][-1])
        state = state.advance(np.array(output[-1:]))
    assert not set(output) & tokenizer.special_ids and tokenizer.decode(output) == text


@pytest.mark.parametrize(
    "source",
    [
        grammar_from("choice", json.dumps(["one text that all outputs are"])),
        grammar_from("regex", "the same beginning, then a|the same beginning, then (bb)+"),
        grammar_from("choice", json.dumps(["ab", "b"])),
        grammar_from("lark", 'start: "(" start ")" | "x"'),
    ],
)
def test_fewest_tokens_are_those_of_a_search(vocabulary: GrammarVocabulary, source: str) -> None:
    """By all outputs, breadth first, as far as they have the same text."""
    root = vocabulary.compile(source)
    same, fewest, layer = LLMatcher(vocabulary.tokenizer, source).compute_ff_bytes(), 0, {b""}
    pieces = {token for token in vocabulary._spellings if token}
    while layer and not any(len(text) >= len(same) for text in layer):
        fewest += 1
        layer = {
            text + token
            for text in layer
            for token in pieces
            if same[len(text) :].startswith(token) or token.startswith(same[len(text) :])
        }
    assert root.min_tokens == fewest
    assert fewest > 3 or len(same) < 3


def test_positions_left_are_forgotten_and_those_in_use_are_found(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_LEFT", 16)
    state = constraint(vocabulary, grammar_from("regex", "(?s:.)*")).start()
    (tokens,), (root,) = tokens_of(state), state.positions
    kept = {token: root.advance(token) for token in tokens[:5]}
    for token in tokens[5:]:
        root.advance(token)
    assert len(tokens) > 64 and len(root._next) <= 16 + len(kept)
    assert all(root.advance(token) is position for token, position in kept.items())
