from __future__ import annotations

import json
from typing import Any

import numpy as np

from baton.runtime.recording.lines import BLOCK_TOKENS, HASH_BYTES, HEADER, LineMaker, RecordedRequest
from baton.scheduler.token_buffer import pack_ids


def request(prompt: list[int], *outputs: list[int], **fields: Any) -> RecordedRequest:
    given = {"rid": "r", "time": 12.0, "seconds": 0.5, "finish": "stop", "cached_tokens": 3} | fields
    return RecordedRequest(prompt_ids=pack_ids(prompt), output_ids=tuple(map(pack_ids, outputs)), **given)


def maker(*, hashed: bool = False) -> LineMaker:
    return LineMaker(hashed=hashed, breathe=lambda: None)


def blocks(text: str) -> list[str]:
    return [text[at : at + 2 * HASH_BYTES] for at in range(0, len(text), 2 * HASH_BYTES)]


def test_recorded_line_has_ids_and_no_names() -> None:
    lines = maker()
    names = {"rid": "Anna", "job_id": "Otto", "parent_rid": "Paul", "namespace": "Rosa"}
    line = lines.make_line(request([1, 2, 3], [4, 5], no_reuse_from=2, **names))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    found = json.loads(line)
    assert found["input_ids"] == [1, 2, 3] and found["output_ids"] == [4, 5]
    assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == (3, 2, 3)
    assert (found["time"], found["seconds"], found["finish"], found["no_reuse_from"]) == (12.0, 0.5, "stop", 2)
    assert not any(name in line.decode() for name in names.values())
    assert found["continuation_of"] == json.loads(lines.make_line(request([1], rid="Paul")))["rid"]
    assert found["rid"] != json.loads(maker().make_line(request([1], rid="Anna")))["rid"], (
        "each log has a key of its own"
    )


def test_several_outputs_are_recorded_as_lists() -> None:
    assert json.loads(maker().make_line(request([1], [2], [3, 4])))["output_ids"] == [[2], [3, 4]]
    assert json.loads(maker().make_line(request([1])))["output_ids"] == []


def test_long_prompts_are_complete_and_make_pauses() -> None:
    pauses: list[int] = []
    lines = LineMaker(hashed=False, breathe=lambda: pauses.append(1))
    ids = np.random.default_rng(1).integers(0, 30000, 50_000).tolist()
    assert json.loads(lines.make_line(request(ids)))["input_ids"] == ids
    assert len(pauses) >= 6


def test_block_hashes_are_equal_for_equal_prefixes() -> None:
    lines, block = maker(hashed=True), BLOCK_TOKENS
    shared, other = list(range(2 * block)), list(range(100, 100 + block))
    first = json.loads(lines.make_line(request(shared + other + [7])))
    second = json.loads(lines.make_line(request([*shared, *other[:-1], 0])))
    moved = json.loads(lines.make_line(request(other + shared)))
    a, b, c = (blocks(each["input_blocks"]) for each in (first, second, moved))
    assert len(a) == 3 and a[:2] == b[:2] and a[2] != b[2]
    assert not set(a) & set(c), "a hash stands for all that comes before its block, too"
    assert "input_ids" not in first and first["input_tokens"] == 3 * block + 1
    foreign = json.loads(lines.make_line(request(shared, namespace="salt")))
    assert not set(blocks(foreign["input_blocks"])) & set(a)
    assert not set(blocks(json.loads(maker(hashed=True).make_line(request(shared)))["input_blocks"])) & set(a)


def test_output_hashes_match_those_of_the_later_prompt() -> None:
    lines, block = maker(hashed=True), BLOCK_TOKENS
    prompt, output = list(range(block + 5)), list(range(500, 500 + block + 11 + 1))
    found = json.loads(lines.make_line(request(prompt, output)))
    later = json.loads(lines.make_line(request([*prompt, *output, 9, 9])))
    whole = blocks(found["input_blocks"]) + blocks(found["output_blocks"][0])
    assert len(whole) == (len(prompt) + len(output) - 1) // block == 3
    assert blocks(later["input_blocks"])[: len(whole)] == whole
    short = json.loads(lines.make_line(request(prompt, output[: block + 11])))
    assert len(blocks(short["output_blocks"][0])) == 1, "the last token of an output has no KV"


def test_the_header_names_the_contents_of_the_log() -> None:
    assert json.loads(maker().make_header(5.0)) == {HEADER: 1, "time": 5.0, "holds": "ids"}
    assert json.loads(maker(hashed=True).make_header(5.0)) == {
        HEADER: 1,
        "time": 5.0,
        "holds": "hashes",
        "block_tokens": BLOCK_TOKENS,
    }
