"""Outputs under a grammar are those of transformers' `generate` with a processor that masks logits by the same grammar,
sampled in no way, searched by beams, with steps that overlap, and beside free requests."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from baton.entrypoints.fields.grammars import take_grammar
from baton.runtime.constraints.grammar import GrammarConstraint, GrammarVocabulary, Position
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.sampling_params import Grammar, SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.specs import make_spec

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["one", "two", "once"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1200}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SMALL = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
PROMPTS = ["How many lines are in notes.txt?", "A town:", "{"]
MOST, LONG = 120, 300


def grammar_of(**form: object) -> Grammar:
    found = take_grammar(dict(form), "")
    assert found is not None
    return found


FORMS = {
    "schema": grammar_of(json_schema=SCHEMA),
    "small": grammar_of(json_schema=SMALL),
    "regex": grammar_of(regex=r"(wc|ls) -[a-z]{1,3} [a-z]{2,8}\.txt"),
    "ebnf": grammar_of(ebnf='root ::= "(" root ")" | [a-c]+ | "é" root'),
    "choice": grammar_of(choice=["yes", "yesterday", "no", "not at all"]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOY)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    info = LocalWorker(TOY).info
    return GrammarVocabulary(tokenizer, info["vocab_size"], info["eos_token_ids"])


def constraint(vocabulary: GrammarVocabulary, grammar: Grammar) -> GrammarConstraint:
    known: Future[GrammarVocabulary] = Future()
    root: Future[Position] = Future()
    known.set_result(vocabulary)
    root.set_result(vocabulary.compile(grammar.source))
    return GrammarConstraint(known, root, grammar.name)


class Masks:
    """A logits processor of transformers: for each row a new matcher reads what was generated."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: Grammar, prompt_len: int) -> None:
        self._tokenizer, self._source, self._prompt_len = vocabulary.tokenizer, grammar.source, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(input_ids[:, self._prompt_len :].tolist()):
            matcher = LLMatcher(self._tokenizer, self._source, log_level=0)
            if not matcher.consume_tokens(ids):
                continue  # a beam that has ended
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            scores[row, torch.from_numpy(bits[: scores.shape[1]] == 0)] = -torch.inf
        return scores


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32)


def expected_ids(
    reference, vocabulary: GrammarVocabulary, grammar: Grammar, prompt: list[int], **how
) -> list[list[int]]:
    from transformers import LogitsProcessorList

    ids = torch.tensor([prompt])
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=how.pop("most", MOST),
        do_sample=False,
        logits_processor=LogitsProcessorList([Masks(vocabulary, grammar, len(prompt))]),
        pad_token_id=0,
        **how,
    )
    ends = set(vocabulary.tokenizer.eos_tokens)
    rows = found[:, len(prompt) :].tolist()
    cut = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:place] for row, place in zip(rows, cut)]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("form", FORMS)
def test_greedy_output_equals_transformers(
    reference, vocabulary: GrammarVocabulary, tokenizer: Tokenizer, form: str, overlap: bool
) -> None:
    grammar = FORMS[form]
    worker = LocalWorker(TOY, overlap=overlap, page_size=16, chunked_prefill_size=32)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    sampling = SamplingParams(max_new_tokens=MOST, temperature=0.0, grammar=grammar)
    free = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    alone = [answer.tokens for answer in LocalWorker(TOY, page_size=16).generate(prompts, free)]
    specs = [make_spec(f"held{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    specs += [make_spec(f"free{i}", prompt, free) for i, prompt in enumerate(prompts)]
    answers = worker.run(specs, grammar=constraint(vocabulary, grammar))
    ends = set(vocabulary.tokenizer.eos_tokens)
    for prompt, answer in zip(prompts, answers):
        said = [token for token in answer.tokens if token not in ends]
        assert [said] == expected_ids(reference, vocabulary, grammar, prompt), tokenizer.decode(said)
    assert [answer.tokens for answer in answers[len(prompts) :]] == alone


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_sampled_outputs_fulfil_their_schema(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, overlap: bool
) -> None:
    worker = LocalWorker(TOY, overlap=overlap, max_total_tokens=900, max_running_requests=24)
    worker.scheduler._reserve._ratio = 0.0  # so that the pool is over-committed
    sampling = [
        SamplingParams(max_new_tokens=200, temperature=temperature, seed=seed, top_p=0.9 + seed % 2 / 10,
                       grammar=FORMS["schema"], repetition_penalty=1.0 + seed % 3 / 10)
        for seed in range(12) for temperature in (0.7, 1.5)
    ]  # fmt: skip
    prompt = tokenizer.encode(PROMPTS[0])
    specs = [make_spec(f"r{number}", prompt, each) for number, each in enumerate(sampling)]
    answers = worker.run(specs, grammar=constraint(vocabulary, FORMS["schema"]))
    ends = set(vocabulary.tokenizer.eos_tokens)
    whole = [answer for answer in answers if answer.finish is not None and answer.finish.type == "stop"]
    for answer in whole:
        text = tokenizer.decode([token for token in answer.tokens if token not in ends])
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text
    assert len(whole) > 12 and len({tuple(answer.tokens) for answer in whole}) > 6
    assert worker.scheduler.stats().retractions > 0, "under pressure"


@pytest.mark.parametrize("form", ["regex", "choice", "small"])
def test_beams_equal_transformers_and_fulfil_their_form(
    reference, vocabulary: GrammarVocabulary, tokenizer: Tokenizer, form: str
) -> None:
    width, grammar = 4 if form != "small" else 8, FORMS[form]
    worker = LocalWorker(TOY, page_size=16)
    prompt = tokenizer.encode(PROMPTS[0])
    sampling = SamplingParams(max_new_tokens=LONG, temperature=0.0, beam_width=width, n=width, grammar=grammar)
    (answer,) = worker.run([make_spec("r", prompt, sampling)], grammar=constraint(vocabulary, grammar))
    assert answer.beams is not None
    ends = set(vocabulary.tokenizer.eos_tokens)
    found = [[token for token in each.ids.tolist() if token not in ends] for each in answer.beams.results]
    assert all(each.finish.type == "stop" for each in answer.beams.results)
    if form == "small":
        assert len(found) == width
        assert all(jsonschema_rs.is_valid(SMALL, json.loads(tokenizer.decode(each))) for each in found)
    expected = expected_ids(
        reference, vocabulary, grammar, prompt, num_beams=width, num_return_sequences=width, most=LONG
    )
    assert found == expected[: len(found)]
