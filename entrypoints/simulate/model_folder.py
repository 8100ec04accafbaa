"""The sizes of a model from its config.json, as the server reads it and computes them: the decoder is built without
memory for its weights. Imports torch, so it is itself imported only where a folder is given."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from ...attention.backend import AttentionSpec, kv_shapes
from ...attention.windowed import window_layers
from ...memory_pool.kv_pool import kv_bytes_per_token
from ...memory_pool.state_pool import state_bytes
from ...runtime.checkpoint.hf_config import load_model_config
from ...runtime.checkpoint.model_files import ModelLoadError, UnsupportedModelError
from ...runtime.layers.ops import TORCH_OPS
from ...runtime.models.decoder import Decoder
from .cost_model import CostError, ModelSizes


def read_model_sizes(path: Path) -> ModelSizes:
    """path: a folder of Hugging Face's form, which needs no weights, or its config.json. Raises CostError."""
    folder = path.parent if path.name == "config.json" else path
    try:
        config = load_model_config(folder)
    except UnsupportedModelError as error:
        raise CostError(
            f"--model {path}: only models that Baton's own code computes are sized by their config.json: {error}"
        ) from None
    except (ModelLoadError, OSError) as error:
        raise CostError(f"--model {path}: {error}") from None
    dtype = getattr(torch, config.dtype)
    decoder = Decoder(config, TORCH_OPS, dtype=dtype, device=torch.device("meta"))
    numbers = {name: prod(view.shape) for name, view in decoder.checkpoint_views().items()}
    experts = sum(count for name, count in numbers.items() if ".experts." in name)
    head = config.vocab_size * config.hidden_size if decoder.lm_head is not None else 0
    body = sum(count for name, count in numbers.items() if ".layers." in name) - experts
    traits, specs, states = config.traits, decoder.specs, state_bytes(decoder.state_shapes)
    share = traits.experts.top_k / traits.experts.num_experts if traits.experts is not None else 0.0
    window, layers = window_layers(specs)
    if states or any(spec.values_in_keys for spec in specs):
        window, layers = 0, frozenset[int]()  # all layers share one pool
    shapes = enumerate(kv_shapes(specs))
    window_bytes = kv_bytes_per_token([shape for layer, shape in shapes if layer in layers], dtype)
    return ModelSizes(
        name=folder.resolve().name,
        layers=config.num_layers,
        body_parameters=body + int(share * experts),
        head_parameters=head,
        weight_bytes=decoder.weight_bytes,
        read_bytes=dtype.itemsize * (body + head),
        expert_bytes=dtype.itemsize * experts,
        expert_share=share,
        pair_products=sum(_products(spec) for spec in specs if spec.layer_id not in layers),
        bytes_per_token=kv_bytes_per_token(kv_shapes(specs), dtype) - window_bytes,
        window=window,
        window_pair_products=sum(_products(spec) for spec in specs if spec.layer_id in layers),
        bytes_per_window_token=window_bytes,
        bytes_per_state=states,
        has_latents=any(spec.values_in_keys for spec in specs),
    )


def _products(spec: AttentionSpec) -> int:
    """Products of a layer for each pair of a new token and a token that it attends to."""
    return spec.num_heads * (spec.head_dim + spec.value_size)
