"""Time of a grammar's masks and of its compilation, without a model.

masks     documents of `schemas.py` are walked through their grammars, token by token: each row of a batch is in
          another document. A search's beams fork at random, so that they share positions as those of a real one do.
compile   schemas are compiled as a request's are: read in the HTTP process, compiled in the worker. Cached: the
          worker has the grammar.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor

from baton.entrypoints.fields.grammars import take_grammar
from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.constraints.grammar import GrammarConstraint, GrammarStates, GrammarVocabulary
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import Grammar
from benchmarks.grammars.schemas import Schema, make_text

MASK_GOAL_US, BEAMS_GOAL_US = 40.0, 1000.0

SEARCH_STEPS = 40

Clock = Callable[[], float]
"""Seconds: of the wall, or of all this process's threads."""


@dataclass
class Texts:
    """The vocabulary of a model, and grammars with documents that fulfil them."""

    model: str
    vocabulary: GrammarVocabulary
    grammars: list[GrammarConstraint]
    documents: list[list[int]]
    """Token ids of one document for each grammar."""

    def take(self, number: int) -> tuple[GrammarConstraint, list[int]]:
        """A grammar and its document; they come again after the last."""
        place = number % len(self.grammars)
        return self.grammars[place], self.documents[place]


@dataclass
class Times:
    """Times of one kind in µs."""

    name: str
    model: str
    threads: int
    us: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """JSON."""
        median, p99, most = np.percentile(self.us, [50, 99, 100]).tolist() if self.us else (0.0, 0.0, 0.0)
        return {
            "name": self.name,
            "model": self.model,
            "threads": self.threads,
            "count": len(self.us),
            "median_us": median,
            "p99_us": p99,
            "max_us": most,
        }


class Compiler:
    """The grammars of a worker, each waited for."""

    def __init__(self, folder: Path) -> None:
        """folder: of the model, of which only the tokenizer is read."""
        config = load_model_config(folder)
        self.tokenizer = Tokenizer.load(folder)
        self._done = threading.Event()
        self._grammars = Grammars(lambda: self.tokenizer, config.vocab_size, config.eos_token_ids, self._done.set)
        everything = read_schema({})
        assert everything is not None
        found = self.constraint(everything)
        assert found is not None
        self.vocabulary = found.vocabulary

    def constraint(self, grammar: Grammar) -> GrammarConstraint | None:
        """None for a grammar that cannot be compiled."""
        self._done.clear()
        found = self._grammars.constraint(grammar)
        while not found.is_ready:
            self._done.wait(0.001)
        return None if found.failure() is not None else found

    def of_schema(self, schema: Schema) -> GrammarConstraint | None:
        """None for a schema that is refused."""
        grammar = read_schema(schema)
        return None if grammar is None else self.constraint(grammar)


def read_schema(schema: Schema) -> Grammar | None:
    """As the HTTP process reads it; None for one that is refused."""
    try:
        return take_grammar({"json_schema": schema}, "")
    except RequestRefused:
        return None


def load_texts(folder: Path, schemas: Sequence[Schema]) -> Texts:
    compiler = Compiler(folder)
    texts = Texts(folder.name, compiler.vocabulary, [], [])
    for number, schema in enumerate(schemas):
        constraint = compiler.of_schema(schema)
        if constraint is not None:
            texts.grammars.append(constraint)
            texts.documents.append(compiler.tokenizer.encode_continuation(make_text(schema, number)))
    return texts


# -- masks -------------------------------------------------------------------------------------------------------------


def measure_masks(
    folders: Sequence[Path],
    schemas: Sequence[Schema],
    threads: Sequence[int],
    rows: Sequence[int],
    beams: int,
    steps: int,
    clock: Clock,
) -> list[Times]:
    """beams: of a search. steps: of each batch and each search."""
    found: list[Times] = []
    for folder in folders:
        texts = load_texts(folder, schemas)
        _warm_up(texts)
        found.append(_mask_times(texts, steps, clock))
        for count in threads:
            texts.vocabulary.executor = LLExecutor(count)
            texts.vocabulary.min_shared = 2 if count > 1 else sys.maxsize
            for size in rows:
                found.append(_batch_times(texts, size, count, steps, clock))
            found += _search_times(texts, beams, count, steps, clock)
    return found


def _warm_up(texts: Texts) -> None:
    """As a worker's: the matcher of a grammar that has been in use knows its lexer's states."""
    for grammar, document in zip(texts.grammars, texts.documents):
        for state, token in _walk(grammar, document):
            state.allowed()
            state.advance(token)


def _walk(grammar: GrammarConstraint, document: Sequence[int]) -> Iterator[tuple[GrammarStates, np.ndarray]]:
    """Each state of a document on its way, and the token that comes next, int32 [1]."""
    state = grammar.start()
    for token in np.array(document, dtype=np.int32).reshape(-1, 1):
        yield state, token
        state = state.advance(token)


def _mask_times(texts: Texts, steps: int, clock: Clock) -> Times:
    """The mask of one position."""
    times = Times("one mask", texts.model, 1)
    for number in itertools.count():
        for state, _ in _walk(*texts.take(number)):
            (position,) = state.positions
            if position.mask is None:  # the first one is known
                began = clock()
                texts.vocabulary.fill([position])
                times.us.append((clock() - began) * 1e6)
            if len(times.us) == 10 * steps:
                return times
    raise AssertionError("documents never run out")


def _batch_times(texts: Texts, size: int, threads: int, steps: int, clock: Clock) -> Times:
    """A step's masks, from the states of its rows to what the sampler gets."""
    times = Times(f"batch of {size}", texts.model, threads)
    walks: list[Iterator[tuple[GrammarStates, np.ndarray]]] = []
    number = 0
    for _ in range(steps):
        states: list[GrammarStates] = []
        while len(states) < size:
            row = len(states)
            if row == len(walks):
                walks.append(iter(()))
            following = next(walks[row], None)
            if following is None:
                walks[row] = _walk(*texts.take(number))
                number += 1
                following = next(walks[row])
            states.append(following[0])
        began = clock()
        GrammarStates.allowed_next(states)
        times.us.append((clock() - began) * 1e6)
    return times


def _search_times(texts: Texts, beams: int, threads: int, steps: int, clock: Clock) -> list[Times]:
    """Time the steps of beam searches: filling the masks, and moving each beam to its next position by one of the
    tokens that it may have."""
    masks = Times(f"{beams} beams", texts.model, threads)
    moves = Times(f"{beams} beams, next positions", texts.model, threads)
    rng = np.random.default_rng(0)
    for grammar in itertools.islice(itertools.cycle(texts.grammars), 100 * steps):
        state = grammar.start()
        for _ in range(SEARCH_STEPS):
            is_whole = len(state) == beams
            began = clock()
            allowed = state.allowed()
            if is_whole:
                masks.us.append((clock() - began) * 1e6)
            parents, tokens = _continuations(allowed, state, beams, rng)
            if not len(parents) or len(masks.us) == steps:
                break
            began = clock()
            state = state.select(parents).advance(tokens)
            if is_whole:
                moves.us.append((clock() - began) * 1e6)
        if len(masks.us) == steps:
            break
    return [masks, moves]


def _continuations(
    allowed: AllowedTokens, state: GrammarStates, beams: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [k], ascending, and int32 [k], at most ``beams`` different pairs: the beam that each continues, and its
    token, never the end."""
    ends = set(state.grammar.vocabulary.tokenizer.eos_tokens)
    drawn = np.sort(rng.choice(len(state), beams + beams // 8)).tolist()
    found: set[tuple[int, int]] = set()
    for beam, members in itertools.groupby(drawn):
        own = allowed.tokens_of(beam)
        if len(own):
            found |= {(beam, token) for token in rng.choice(own, len(list(members))).tolist() if token not in ends}
    pairs = np.array(sorted(found)[:beams], dtype=np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


# -- compilation -------------------------------------------------------------------------------------------------------


@dataclass
class Compiled:
    """Times of the schemas in µs, one for each."""

    model: str
    refused: int = 0
    read: list[float] = field(default_factory=list)
    """In the HTTP process."""
    compiled: list[float] = field(default_factory=list)
    """In the worker."""
    cached: list[float] = field(default_factory=list)
    """In both, with a grammar that the worker has."""

    def row(self) -> dict[str, Any]:
        """JSON."""
        parts = {"read": self.read, "compiled": self.compiled, "cold": self.cold, "cached": self.cached}
        return {"model": self.model, "refused": self.refused} | {
            name: dict(zip(("median_us", "p99_us", "max_us"), np.percentile(us, [50, 99, 100]).tolist()))
            for name, us in parts.items()
        }

    @property
    def cold(self) -> list[float]:
        return [read + compiled for read, compiled in zip(self.read, self.compiled, strict=True)]


def measure_compilation(folders: Sequence[Path], schemas: Sequence[Schema]) -> list[Compiled]:
    found = []
    for folder in folders:
        compiler, each = Compiler(folder), Compiled(folder.name)
        for schema in schemas:
            began = time.perf_counter()
            grammar = read_schema(schema)
            read = time.perf_counter()
            if grammar is None or compiler.constraint(grammar) is None:
                each.refused += 1
                continue
            compiled = time.perf_counter()
            compiler.of_schema(schema)
            each.cached.append((time.perf_counter() - compiled) * 1e6)
            each.read.append((read - began) * 1e6)
            each.compiled.append((compiled - read) * 1e6)
        found.append(each)
    return found
