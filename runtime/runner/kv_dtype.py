"""Which type the numbers of the KV pool have: that of the model, or another one that --kv-cache-dtype names.

By itself, a model with weights in few bits that is computed in float32 keeps K and V in bfloat16. They would take more
memory than the weights, each step reads them, and what is lost (KL 0.00004) is far less than by the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...attention.backend import AttentionSpec
from ...memory_pool.kv_pool import KVShape, kv_bytes_per_token
from ..checkpoint.model_files import ModelLoadError

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""By their names in --kv-cache-dtype."""


def resolve_kv_dtype(
    name: str, specs: Sequence[AttentionSpec], model_dtype: torch.dtype, device: torch.device, *, has_few_bits: bool
) -> torch.dtype:
    """The type of the KV pool. name: --kv-cache-dtype. specs: the model's attention layers. has_few_bits: some weights
    have. Raises ModelLoadError where this model cannot have such a pool on this device."""
    keeps_latents = any(spec.values_in_keys for spec in specs)
    if name == "auto":
        narrows = has_few_bits and device.type == "cpu" and model_dtype == torch.float32 and not keeps_latents
        return torch.bfloat16 if narrows and specs else model_dtype
    wanted = KV_DTYPES[name]
    if wanted == model_dtype:
        return wanted
    asked, model = f"--kv-cache-dtype {name}", str(model_dtype).removeprefix("torch.")
    if device.type != "cpu":
        raise ModelLoadError(
            f"{asked} needs a CPU, not {device}: no kernel for GPUs reads a scale for each token and head, "
            f"or another type than the model's ({model}); use auto"
        )
    if not specs:
        raise ModelLoadError(f"{asked}: no layer of this model keeps K and V; use auto")
    if keeps_latents:
        raise ModelLoadError(
            f"{asked}: this model keeps latents, which have no scale of their own for the rotated part; use auto, or "
            "--dtype bfloat16 for half the memory of float32"
        )
    return wanted


def describe_kv_dtype(shapes: Sequence[KVShape], kv_dtype: torch.dtype, model_dtype: torch.dtype) -> str:
    """One line for the log: what the type of the pool saves. shapes: of all its layers."""
    ours, theirs = (kv_bytes_per_token(shapes, dtype) for dtype in (kv_dtype, model_dtype))
    kind, model = (str(dtype).removeprefix("torch.") for dtype in (kv_dtype, model_dtype))
    return (
        f"KV cache in {kind}: {ours} bytes per token instead of {theirs} in {model}; it holds "
        f"{theirs / ours:.2f} times as many tokens in the same memory"
    )
