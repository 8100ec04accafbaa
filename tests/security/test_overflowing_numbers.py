"""Sampling numbers that float32 cannot hold, over HTTP: each is refused or does what it says, no token leaves what is
allowed, and the server stands."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
ITEMS = [(5, 6, 7), (5, 8, 9)]
ALLOWED = [5, 6, 7, 8]


@pytest.fixture(scope="module", params=[pytest.param("off", marks=pytest.mark.slow), "on"], ids=["plain", "overlapped"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu")
    flags += ("--linear-backend", "torch", "--overlap-schedule", request.param)
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        running.wait_ready()
        file = io.BytesIO()
        np.save(file, np.array(ITEMS, dtype=np.int32))
        headers = {"Content-Type": "application/octet-stream"}
        answer = running.client.post("/item_tries", params={"name": "t"}, content=file.getvalue(), headers=headers)
        assert answer.status_code == 200, answer.text
        yield running


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e39},
        {"temperature": 1e30},
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e-6},
        {"top_p": 1e-300},
        {"top_p": 1e-300, "top_k": 2**40},
        {"min_p": 5e-324},
        {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 1e-6, "logit_bias": {"11": 100}},
        {"repetition_penalty": 1e6, "logit_bias": {"11": 1e300}, "seed": -(2**63)},
        {"logit_bias": {str(token): -100 for token in ALLOWED}, "temperature": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("constraint", [{"item_trie": "t"}, {"allowed_token_ids": ALLOWED}], ids=["items", "ids"])
def test_overflowing_sampling_numbers_respect_constraints(
    server: ServerUnderTest, sampling: dict[str, Any], constraint: dict[str, Any]
) -> None:
    answer = server.generate(text="abc", sampling_params={"max_new_tokens": 6, "seed": 1, **sampling, **constraint})
    assert server.process.poll() is None, server.log[-2000:]
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        (name,) = sampling
        assert answer.json()["error"]["param"] == f"sampling_params.{name}"
        return
    output = answer.json()["output_ids"]
    assert tuple(output) in ITEMS if "item_trie" in constraint else set(output) <= {*ALLOWED, 1699}
    assert output


@pytest.mark.parametrize("penalty", [-10, -9.99, 9.99, 10])
def test_beam_scores_stay_finite(server: ServerUnderTest, penalty: float) -> None:
    """2 ** -10 is far from the edge, and 2000 ** 10 is behind it: unit tests have these."""
    sampling = {"max_new_tokens": 40, "beam_width": 3, "n": 3, "length_penalty": penalty, "ignore_eos": True}
    answers = server.generate(text="abc", sampling_params=sampling).json()
    scores = [answer["meta_info"]["sequence_score"] for answer in answers]
    assert all(isinstance(score, float) for score in scores) and scores == sorted(scores, reverse=True)
