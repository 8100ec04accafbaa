"""Recorded traffic in Mooncake's format, JSONL: the lengths of prompts and answers, and the common parts of prompts.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, …]}

A hash id identifies a block of 512 tokens and all tokens before it; prompts with the same first ids share these.
Answers have none: the part of an answer in a later prompt has that prompt's block ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cache.traces import NOWHERE, Content, Request, Trace

BLOCK_TOKENS = 512


class BadTraceError(ValueError):
    """The message says which line, and what is wrong with it."""


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS, most: int | None = None) -> Trace:
    """In the order of the timestamps. most: requests, the first ones. Raises BadTraceError."""
    lines: list[tuple[float, int, dict[str, Any]]] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                fields = _checked(line, f"{path}, line {number}", block_tokens)
                lines.append((fields["timestamp"], number, fields))
    if not lines:
        raise BadTraceError(f"{path} holds no requests")
    content, places, requests = Content(), {}, []
    for _, _, fields in sorted(lines, key=lambda line: line[:2])[:most]:
        place, left = NOWHERE, fields["input_length"]
        for block in fields["hash_ids"]:
            size = min(left, block_tokens)
            key = (place, block, size)
            if key not in places:
                places[key] = content.add_tokens(place, size)
            place, left = places[key], left - size
        requests.append(Request(place, content.add_tokens(place, max(fields["output_length"], 1))))
    return Trace(path.stem, content, requests)


def _checked(line: str, where: str, block_tokens: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BadTraceError(f"{where} is no JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("hash_ids"), list):
        raise BadTraceError(f"{where} has no list hash_ids; recorded traffic has one request a line, as Mooncake's")
    for name in ("timestamp", "input_length", "output_length"):
        if type(fields.get(name)) not in (int, float) or fields[name] < 0:
            raise BadTraceError(f"{where}: {name} is {fields.get(name)!r}, not a number of at least 0")
    if any(type(block) is not int for block in fields["hash_ids"]):
        raise BadTraceError(f"{where}: hash_ids holds something that is no integer")
    blocks = -(-fields["input_length"] // block_tokens)
    if len(fields["hash_ids"]) != blocks or not blocks:
        raise BadTraceError(
            f"{where}: {len(fields['hash_ids'])} hash_ids for {fields['input_length']} tokens, not {blocks}; "
            f"say by --block-tokens how many tokens a block has, if not {block_tokens}"
        )
    return fields
