"""A model on a device: loads it, owns the KV pool and the device mirror of req_to_token, computes steps.

    ScheduleBatch ─▶ build_forward_batch ─▶ KV copies ─▶ attention.plan ─▶ decoder ─▶ ForwardOutput
                     (row changes, upload)

Knows nothing of requests, sampling or text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..attention.backend import AttentionBackend
from ..attention.torch_native import TorchNativeBackend
from ..memory_pool.kv_pool import MHAKVPool, kv_bytes_per_token
from ..scheduler.batch import ScheduleBatch
from .config import ModelArgs
from .forward_batch import build_forward_batch
from .hf_config import ModelConfig, load_model_config
from .layers.ops import TORCH_OPS
from .memory_sizing import available_memory, pool_tokens
from .model_files import ModelLoadError, resolve_model_folder
from .models.decoder import Decoder
from .step_profile import StepProfiler
from .weights import fill_dummy, load_weights

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ForwardOutput:
    """What a step computed."""

    logits: torch.Tensor
    """float32 [num_sampling_rows, vocab_size]: the batch rows where batch.samples, in order."""
    logprob_hidden: torch.Tensor | None
    """[n, hidden_size]: hidden states of the new tokens at or behind their row's logprob_start, concatenated in row
    order; `ModelRunner.compute_logits` turns them into logits. None where no row asks."""


class ModelRunner:
    """Runs forward steps of one model on one device. Not thread-safe: one step at a time."""

    def __init__(
        self, args: ModelArgs, *, context_length: int, num_rows: int, page_size: int, max_total_tokens: int
    ) -> None:
        """context_length: 0 takes the model's. num_rows: rows of req_to_token. max_total_tokens: 0 sizes the pool
        from memory. Raises ModelLoadError (a ValueError) with what to change."""
        self.device = _device(args.device)
        self.profiler = StepProfiler(self.device)
        folder = resolve_model_folder(args.model_path)
        self.config: ModelConfig = load_model_config(folder, context_length=context_length)
        self.dtype = _dtype(args.dtype, self.config, self.device)
        available = available_memory(self.device)
        with torch.inference_mode():
            self._model = Decoder(self.config, TORCH_OPS, dtype=self.dtype, device=self.device)
            views = self._model.checkpoint_views()
            if args.load_format == "dummy":
                fill_dummy(views)
            else:
                load_weights(views, folder)
            weight_bytes = sum(view.numel() * view.itemsize for view in views.values())
            shape = {
                "num_layers": self.config.num_layers,
                "num_kv_heads": self.config.num_kv_heads,
                "head_dim": self.config.head_dim,
                "dtype": self.dtype,
            }
            self.max_total_tokens = pool_tokens(
                requested=max_total_tokens,
                available=available,
                mem_fraction=args.mem_fraction_static,
                weight_bytes=weight_bytes,
                bytes_per_token=kv_bytes_per_token(**shape),
                page_size=page_size,
                context_length=self.config.context_length,
                is_cpu=self.device.type == "cpu",
            )
            self.kv_pool = MHAKVPool(num_tokens=self.max_total_tokens, page_size=page_size, device=self.device, **shape)
            self.req_to_token = torch.zeros(num_rows, self.config.context_length, dtype=torch.int32, device=self.device)
        self.attention: AttentionBackend = TorchNativeBackend(self.kv_pool)
        logger.info(
            "%s on %s, %s: weights %.2f GiB; %s",
            self.config.architecture,
            self.device,
            str(self.dtype).removeprefix("torch."),
            weight_bytes / 2**30,
            self.kv_pool.describe(),
        )

    @torch.inference_mode()
    def forward(self, batch: ScheduleBatch, previous_ids: torch.Tensor | None = None) -> ForwardOutput:
        """Compute one step: the K and V of the new tokens go to the pool, logits come back.

        previous_ids: device int64 [rows of the step before], what that sampled, for input ids that stand for it.
        """
        forward_batch = build_forward_batch(batch, self.req_to_token, previous_ids)
        if forward_batch.copies is not None:
            self.kv_pool.copy(*forward_batch.copies)
        self.attention.plan(forward_batch.attention)
        self.profiler.lap("plan")
        hidden = self._model(forward_batch.inputs, self.kv_pool, self.attention)
        wanted = forward_batch.logprob_indices
        return ForwardOutput(
            logits=self._model.compute_logits(hidden.index_select(0, forward_batch.sample_indices)),
            logprob_hidden=None if wanted is None else hidden.index_select(0, wanted),
        )

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] of a ForwardOutput -> float32 [n, vocab_size]."""
        return self._model.compute_logits(hidden)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("--device cuda, but this torch sees no CUDA device; use --device cpu")
    return torch.device(name)


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Half precision is several times slower than float32 on most CPUs.
        name = "float32" if device.type == "cpu" else config.dtype
    return getattr(torch, name)
