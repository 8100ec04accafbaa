from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cache.hash_trace import BadTraceError, read_trace

LINES = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 4]},
    {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 2], "session": "more than is needed"},
]


def written(folder: Path, lines: list) -> Path:
    path = folder / "traffic.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_equal_hash_ids_give_equal_tokens_in_time_order(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, [*LINES, ""]))
    content, requests = trace.content, trace.requests
    prompts = [content.token_ids(request.prompt).tolist() for request in requests]
    assert trace.name == "traffic" and [len(ids) for ids in prompts] == [1024, 600, 1100]
    assert (
        prompts[2][:1024] == prompts[0] and prompts[1][:512] == prompts[0][:512] and prompts[1][512] != prompts[0][512]
    )
    ends = [content.lengths[request.end] - content.lengths[request.prompt] for request in requests]
    assert ends == [1, 5, 7], "an answer has a token at least"
    assert len(read_trace(written(tmp_path, LINES), most=2).requests) == 2


def test_partial_block_differs_from_whole_block(tmp_path: Path) -> None:
    short = {"timestamp": 1, "input_length": 700, "output_length": 1, "hash_ids": [0, 1]}
    trace = read_trace(written(tmp_path, [LINES[1], short]))
    whole, part = (trace.content.token_ids(request.prompt) for request in trace.requests)
    assert whole[512] != part[512]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 has no list hash_ids"),
        ({"timestamp": 0, "input_length": 5, "output_length": 5}, "line 2 has no list hash_ids"),
        (LINES[0] | {"input_length": -1}, "line 2: input_length is -1"),
        (LINES[0] | {"timestamp": "now"}, "line 2: timestamp is 'now'"),
        (LINES[0] | {"hash_ids": ["a", "b", "c"]}, "holds something that is no integer"),
        (LINES[0] | {"hash_ids": [0, 1]}, "2 hash_ids for 1100 tokens, not 3; say by --block-tokens"),
        (LINES[0] | {"hash_ids": [], "input_length": 0}, "0 hash_ids for 0 tokens"),
    ],
)
def test_malformed_items_are_rejected_with_reason(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(BadTraceError, match=message):
        read_trace(written(tmp_path, [LINES[0], line]))


def test_empty_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadTraceError, match="holds no requests"):
        read_trace(written(tmp_path, []))
