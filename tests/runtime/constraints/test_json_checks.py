"""What a reader of JSON withholds, and what is tried out before it is allowed."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import Future
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher

from baton.entrypoints.fields.grammars import take_grammar
from baton.runtime.constraints.grammar import (
    MAX_CHECKED_DRAFT,
    MAX_SEARCHED,
    NOTHING_LEFT,
    GrammarConstraint,
    GrammarStates,
    GrammarVocabulary,
    Position,
)
from baton.runtime.constraints.json_checks import (
    LEAST,
    MAX_NESTED,
    UNIQUE,
    Beginning,
    JSONChecks,
    Reader,
    Tokens,
    ids_of,
    unwrap,
    wrap,
)
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import RequestRefused
from tests.doubles.trained_tokenizers import CONFIG, byte_level, write_folder

BYTES = Tokens([bytes([byte]) for byte in range(256)])
SET = {"type": "array", UNIQUE: True}
TWO = {"type": "object", LEAST: 2}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (SET, '["a","b","a|"]'), (SET, '["a","b","a\\u0062","ab|"]'), (SET, "[1,2, 1.0|]"), (SET, "[1,10,1|]"),
        (SET, "[1 , 1| ]"), (SET, "[0,-0|]"), (SET, "[100,1e2|]"), (SET, "[true,1,tru|e]"), (SET, "[null,nul|l]"),
        (SET, '[{"a":1,"b":2},{"b":2,"a":1|}]'), (SET, "[[1],[1|]]"), (SET, "[[1],[2]]"), (SET, '["]","],"]'),
        (SET, '["\\"","\\\\","\\"|"]'), (SET, "[[true],[1]]"), (SET, "[false,0,null]"), (SET, '"a"'), (SET, "17"),
        (SET, '["é","\\u00e9|"]'), (SET, '["\\ud83d\\ude00","😀|"]'), (SET, '["\\ud83d","\\ud83d|"]'),
        (SET, "[1,2"), (SET, "[[1,1],[2,2]]"), (SET, '[{"a":1,"a":2},{"a":2|}]'), (SET, "[]"),
        (TWO, '{"a":1,"a":2|}'), (TWO, '{"a":1,"b":{}}'), (TWO, "{|}"), (TWO, '{"a":{"x":1}|}'),
        (TWO, '{"a":1,"\\u0061":2|}'), (TWO, "[]"), (TWO, '{ "a" : [ ] , "b" : "}" }'),
        ({"properties": {"s": {"anyOf": [SET, {"type": "null"}]}}}, '{"s":[1,1|]}'),
        ({"properties": {"s": SET}}, '{"t":[1,1]}'), ({"additionalProperties": SET}, '{"t":[1,1|]}'),
        ({"properties": {"s": True}, "additionalProperties": SET}, '{"s":[1,1]}'),
        ({"patternProperties": {"^s": SET}}, '{"s":[1,1|]}'),
        ({"prefixItems": [True, SET], "items": False}, "[[1,1],[1,1|]]"),
        ({"prefixItems": [True], "items": SET}, "[[1,1],[1],[1,1|]]"),
        ({"$defs": {"a/b": SET}, "items": {"$ref": "#/$defs/a~1b"}}, "[[1],[1,1|]]"),
        ({"$defs": {"t": {"properties": {"u": SET, "t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
         '{"t":{"t":{"u":[1,1|]}}}'),
        (SET, "[" * MAX_NESTED + "|["), (SET, "[" * MAX_NESTED + "]" * MAX_NESTED),
        (SET, f"[{'[' * 199}{']' * 199},1,1|]"),
        (SET, f"[{'1' * 5000},{'1' * 5000}|]"), (SET, f"[{'1' * 5000},{'1' * 4999}2,1,1|]"),
        ({"properties": {"s": SET}, LEAST: 2}, f'{{"s":[{"7" * 5000},{{}}]|}}'),
        ({"properties": {"s": SET}, LEAST: 2}, f'{{"d":{"[" * 2000}{"]" * 2000}|}}'),
        ({"if": {"type": "array"}, "then": SET}, "[1,1|]"), ({"dependentSchemas": {"a": {"properties": {"b": SET}}}},
         '{"b":[2,2|]}'), ({"allOf": [{"oneOf": [SET]}]}, "[1,1|]"),
    ],
)  # fmt: skip
def test_reader_refuses_the_byte_that_completes_what_is_excluded(schema: Any, text: str) -> None:
    text, bar, rest = text.partition("|")
    reader: Reader | None = Reader.start(BYTES, JSONChecks(schema, Beginning()))
    for byte in text.encode():
        assert reader is not None
        reader = reader.read(bytes([byte]))
    assert reader is not None
    if bar:
        assert reader.read(rest[:1].encode()) is None
    whole = Reader.start(BYTES, JSONChecks(schema, Beginning())).read((text + rest).encode())
    assert (whole is None) == bool(bar), "also if all of it is one token"


@pytest.mark.parametrize(("is_open", "is_allowed"), [(MAX_NESTED - 3, True), (MAX_NESTED - 2, False)])
def test_tokens_that_open_too_many_arrays_are_withheld(is_open: int, is_allowed: bool) -> None:
    tokens = Tokens([b"[", b"[[[", b'"', b"x"])
    reader = Reader.start(tokens, JSONChecks(SET, Beginning())).read(b"[" * is_open)
    assert reader is not None
    found = ids_of(reader.withhold(np.full(1, 15, dtype=np.uint32))).tolist()
    assert found == ([0, 1, 2, 3] if is_allowed else [0, 2, 3])


@pytest.mark.parametrize(
    ("beginning", "text"),
    [
        (Beginning(b"</think>"), "[1,1]</think>\n\n[1,1|]"),
        (Beginning(b"</think>", b"<think>"), "<think>[1,1]</thin</think>[1,1|]"),
        (Beginning(b"</think>", b"<think>"), "[1,1|]"),
        (Beginning(b"</think>", b"<think>"), "<thin"),
        (Beginning(), '<tool_call>{"a": [1,1]}</tool_call>'),
        (Beginning(), '[TOOL_CALLS][{"a": [1,1]}]'),
        (Beginning(), "[TOOL, TOOL]"),
        (Beginning(), "[1,2]\n[1,1]"),
        (Beginning(), "]"),
        (Beginning(), ",[1,1]"),
    ],
)
def test_reader_reads_nothing_but_the_answer(beginning: Beginning, text: str) -> None:
    text, bar, rest = text.partition("|")
    for parts in (text.encode(), *([bytes([byte]) for byte in text.encode()],)):
        reader: Reader | None = Reader.start(BYTES, JSONChecks({**SET, "items": SET}, beginning))
        for part in [parts] if isinstance(parts, bytes) else parts:
            assert reader is not None
            reader = reader.read(part)
        assert reader is not None
        assert not bar or reader.read(rest.encode()) is None


def test_checks_are_wrapped_around_a_grammar() -> None:
    checks = JSONChecks(SET, Beginning(b"</think>", b"<think>"))
    assert unwrap(wrap("start: /a/", checks)) == ("start: /a/", checks)
    assert unwrap("start: /a/") == ("start: /a/", None)
    assert not LLMatcher.validate_grammar(unwrap(wrap("start: /a/", checks))[0])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    folder = write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level(), CONFIG)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_id is not None
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size + 70, (tokenizer.eos_token_id,))


def root_of(vocabulary: GrammarVocabulary, schema: Any) -> Position:
    grammar = take_grammar({"json_schema": schema}, "")
    assert grammar is not None
    source, checks = unwrap(grammar.source)
    return vocabulary.compile(source, checks=checks)


def tokens_of(vocabulary: GrammarVocabulary, position: Position) -> set[int]:
    vocabulary.fill([position])
    assert position.mask is not None
    return {*np.flatnonzero(np.unpackbits(position.mask.view(np.uint8), bitorder="little")).tolist()}


def orders(values: list, least: int, most: int) -> set[str]:
    found = [json.dumps(each) for size in range(least, most + 1) for each in itertools.permutations(values, size)]
    return {*found}


WORDS = ["red", "reddish", "green", "gr"]
FLAGS = [{"a": a, "b": b} for a in (True, False) for b in (1, 2)]
CLOSED = {"additionalProperties": False}
FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("items", "values", "least", "most"),
    [
        ({"enum": WORDS}, WORDS, 2, 4),
        ({"type": "boolean"}, [True, False], 0, 2),
        ({"type": "integer", "minimum": 8, "maximum": 11}, [8, 9, 10, 11], 3, 4),
        ({"type": "string", "pattern": "^[ab]$"}, ["a", "b"], 1, 2),
        (FLAG | CLOSED, FLAGS, 3, 3),
    ],
    ids=str,
)
def test_masks_allow_exactly_what_leads_to_a_valid_array(
    vocabulary: GrammarVocabulary, items: Any, values: list, least: int, most: int
) -> None:
    """Against the list of all of them. Tokens of many bytes, random paths."""
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": least}
    schema |= {"maxItems": most} if most > least else {}
    texts = orders(values, least, len(values))
    if most > least:
        texts = {text for text in texts if len(json.loads(text)) <= most}
    root, pieces, (end,) = root_of(vocabulary, schema), vocabulary.readable.bytes, vocabulary.tokenizer.eos_tokens
    rng, ended = random.Random(3), 0
    for _ in range(12):
        position, text = root, b""
        while True:
            allowed = tokens_of(vocabulary, position)
            left = {whole for whole in texts if whole.encode().startswith(text)}
            reached = [
                {whole for whole in left if whole.encode().startswith(text + pieces[i])} for i in allowed - {end}
            ]
            assert all(reached) and set().union(*reached) == left - {text.decode()}, text
            assert (end in allowed) == (text.decode() in texts)
            if not reached:
                break
            token_id = rng.choice(sorted(allowed - {end}))
            text += pieces[token_id]
            position = position.advance(token_id)
            if position.is_end:
                break
        assert text.decode() in texts
        ended += 1
    assert ended == 12


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True, "minItems": 3},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 4, "maxItems": 9},
        {"type": "object", "minProperties": 3, "additionalProperties": {"type": "boolean"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "number", "minimum": -2.5, "maximum": 1.5}},
         "uniqueItems": True, "maxItems": 3},
        {"anyOf": [{"type": "array", "uniqueItems": True, "maxItems": 2}, {"type": "object", "maxProperties": 2}]},
        {"type": "object", "properties": {"tags": {"anyOf": [{"type": "array", "items": {"type": "string"},
         "uniqueItems": True, "maxItems": 4}, {"type": "null"}]}}, "required": ["tags"]} | CLOSED,
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)  # fmt: skip
def test_random_outputs_are_valid(vocabulary: GrammarVocabulary, schema: Any) -> None:
    root, validator, rng = root_of(vocabulary, schema), jsonschema_rs.validator_for(schema), random.Random(1)
    pieces, (end,) = vocabulary.readable.bytes, vocabulary.tokenizer.eos_tokens
    ended = 0
    for _ in range(20):
        position, text = root, b""
        while not position.is_end and len(text) < 300:
            allowed = tokens_of(vocabulary, position)
            if end in allowed:
                break
            closing = [i for i in allowed if {*pieces[i]} & {*b'"]},'}]
            token_id = rng.choice(sorted(closing if closing and rng.random() < 0.5 else allowed))
            text += pieces[token_id]
            position = position.advance(token_id)
        if len(text) < 300:
            assert validator.is_valid(json.loads(text))
            ended += 1
    assert ended > 10


def states_of(vocabulary: GrammarVocabulary, schema: Any) -> GrammarStates:
    known: Future[GrammarVocabulary] = Future()
    root: Future[Position] = Future()
    known.set_result(vocabulary)
    root.set_result(root_of(vocabulary, schema))
    return GrammarConstraint(known, root, "json_schema").start()


def test_drafts_are_followed_up_to_what_is_withheld(vocabulary: GrammarVocabulary) -> None:
    states = states_of(vocabulary, {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True})
    pieces = vocabulary.readable.bytes
    draft = np.array([pieces.index(bytes([byte])) for byte in b'["a", "b", "a"]'], dtype=np.int32)
    fits = len(b'["a", "b", "')
    assert states.count_allowed(draft) == MAX_CHECKED_DRAFT < fits
    last = states
    for token in draft[: fits - 2].reshape(-1, 1):
        last = last.advance(token)
    assert last.count_allowed(draft[fits - 2 :]) == 2
    free = states_of(vocabulary, {"type": "boolean"})
    along, plain = GrammarStates.allowed_along([states, free], [draft, draft[:0]])
    assert not isinstance(along, RequestRefused) and not isinstance(plain, RequestRefused)
    assert along.named_rows().tolist() == [*range(fits + 1)] and plain.named_rows().tolist() == [0]
    state = states
    for place, token in enumerate(draft[:fits].reshape(-1, 1)):
        assert (along.unpack()[1][along.unpack()[0] == place] == state.allowed().unpack()[1]).all()
        state = state.advance(token)


def test_nothing_left_ends_the_request(vocabulary: GrammarVocabulary) -> None:
    states = states_of(vocabulary, {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "minItems": 2})
    (found,) = GrammarStates.allowed_along([states], [np.empty(0, dtype=np.int32)])
    while not isinstance(found, RequestRefused):
        token = found.unpack()[1][:1]
        states = states.advance(token)
        (found,) = GrammarStates.allowed_along([states], [np.empty(0, dtype=np.int32)])
    assert NOTHING_LEFT in str(found) and found.code == "invalid_grammar"


@pytest.mark.parametrize(
    "items",
    [
        {"type": "array", "items": {"type": "number", "minimum": -2.5, "maximum": 1.5}},
        {"type": "integer", "minimum": 1, "maximum": 99},
        {"type": "string", "maxLength": 2, "pattern": "^[a-z]*$"},
        {"enum": [f"value {number}" for number in range(60)]},
    ],
    ids=str,
)
def test_reading_ahead_is_bounded(vocabulary: GrammarVocabulary, items: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait for a mask: it reads so many tokens, however many may follow."""
    count, read = 0, Reader.read

    def counted(reader: Reader, added: bytes) -> Reader | None:
        nonlocal count
        count += 1
        return read(reader, added)

    monkeypatch.setattr(Reader, "read", counted)
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 20}
    position, rng, most = root_of(vocabulary, schema), random.Random(1), 0
    for _ in range(150):
        count = 0
        allowed = tokens_of(vocabulary, position) - {*vocabulary.tokenizer.eos_tokens}
        most = max(most, count)
        if not allowed:
            break
        position = position.advance(rng.choice(sorted(allowed)))
    assert 40 < most < 3 * MAX_SEARCHED + len(vocabulary.readable.bytes)


def test_forced_tokens_end_before_nothing_is_left(vocabulary: GrammarVocabulary) -> None:
    """A step must not sample where nothing may follow; the next one is refused there."""
    states = states_of(vocabulary, {"type": "array", "items": {"const": "red"}, "uniqueItems": True, "minItems": 2})
    while (forced := states.forced()).size or len(states.allowed().unpack()[1]) == 1:
        for token in forced if forced.size else states.allowed().unpack()[1]:
            assert states.num_allowed()[0]
            states = states.advance(np.array([token]))
        (found,) = GrammarStates.allowed_along([states], [np.empty(0, dtype=np.int32)])
        if isinstance(found, RequestRefused):
            return
    pytest.fail("nothing was forced")
