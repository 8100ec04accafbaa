"""Perplexity and divergence of formats: figures, windows, what is left out, and a small run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.runtime.config import ModelArgs
from baton.runtime.text.tokenizer import Tokenizer
from benchmarks.accuracy.__main__ import Measurement, met, render
from benchmarks.accuracy.engines import Baton
from benchmarks.accuracy.formats import FORMATS, REFERENCE, Format
from benchmarks.accuracy.scores import Reference, Scores
from benchmarks.accuracy.text import windows
from benchmarks.common.models import LLAMA_TINY, TOY_MODEL, save_random_model, write_tokenizer

VOCAB = LLAMA_TINY["vocab_size"]


def test_perplexity_and_divergence_of_known_distributions() -> None:
    ids = torch.tensor([0, 1, 0])
    uniform = torch.full((2, 4), 0.25).log()
    sharper = torch.tensor([[0.1, 0.7, 0.1, 0.1]] * 2).log()
    exact, coarse = Scores(), Scores()
    exact.add(ids, uniform, uniform)
    coarse.add(ids, sharper, uniform)
    assert exact.perplexity == pytest.approx(4) and exact.figures(exact)["divergence"] == 0
    found = coarse.figures(exact)
    assert found["perplexity"] == pytest.approx(1 / math.sqrt(0.7 * 0.1))
    assert found["above_percent"] == pytest.approx(100 * (found["perplexity"] / 4 - 1))
    assert found["divergence"] == pytest.approx(0.25 * math.log(0.25 / 0.7) + 0.75 * math.log(0.25 / 0.1), rel=1e-5)


def test_windows_are_spread_over_the_text_and_enough_of_it_is_needed() -> None:
    tokenizer = Tokenizer.load(str(TOY_MODEL))
    text = "the quick brown fox jumps over the lazy dog. " * 40
    ids = tokenizer.encode(text)
    found = windows(text, tokenizer, 3, 16)
    assert found.shape == (3, 16) and found[0].tolist() == ids[:16]
    whole = len(ids) // 16
    assert [window.tolist() for window in found[1:]] == [
        ids[start : start + 16] for start in (whole // 3 * 16, 2 * whole // 3 * 16)
    ]
    with pytest.raises(ValueError, match=rf"the text has {len(ids)} tokens: enough for \d+ windows of 16, not for 999"):
        windows(text, tokenizer, 999, 16)


def test_reference_gives_back_what_it_keeps(tmp_path: Path) -> None:
    reference = Reference(tmp_path / "logprobs", 2, 4, 5)
    kept = [torch.randn(3, 5) for _ in range(2)]
    for number, logprobs in enumerate(kept):
        reference.keep(number, logprobs)
    assert all(torch.equal(reference.read(number), logprobs) for number, logprobs in enumerate(kept))


def tiny_model(folder: Path) -> Path:
    save_random_model(folder, LLAMA_TINY | {"bos_token_id": 1, "eos_token_id": 2})
    write_tokenizer(folder, VOCAB)
    return folder


def test_runner_in_steps_gives_the_logprobs_of_transformers(tmp_path: Path) -> None:
    """Two windows, longer than a step: the second one sees nothing of the first."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    ours = Baton(ModelArgs(model_path=str(folder), dtype="float32", device="cpu"), 300)
    for _ in range(2):
        ids = rng.integers(0, VOCAB, 300, dtype=np.int32)
        with torch.inference_mode():
            wanted = theirs(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(ours.logprobs(ids), wanted, rtol=0, atol=2e-4)
    ours.close()


def test_measured_format_is_compared_with_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny_model(tmp_path / "model")
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 40), dtype=np.int32)
    measurement = Measurement(folder, ids, tmp_path, None, tmp_path / "logprobs")
    exact = measurement.measure(FORMATS[REFERENCE])
    assert (exact["above_percent"], exact["divergence"], exact["same"]) == (0, 0, 1)
    half = measurement.measure(FORMATS["bfloat16"])
    assert 0 < half["divergence"] < 0.01 and abs(half["above_percent"]) < 1 and half["same"] > 0.9
    assert measurement.why_not(FORMATS["llama.cpp Q8_0"]) == (
        "no --llamacpp names the python of an environment with xllamacpp"
    )
    assert measurement.why_not(Format("new", {"colour_of_weights": 3})) == "this version has no colour_of_weights"
    goal = Format("goal", goal=0.3)
    monkeypatch.setitem(FORMATS, "goal", goal)
    assert met(goal, {"above_percent": 0.3}) and met(goal, {"above_percent": 0.31}) is False
    assert met(FORMATS["bfloat16"], half) is None
    report = {"formats": {REFERENCE: exact, "goal": half | {"above_percent": 9.0}}, "skipped": {"int4": "none"}}
    report |= {"model": "tiny", "windows": 2, "length": 40, "python": "3", "failed": {"int8": "no"}}
    text = render(report | {"text": {"name": "words", "characters": 5, "sha256": "ab"}})
    assert "| ≤ 0.3 % | missed |" in text and "+9.000 ±" in text
    assert "int4: not measured, none" in text and "int8 failed: no" in text
