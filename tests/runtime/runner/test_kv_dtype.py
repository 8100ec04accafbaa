"""--kv-cache-dtype: what it becomes for a model on a device, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.attention.backend import AttentionSpec, kv_shapes
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.runner.kv_dtype import KV_DTYPES, describe_kv_dtype, resolve_kv_dtype
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.tiny_models import save_reference

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPECS = [AttentionSpec(0, 4, 2, 64, 0.125), AttentionSpec(1, 4, 2, 64, 0.125)]
LATENT = [AttentionSpec(0, 4, 1, 24, 0.125, value_dim=16, values_in_keys=True)]
TOY = Path(__file__).parents[3] / "examples" / "toy_model"


@pytest.mark.parametrize("name", ["auto", *KV_DTYPES])
def test_names(name: str) -> None:
    expected = torch.bfloat16 if name == "auto" else KV_DTYPES[name]
    assert resolve_kv_dtype(name, SPECS, torch.bfloat16, CPU, has_few_bits=False) == expected
    assert KV_DTYPES["fp8"] == KV_DTYPES["fp8_e4m3"] != KV_DTYPES["fp8_e5m2"]


@pytest.mark.parametrize(
    ("specs", "device", "reason"),
    [
        (SPECS, GPU, "needs a CPU, not cuda"),
        ([], CPU, "no layer of this model keeps K"),
        (LATENT, CPU, "latents"),
    ],
)
def test_refusals_name_the_flag_and_what_to_take(specs: list[AttentionSpec], device: torch.device, reason: str) -> None:
    for name in ("int8", "fp8_e5m2", "float16"):
        with pytest.raises(ModelLoadError, match=f"^--kv-cache-dtype {name}.*{reason}.*use auto"):
            resolve_kv_dtype(name, specs, torch.bfloat16, device, has_few_bits=False)
    for name in ("auto", "bfloat16"):
        assert resolve_kv_dtype(name, specs, torch.bfloat16, device, has_few_bits=False) == torch.bfloat16


@pytest.mark.parametrize(
    ("specs", "model", "device", "few", "expected"),
    [
        (SPECS, torch.float32, CPU, True, torch.bfloat16),
        (SPECS, torch.float32, CPU, False, torch.float32),
        (SPECS, torch.float16, CPU, True, torch.float16),
        (SPECS, torch.float32, GPU, True, torch.float32),
        (LATENT, torch.float32, CPU, True, torch.float32),
        ([], torch.float32, CPU, True, torch.float32),
    ],
)
def test_float32_beside_weights_in_few_bits_becomes_bfloat16(
    specs: list[AttentionSpec], model: torch.dtype, device: torch.device, few: bool, expected: torch.dtype
) -> None:
    assert resolve_kv_dtype("auto", specs, model, device, has_few_bits=few) == expected
    if specs and expected != torch.float32:
        assert resolve_kv_dtype("float32", specs, torch.float32, CPU, has_few_bits=few) == torch.float32


def test_description() -> None:
    text = describe_kv_dtype(kv_shapes(SPECS), torch.int8, torch.bfloat16)
    assert text.startswith("KV cache in int8: 544 bytes per token instead of 1024 in bfloat16") and "1.88 times" in text


def test_pool_planned_from_memory_holds_more_tokens() -> None:
    """As many bytes, and by their ratio more tokens."""
    plans = []
    for name in ("auto", "int8"):
        args = ModelArgs(model_path=str(TOY), device="cpu", dtype="float32", kv_cache_dtype=name)
        runner = ModelRunner(args, context_length=512, num_rows=2, page_size=16, max_total_tokens=0)
        plans.append((runner.max_total_tokens, runner.kv_pool.bytes_per_token))
    (plain, per_token), (more, fewer) = plans
    assert per_token / fewer == pytest.approx(3.56, abs=0.01)  # heads of 32 numbers: 128 / 36
    assert more / plain == pytest.approx(per_token / fewer, rel=0.01)


@pytest.mark.parametrize(("chosen", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_pool_beside_weights_in_few_bits(chosen: Any, expected: torch.dtype) -> None:
    args = ModelArgs(model_path=str(TOY), device="cpu", dtype="float32", quantization="int8", kv_cache_dtype=chosen)
    runner = ModelRunner(args, context_length=512, num_rows=2, page_size=16, max_total_tokens=1024)
    assert (runner.dtype, runner.kv_pool.dtype) == (torch.float32, expected)


def test_latents_are_refused_by_the_runner(tmp_path: Path) -> None:
    save_reference("deepseek_v3", tmp_path)
    args = ModelArgs(model_path=str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="int8")
    with pytest.raises(ModelLoadError, match="this model keeps latents"):
        ModelRunner(args, context_length=0, num_rows=1, page_size=1, max_total_tokens=64)
