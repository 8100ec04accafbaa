"""Baton beside llguidance in transformers' `generate`, and beside XGrammar, on the same schemas, in turns.

masks      each document is walked through its grammar: one mask, then one token
compile    from the schema's text to what gives the first mask
validity   random walks, of tokens that the masks allow, to an end: is each output valid by `jsonschema`? Half of the
           tokens are drawn among those with a quote, a bracket or a brace, where there are any, so that strings and
           lists end. A cut-off output does not count. Schemas that are refused are counted apart.
generate   tokens per second of a batch under schemas, Baton's engine and transformers' `generate`

XGrammar is no dependency. Where ``--xgrammar FOLDER`` says so it is imported from there; what it needs besides, it
finds among Baton's own packages:

    pip install --no-deps --target build/envs/xgrammar xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import jsonschema
import numpy as np
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from baton.runtime.constraints.grammar import GrammarStates
from baton.scheduler.sampling_params import SamplingParams
from benchmarks.grammars.masks import Clock, Compiler
from benchmarks.grammars.schemas import Schema, make_text
from benchmarks.grammars.steps import Engine, make_prompts

MOST_TOKENS = 3000
"""Length limit of a random walk."""


class Walk(Protocol):
    """One output under a grammar."""

    def mask(self) -> np.ndarray:
        """uint32 [words]: the tokens that may follow."""
        ...

    def advance(self, token: int) -> bool:
        """False if the token is not accepted."""
        ...

    def is_over(self) -> bool:
        """Nothing may follow but the end."""
        ...


class Peer(Protocol):
    name: str

    def compile(self, schema: Schema) -> Callable[[], Walk] | None:
        """Make a grammar: a function that begins an output. None if the schema is refused."""
        ...


# -- Baton -------------------------------------------------------------------------------------------------------------


class _BatonWalk:
    def __init__(self, state: GrammarStates) -> None:
        self._state = state

    def mask(self) -> np.ndarray:
        dense = self._state.allowed().dense
        assert dense is not None
        return dense.masks[0]

    def advance(self, token: int) -> bool:
        self._state = self._state.advance(np.array([token], dtype=np.int32))
        return True

    def is_over(self) -> bool:
        return bool(self._state.at_end()[0])


class Baton:
    name = "Baton"

    def __init__(self, folder: Path) -> None:
        self._compiler = Compiler(folder)

    def compile(self, schema: Schema) -> Callable[[], Walk] | None:
        constraint = self._compiler.of_schema(schema)
        return None if constraint is None else lambda: _BatonWalk(constraint.start())


# -- llguidance --------------------------------------------------------------------------------------------------------


class _MatcherWalk:
    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self._mask = np.zeros(words, dtype=np.uint32)

    def mask(self) -> np.ndarray:
        self.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def advance(self, token: int) -> bool:
        return self.matcher.consume_token(token)

    def is_over(self) -> bool:
        return self.matcher.is_stopped()


class LLGuidance:
    """By itself, as its processors for transformers use it."""

    name = "llguidance"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        vocabulary = Compiler(folder).vocabulary
        size = vocabulary.tokenizer.vocab_size
        self.tokenizer = from_tokenizer(AutoTokenizer.from_pretrained(folder), size, vocabulary.tokenizer.eos_tokens)
        self._words = vocabulary.num_words

    def compile(self, schema: Schema) -> Callable[[], _MatcherWalk] | None:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = LLMatcher(self.tokenizer, source, log_level=0)
        if matcher.is_error():
            return None
        _MatcherWalk(matcher, self._words).mask()
        return lambda: _MatcherWalk(matcher.deep_copy(), self._words)


# -- XGrammar ----------------------------------------------------------------------------------------------------------


class _XGrammarWalk:
    def __init__(self, matcher: Any, bitmask: Any) -> None:
        self._matcher, self._bitmask = matcher, bitmask
        self._mask = bitmask.numpy()[0].view(np.uint32)

    def mask(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return self._mask

    def advance(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def is_over(self) -> bool:
        return self._matcher.is_completed()


class XGrammar:
    name = "XGrammar"

    def __init__(self, folder: Path, packages: Path) -> None:
        """packages: where it is installed."""
        sys.path.append(str(packages))
        xgrammar = importlib.import_module("xgrammar")
        from transformers import AutoTokenizer

        self._xgrammar: Any = xgrammar
        vocabulary = Compiler(folder).vocabulary
        self._size = vocabulary.tokenizer.vocab_size
        tokenizer = AutoTokenizer.from_pretrained(folder)
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._size, stop_token_ids=vocabulary.tokenizer.eos_tokens
        )
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Callable[[], Walk] | None:
        try:
            grammar = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except (RuntimeError, ValueError):
            return None
        return lambda: _XGrammarWalk(
            self._xgrammar.GrammarMatcher(grammar), self._xgrammar.allocate_token_bitmask(1, self._size)
        )


# -- side by side ------------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    """One peer. Times in µs."""

    peer: str
    compile_us: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refused: int = 0
    refused_documents: int = 0
    """Documents that fulfil their schema, with a token that the peer's grammar does not allow."""
    finished: int = 0
    """Random outputs that ended by themselves."""
    invalid: int = 0
    """Finished outputs that `jsonschema` rejects."""
    invalid_schemas: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """JSON."""
        numbers = {
            f"{name}_{label}": float(np.percentile(us, share)) if us else 0.0
            for name, us in (("compile_us", self.compile_us), ("mask_us", self.mask_us))
            for label, share in (("median", 50), ("p99", 99), ("max", 100))
        }
        names = ("peer", "refused", "refused_documents", "finished", "invalid", "invalid_schemas")
        return {name: getattr(self, name) for name in names} | numbers


def compare(folder: Path, schemas: Sequence[Schema], walks: int, xgrammar: Path | None) -> list[Compared]:
    """walks: random ones of each schema."""
    compiler = Compiler(folder)
    tokenizer, vocabulary = compiler.tokenizer, compiler.vocabulary
    peers: list[Peer] = [Baton(folder), LLGuidance(folder)]
    if xgrammar is not None:
        peers.append(XGrammar(folder, xgrammar))
    found = {peer.name: Compared(peer.name) for peer in peers}
    pieces = [tokenizer.token_bytes[token] for token in range(vocabulary.tokenizer.vocab_size)]
    ending = np.array([any(byte in b'"]}' for byte in piece) for piece in pieces])
    ends = vocabulary.tokenizer.eos_tokens
    for number, schema in enumerate(schemas):
        document = tokenizer.encode_continuation(make_text(schema, number))
        is_valid = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).is_valid
        for peer in peers if number % 2 == 0 else peers[::-1]:
            began = time.perf_counter()
            start = peer.compile(schema)
            ended = time.perf_counter()
            cell = found[peer.name]
            if start is None:
                cell.refused += 1
                continue
            cell.compile_us.append((ended - began) * 1e6)
            _walk_document(start(), document, cell)
            for walk in range(walks):
                output = _walk_at_random(start(), np.random.default_rng([number, walk]), ending, ends)
                if output is None:
                    continue
                cell.finished += 1
                if not _is_valid(b"".join(pieces[token] for token in output), is_valid):
                    cell.invalid += 1
                    cell.invalid_schemas.append(number)
    return list(found.values())


def _walk_document(walk: Walk, document: Sequence[int], cell: Compared) -> None:
    for token in document:
        began = time.perf_counter()
        mask = walk.mask()
        cell.mask_us.append((time.perf_counter() - began) * 1e6)
        if not int(mask[token >> 5]) >> (token & 31) & 1:
            cell.refused_documents += 1
            return
        walk.advance(token)


def _walk_at_random(walk: Walk, rng: np.random.Generator, ending: np.ndarray, ends: Sequence[int]) -> list[int] | None:
    """Token ids of an output that came to its end; None for one that did not within `MOST_TOKENS`."""
    output: list[int] = []
    for _ in range(MOST_TOKENS):
        if walk.is_over():
            return output
        allowed = np.unpackbits(walk.mask().view(np.uint8), bitorder="little")[: len(ending)].astype(bool)
        if allowed[list(ends)].any():
            return output
        likely = allowed & ending
        choices = np.flatnonzero(likely if likely.any() and rng.random() < 0.5 else allowed)
        token = int(rng.choice(choices)) if len(choices) else -1
        if token < 0 or not walk.advance(token):
            return None
        output.append(token)
    return None


def _is_valid(text: bytes, is_valid: Callable[[Any], bool]) -> bool:
    try:
        return is_valid(json.loads(text))
    except ValueError:
        return False


# -- generation --------------------------------------------------------------------------------------------------------


class _Processor:
    """A logits processor on llguidance.torch, with a matcher for each row."""

    def __init__(self, matchers: list[LLMatcher], prompt_len: int, vocab_size: int) -> None:
        from llguidance.torch import allocate_token_bitmask

        self._matchers, self._prompt_len = matchers, prompt_len
        self._bitmask = allocate_token_bitmask(len(matchers), vocab_size)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        from llguidance.torch import apply_token_bitmask_inplace, fill_next_token_bitmask

        for row, matcher in enumerate(self._matchers):
            if input_ids.shape[1] > self._prompt_len and not matcher.is_stopped():
                matcher.consume_token(int(input_ids[row, -1]))
            fill_next_token_bitmask(matcher, self._bitmask, row)
        apply_token_bitmask_inplace(scores, self._bitmask)
        return scores


def compare_generation(
    folder: Path, schemas: Sequence[Schema], batch: int, tokens: int, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Tokens per second of each round, prompts included: Baton's engine without jump-forward and with it, and
    transformers. Outputs are greedy."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    compiler = Compiler(folder)
    tokenizer, vocabulary = compiler.tokenizer, compiler.vocabulary
    prompts = make_prompts(tokenizer, 10)[:1] * batch  # of one length, so that nothing is padded
    pool = batch * (tokens + 128) + 256
    engines = {
        name: Engine(folder, jumps=jumps, max_running=batch, pool_tokens=pool, clock=clock)
        for name, jumps in (("Baton", False), ("Baton, jump-forward", True))
    }
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    guidance = LLGuidance(folder)
    known = [(schema, found) for schema in schemas if (found := compiler.of_schema(schema)) is not None]
    speeds: dict[str, list[float]] = {name: [] for name in (*engines, "transformers + llguidance")}

    def generate(starts: Sequence[Callable[[], _MatcherWalk]]) -> int:
        ids = torch.tensor(prompts[: len(starts)])
        processor: Any = _Processor(
            [start().matcher for start in starts], ids.shape[1], vocabulary.tokenizer.vocab_size
        )
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([processor]),
                pad_token_id=vocabulary.tokenizer.eos_tokens[0],
            )
        ends = set(vocabulary.tokenizer.eos_tokens)
        rows = found[:, ids.shape[1] :].tolist()
        return sum(next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in rows)

    for number in range(rounds + 1):
        first = number * batch % max(1, len(known) - batch + 1)
        members = known[first : first + batch]
        order = list(speeds) if number % 2 == 0 else list(speeds)[::-1]
        for name in order:
            if name in engines:
                constraints = [constraint for _, constraint in members]
                sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
                began = clock()
                count = engines[name].run(prompts[: len(members)], sampling, constraints).num_tokens
            else:
                starts = [start for schema, _ in members if (start := guidance.compile(schema)) is not None]
                began = clock()
                count = generate(starts)
            if number:  # the first round warms up
                speeds[name].append(count / (clock() - began))
    return speeds


def medians(speeds: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in speeds.items()}
