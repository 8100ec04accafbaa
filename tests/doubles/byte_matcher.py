"""Reads texts by a grammar, byte by byte, with the special tokens of many models: so a test says exactly where an
output may end."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.runtime.constraints import structural_tags
from baton.runtime.constraints.json_checks import Reader, Tokens, unwrap
from baton.scheduler.sampling_params import Grammar

SPECIAL = (
    "<eos>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>",
    "<|constrain|>", "[THINK]", "[/THINK]", "<|python_tag|>",
)  # fmt: skip
IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}


class Bytes:
    """One token for each byte, and the special ones."""

    eos_token_id = IDS["<eos>"]
    bos_token_id = None
    special_token_ids = tuple(IDS.values())
    tokens = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIAL))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), eos_token=[IDS["<eos>"]])
MARKS = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


def takes(grammar: Grammar | None, answer: str) -> bool:
    """Is this a whole answer?"""
    matcher, reader = matcher_of(grammar), reader_of(grammar)
    ids = ids_of(answer)
    fits = reader is None or reader.read(b"".join(Bytes.tokens[token] for token in ids)) is not None
    return fits and matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def is_begun(grammar: Grammar | None, answer: str) -> bool:
    """Could an answer begin so?"""
    matcher, ids = matcher_of(grammar), ids_of(answer)
    return matcher.try_consume_tokens(ids) == len(ids)


def ids_of(answer: str) -> list[int]:
    return [token for part in MARKS.split(answer) for token in ([IDS[part]] if part in IDS else part.encode())]


def reader_of(grammar: Grammar | None) -> Reader | None:
    assert grammar is not None
    checks = unwrap(grammar.source)[1]
    return Reader.start(Tokens(Bytes.tokens), checks) if checks is not None else None


def matcher_fails(grammar: Grammar) -> bool:
    """True if the grammar cannot be compiled, or no output fulfils it."""
    matcher = LLMatcher(TOKENIZER, unwrap(structural_tags.to_llguidance(grammar.source, IDS, 0))[0], log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.is_error()


def matcher_of(grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None
    source = grammar.source
    if structural_tags.is_structural(source):
        source = structural_tags.to_llguidance(source, IDS, 0)
    matcher = LLMatcher(TOKENIZER, unwrap(source)[0], log_level=0)
    assert not matcher.is_error(), matcher.get_error().split("<state>")[0]
    return matcher
