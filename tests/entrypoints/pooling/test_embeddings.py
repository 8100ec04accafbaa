"""Vectors as they are answered, and readers of embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.pooling.embeddings import parse_embeddings, parse_encode, parse_pooling, shaped, written
from baton.entrypoints.pooling.prompts import make_prompts
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import PoolingSpec


def test_vector_is_cut_before_it_is_normalized() -> None:
    vector = np.array([3, 4, 12], dtype=np.float32)
    assert shaped(vector, dimensions=2, normalizes=True).tolist() == pytest.approx([0.6, 0.8])
    assert shaped(vector, dimensions=2, normalizes=False).tolist() == [3, 4]
    assert shaped(vector, dimensions=None, normalizes=True).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])


def test_extreme_vectors_are_normalized() -> None:
    """The square of the largest float32 is infinite in float32; a vector of zeros has no direction."""
    large = np.array([3e38, 3e38], dtype=np.float32)
    assert shaped(large, dimensions=None, normalizes=True).tolist() == pytest.approx([0.5**0.5] * 2)
    nothing = np.zeros(2, dtype=np.float32)
    assert shaped(nothing, dimensions=None, normalizes=True).tolist() == [0, 0]


def test_written_forms_have_the_same_numbers() -> None:
    vector = np.array([0.1, -2.5], dtype=np.float32)
    coded = written(vector, "base64")
    assert isinstance(coded, str)
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == written(vector, "float")


def test_common_fields_reach_the_requests() -> None:
    call = parse_embeddings(
        {"input": ["a", "b"], "cache_salt": "x", "user": "me", "priority": 3, "lora_path": "style", "rid": "mine"}
    )
    prompts = make_prompts([[1], [2]], PoolingSpec(kind="mean"), call.fields, is_list=True)
    assert [prompt.rid for prompt in prompts] == ["mine_0", "mine_1"] and prompts[0].group == "mine"
    for prompt in prompts:
        spec = prompt.spec
        assert (spec.priority, spec.adapter, spec.no_reuse_from, spec.retain_ttl) == (3, "style", 0, 0.0)
        assert spec.sampling.max_new_tokens == 0 and spec.pooling == PoolingSpec(kind="mean")
        assert spec.namespace and spec.client and spec.namespace != spec.client


@pytest.mark.parametrize("parse", [parse_embeddings, parse_pooling])
@pytest.mark.parametrize(
    ("fields", "normalizes"),
    [
        ({}, None),
        ({"normalize": False}, False),
        ({"use_activation": False}, False),
        ({"use_activation": True}, True),
        ({"use_activation": False, "normalize": False}, False),
    ],
)
def test_either_name_decides_whether_vectors_are_normalized(parse: Any, fields: dict, normalizes: bool | None) -> None:
    assert parse({"input": "a", "padding": "do_not_pad", **fields}).normalizes is normalizes


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (parse_embeddings, {"input": None}, "input"),
        (parse_embeddings, {"input": {"text": "a"}}, "input"),
        (parse_embeddings, {"input": [[1, "a"]]}, "input"),
        (parse_embeddings, {"input": "a", "normalize": 1}, "normalize"),
        (parse_embeddings, {"input": "a", "dimensions": True}, "dimensions"),
        (parse_embeddings, {"input": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        (parse_embeddings, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (parse_embeddings, {"input": "a", "priority": 10**9}, "priority"),
        (parse_embeddings, {"input": "a", "cache_salt": "x" * 2000}, "cache_salt"),
        (parse_embeddings, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        (parse_embeddings, {"input": ["a"] * 9}, "input"),
        (parse_embeddings, {"input": "a", "truncation_side": "both"}, "truncation_side"),
        (parse_embeddings, {"input": "a", "padding": "max_length"}, "padding"),
        (parse_embeddings, {"input": "a", "use_activation": 1}, "use_activation"),
        (parse_embeddings, {"input": "a", "use_activation": True, "normalize": False}, "use_activation"),
        (parse_pooling, {"input": "a", "task": "score"}, "task"),
        (parse_encode, {"text": ["a"] * 9}, "text"),
        (parse_encode, {"input_ids": "a"}, "input_ids"),
        (parse_encode, {"text": "a", "image_data": ["x"]}, "image_data"),
    ],
)
def test_wrong_fields_are_refused_by_name(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(fields, max_prompts=8)
    assert caught.value.param == param
