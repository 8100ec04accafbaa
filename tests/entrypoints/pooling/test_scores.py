"""Readers of scores, rankings and classes: the forms of vLLM and SGLang, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.entrypoints.pooling.embeddings import activated
from baton.entrypoints.pooling.scores import (
    LabelScoreCall,
    PairScoreCall,
    parse_classify,
    parse_rerank,
    parse_score,
)
from baton.scheduler.outcome import RequestRefused


@pytest.mark.parametrize(
    ("one", "two"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_pairs_by_every_name(one: str, two: str) -> None:
    call = parse_score({one: "q", two: ["a", "b"], "instruction": "find"})
    assert isinstance(call, PairScoreCall)
    assert (call.pairs.queries, call.pairs.documents, call.pairs.instruction) == (["q"], ["a", "b"], "find")
    single = parse_score({one: "q", two: "a"})
    assert isinstance(single, PairScoreCall) and single.pairs.documents == ["a"]


def test_labels_of_sglang() -> None:
    call = parse_score({"query": [1], "items": [[2], []], "label_token_ids": [5], "item_first": True}, rid="mine")
    assert isinstance(call, LabelScoreCall)
    assert (call.query, call.items, call.label_token_ids, call.item_first) == ([1], [[2], []], (5,), True)
    assert call.fields.rid == "mine" and not call.softmax
    defaults = {"return_pooled_hidden_states": False, "apply_softmax": False}
    single = parse_score({"query": "q", "items": "a", "label_token_ids": [5], **defaults})
    assert isinstance(single, LabelScoreCall) and single.items == ["a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a", "documents": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "data_1": "c"}, "text_1"),
        ({"queries": "a", "documents": "b", "items": "c"}, "text_1"),
        ({"text_1": [], "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": [1]}, "text_2"),
        ({"text_1": "a", "text_2": "b", "apply_softmax": True}, "apply_softmax"),
        ({"text_1": "a", "text_2": ["b"] * 9}, "text_2"),
        ({"items": ["a"]}, "label_token_ids"),
        ({"query": "q", "items": ["a"], "label_token_ids": []}, "label_token_ids"),
        ({"query": "q", "items": ["a"], "label_token_ids": [True]}, "label_token_ids"),
        ({"query": "q", "items": ["a"], "label_token_ids": [1] * 129}, "label_token_ids"),
        ({"query": 1, "items": ["a"], "label_token_ids": [1]}, "query"),
        ({"query": "q", "items": [], "label_token_ids": [1]}, "items"),
        ({"query": "q", "items": ["a"] * 9, "label_token_ids": [1]}, "items"),
        ({"query": [1], "items": ["a"], "label_token_ids": [1]}, "items"),
        ({"query": "q", "items": ["a"], "label_token_ids": [1], "text_2": "b"}, "text_2"),
        ({"query": "q", "items": ["a"], "label_token_ids": [1], "rid": "a", "request_id": "a"}, "request_id"),
    ],
)
def test_contradicting_scores_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_score(fields, max_prompts=8)
    assert caught.value.param == param


def test_rerank_of_every_client() -> None:
    call = parse_rerank({"query": "q", "documents": ["a", {"text": "b", "id": 3}], "instruct": "find", "top_n": 1})
    assert (call.pairs.documents, call.pairs.instruction, call.top_n) == (["a", "b"], "find", 1)
    assert (
        call.returns_documents
        and not parse_rerank({"query": "q", "documents": ["a"], "return_documents": False}).returns_documents
    )
    with pytest.raises(RequestRefused, match="are the same"):
        parse_rerank({"query": "q", "documents": ["a"], "instruct": "x", "instruction": "y"})


def test_classify_takes_every_input() -> None:
    for given, is_list, size in (("a", False, 1), ([1, 2], False, 1), (["a", "b"], True, 2), ([[1], [2]], True, 2)):
        call = parse_classify({"input": given, "use_activation": False})
        assert (call.inputs.is_list, len(call.inputs), call.activates) == (is_list, size, False)


def test_activations_do_not_overflow() -> None:
    extreme = np.array([1e30, -1e30, 0], dtype=np.float32)
    assert activated(extreme, "softmax").tolist() == [1, 0, 0]
    assert activated(extreme, "sigmoid").tolist() == [1, 0, 0.5]
    assert activated(extreme, "none").tolist() == extreme.tolist()
