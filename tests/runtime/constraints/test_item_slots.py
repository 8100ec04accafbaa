"""Items within grammars, against grammars in which every item is spelled out."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.fields.grammars import take_grammar
from baton.runtime.constraints import structural_tags
from baton.runtime.constraints.grammar import GrammarConstraint, GrammarStates, GrammarVocabulary, Position
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.constraints.item_slots import GrammarWithItems, StatesWithItems
from baton.runtime.constraints.item_tries import ItemTries
from baton.runtime.constraints.resolve import resolve_constraint
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.constraints.constraint import join_allowed, walk_draft
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.trained_tokenizers import CONFIG, byte_level, write_folder

ITEM = {"type": "item_trie", "item_trie": "books"}
FILM = {"type": "item_trie", "item_trie": "films"}
BOOK_TAG = {"type": "tag", "begin": "<b>", "content": ITEM, "end": "</b>"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


FORMATS: dict[str, dict[str, Any]] = {
    "item alone": ITEM,
    "items in free text": {"type": "triggered_tags", "triggers": ["<b>"], "tags": [BOOK_TAG]},
    "two tries": {"type": "sequence", "elements": [const("A book: "), ITEM, const("; a film: "), FILM]},
    "one of two": {"type": "or", "elements": [{"type": "sequence", "elements": [const("f"), FILM]}, BOOK_TAG]},
    "list": {"type": "tags_with_separator", "tags": [BOOK_TAG], "separator": ", ", "at_least_one": True},
    "item, then a number": {"type": "sequence", "elements": [ITEM, {"type": "regex", "pattern": "[0-9]{1,2}"}]},
    "same item twice": {"type": "repeat", "content": ITEM, "min": 2, "max": 3},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level(), CONFIG))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    assert tokenizer.eos_token_id is not None
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size + 70, (tokenizer.eos_token_id,), has_slots=True)


def random_tries(rng: random.Random, vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Items of one to three tokens, of the model's rows without text: nothing else may have them."""
    spare = [tokenizer.vocab_size + number for number in range(70)]
    found = {}
    for name, own in (("books", spare[:35]), ("films", spare[35:])):
        first = rng.sample(own, 4)
        items = [[first[0]]]
        items += [[token, *rng.choices(own, k=rng.choice([1, 2, 2]))] for token in first[1:] for _ in range(3)]
        whole = sorted({tuple(item) for item in items})
        found[name] = [list(item) for item in whole if not any(item != o and item == o[: len(item)] for o in whole)]
    return found


def trie_of(items: list[list[int]]) -> ItemTrie:
    longest = max(map(len, items))
    return ItemTrie.build(np.array([item + [-1] * (longest - len(item)) for item in items], dtype=np.int32))


def source_of(format: dict[str, Any]) -> str:
    grammar = take_grammar({"structural_tag": {"format": format}}, "")
    assert grammar is not None
    return grammar.source


def grammar_constraint(vocabulary: GrammarVocabulary, lark: str) -> GrammarConstraint:
    known: Future[GrammarVocabulary] = Future()
    root: Future[Position] = Future()
    known.set_result(vocabulary)
    root.set_result(vocabulary.compile(lark))
    return GrammarConstraint(known, root, "structural_tag")


def with_twin(
    vocabulary: GrammarVocabulary, source: str, items: dict[str, list[list[int]]]
) -> tuple[StatesWithItems, GrammarStates]:
    lark = structural_tags.to_llguidance(source, vocabulary.special, vocabulary.first_slot)
    names = structural_tags.item_tries(source)
    spelled = json.loads(lark)
    for slot, name in enumerate(names):
        ways = " | ".join(" ".join(f"<[{token}]>" for token in item) for item in items[name])
        own = spelled["grammars"][0]
        own["lark_grammar"] = own["lark_grammar"].replace(f"<[{vocabulary.first_slot + slot}]>", f"({ways})")
    tries = [trie_of(items[name]) for name in names]
    own = GrammarWithItems(grammar_constraint(vocabulary, lark), tries).start()
    return own, grammar_constraint(vocabulary, json.dumps(spelled)).start()


def tokens_of(state: Any) -> list[list[int]]:
    rows, tokens = state.allowed().unpack()
    return [tokens[rows == row].tolist() for row in range(len(state))]


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_the_grammar_with_its_items_spelled_out(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, name: str
) -> None:
    """Along random outputs, three at a time, some of which are forks."""
    rng, source, num_items, num_ends = random.Random(name), source_of(FORMATS[name]), 0, 0
    marks = {tokenizer.encode(character)[-1] for character in "<b>/"}
    for _ in range(4):
        items = random_tries(rng, vocabulary, tokenizer)
        states, twins = with_twin(vocabulary, source, items)
        three = np.zeros(3, dtype=np.int32)
        states, twins = states.select(three), twins.select(three)
        for _ in range(40):
            allowed = tokens_of(states)
            assert allowed == tokens_of(twins)
            assert states.num_allowed().tolist() == [len(each) for each in allowed]
            drawn = [row for row, ended in enumerate(states.at_end().tolist()) if not ended]
            assert states.at_end().tolist() == twins.at_end().tolist()
            num_ends += 3 - len(drawn)
            if not drawn:
                break
            rows = np.array(rng.choices(drawn, k=3), dtype=np.int32)
            tokens = []
            for row in rows.tolist():
                wanted = [token for token in allowed[row] if token >= tokenizer.vocab_size or token in marks]
                tokens.append(rng.choice(wanted if wanted and rng.random() < 0.9 else allowed[row]))
                num_items += tokens[-1] >= tokenizer.vocab_size
            chosen = np.array(tokens, dtype=np.int32)
            states, twins = states.select(rows).advance(chosen), twins.select(rows).advance(chosen)
    assert num_items >= 5 and (num_ends or name in ("items in free text", "list"))


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_and_forced_tokens_are_those_of_single_steps(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, name: str
) -> None:
    rng, source, lengths = random.Random(name), source_of(FORMATS[name]), set[int]()
    items = random_tries(rng, vocabulary, tokenizer)
    root = with_twin(vocabulary, source, items)[0]
    for _ in range(30):
        states, drafts = [], []
        for _ in range(3):
            state = root
            for _ in range(rng.randrange(5)):
                state = step(state, rng)[0]
            draft, ahead = [], state
            for _ in range(rng.randrange(5)):
                ahead, token = step(ahead, rng)
                draft += [token] if token is not None else []
            if draft and rng.random() < 0.4:
                draft[rng.randrange(len(draft))] = rng.randrange(vocabulary.first_slot + 5)
            states.append(state)
            drafts.append(np.array(draft, dtype=np.int32))
        together, alone = StatesWithItems.allowed_next(states), join_allowed(states)
        assert [part.tolist() for part in together.unpack()] == [part.tolist() for part in alone.unpack()]
        for state, draft, along in zip(states, drafts, StatesWithItems.allowed_along(states, drafts), strict=True):
            assert not isinstance(along, RequestRefused)
            assert [part.tolist() for part in along.unpack()] == [
                part.tolist() for part in walk_draft(state, draft).unpack()
            ]
            lengths.add(count := state.count_allowed(draft))
            assert count == slow_count(state, draft)
            forced = state.forced()
            assert state.count_allowed(forced) == len(forced)
            for token in forced.reshape(-1, 1):
                assert len(tokens_of(state)[0]) == 1 or token[0] < tokenizer.vocab_size  # other divisions of a text
                state = state.advance(token)
    assert len(lengths) >= 2


def step(state: StatesWithItems, rng: random.Random) -> tuple[StatesWithItems, int | None]:
    if state.at_end()[0]:
        return state, None
    token = rng.choice(tokens_of(state)[0])
    return state.advance(np.array([token], dtype=np.int32)), token


def slow_count(state: StatesWithItems, draft: np.ndarray) -> int:
    for place, token in enumerate(draft.tolist()):
        if state.at_end()[0] or token not in tokens_of(state)[0]:
            return place
        state = state.advance(np.array([token], dtype=np.int32))
    return len(draft)


def test_text_that_spells_an_item_may_begin_one(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Where text and an item may follow, a token that begins an item does."""
    source = source_of({"type": "or", "elements": [ITEM, {"type": "regex", "pattern": "[a-z]+"}]})
    a, b, other, alone = tokenizer.encode("a")[-1], tokenizer.encode("b")[-1], *range(vocabulary.first_slot)[-2:]
    lark = structural_tags.to_llguidance(source, vocabulary.special, vocabulary.first_slot)
    start = GrammarWithItems(grammar_constraint(vocabulary, lark), [trie_of([[a, other], [alone]])]).start()
    assert {a, b, alone} <= set(tokens_of(start)[0])
    begun = start.advance(np.array([a]))
    assert tokens_of(begun) == [[other]] and begun.advance(np.array([other])).at_end()[0]
    assert a in tokens_of(start.advance(np.array([b])))[0]
    assert other not in tokens_of(start.advance(np.array([b])))[0]
    assert start.advance(np.array([alone])).at_end()[0]


def test_tries_are_those_loaded_when_the_request_came(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    grammars, tries = Grammars(lambda: tokenizer, tokenizer.vocab_size, [eos]), ItemTries(tokenizer.vocab_size)
    grammar = take_grammar({"structural_tag": {"format": {"type": "sequence", "elements": [ITEM, const("!")]}}}, "")
    sampling = SamplingParams(grammar=grammar)
    try:
        with pytest.raises(RequestRefused, match="there is no item trie 'books'"):
            resolve_constraint(sampling, tries, grammars)
        tries.put("books", trie_of([[5, 6], [7]]))
        first: Any = resolve_constraint(sampling, tries, grammars)
        tries.put("books", trie_of([[4]]))
        second: Any = resolve_constraint(sampling, tries, grammars)
        second.grammar._root.result(timeout=60)
        assert first.failure() is None and second.is_ready
        assert tokens_of(first.start()) == [[5, 7]] and tokens_of(second.start()) == [[4]]
        assert first.grammar.root is second.grammar.root  # it is compiled once
        tries.put("books", trie_of([[4, eos]]))
        with pytest.raises(RequestRefused, match=f"items of 'books' have the token {eos}, which ends"):
            resolve_constraint(sampling, tries, grammars)
    finally:
        grammars.close()


def test_grammar_around_items_names_them() -> None:
    """As the HTTP process builds it for a chat."""
    source = source_of({"type": "or", "elements": [FILM, ITEM, {"type": "sequence", "elements": [FILM, FILM]}]})
    built = structural_tags.build(source, {})
    carried = structural_tags.with_items(built, structural_tags.item_tries(source))
    assert structural_tags.item_tries(carried) == ("films", "books")
    placed = structural_tags.to_llguidance(carried, {}, 320)
    assert placed == structural_tags.to_llguidance(source, {}, 320)
    assert (placed.count("<[320]>"), placed.count("<[321]>")) == (3, 1)
    assert structural_tags.with_items(built, ()) == built


def test_more_tries_than_slots_are_refused() -> None:
    names = [{"type": "item_trie", "item_trie": f"t{number}"} for number in range(33)]
    with pytest.raises(RequestRefused, match="more than 32 item tries"):
        take_grammar({"structural_tag": {"format": {"type": "or", "elements": names}}}, "")
    assert structural_tags.item_tries(source_of({"type": "or", "elements": [*names[:32], *names[:5]]})) == tuple(
        f"t{number}" for number in range(32)
    )
