"""What a model keeps of a sequence, by the code of the server: recurrent states, and K and V of layers with a sliding
window, which have a pool of their own. Imports torch, but allocates nothing."""

from __future__ import annotations

import torch

from ...attention.backend import kv_shapes
from ...attention.windowed import window_layers
from ...memory_pool.kv_pool import kv_bytes_per_token
from ...memory_pool.state_pool import state_bytes
from ...runtime.layers.states.torch_states import TORCH_STATES
from ...runtime.model_config import Mixer, ModelConfig
from ...runtime.models.decoder import attention_specs, recurrent_mixer
from .model_size import ModelSize


def served_size(config: ModelConfig) -> ModelSize:
    """In the checkpoint's dtype. Raises ValueError or RuntimeError for sizes that no layer can have."""
    dtype = getattr(torch, config.dtype)
    specs, where = attention_specs(config), {"dtype": dtype, "device": torch.device("meta")}
    shapes = kv_shapes(specs)
    recurrent = [
        layer for layer in range(config.num_layers) if config.traits.mixer(layer) in (Mixer.RECURRENT, Mixer.BOTH)
    ]
    states = [recurrent_mixer(config, layer, TORCH_STATES, **where).state_shape for layer in range(len(recurrent))]
    window, of_windows = window_layers(specs)
    if any(spec.reach.most is not None and spec.reach.most < 1 for spec in specs):
        raise ValueError("a sliding window or chunk has less than one token")
    if states or any(spec.values_in_keys for spec in specs):
        window, of_windows = 0, frozenset()
    return ModelSize(
        bytes_per_token=kv_bytes_per_token(shapes, dtype),
        bytes_per_state=state_bytes(states),
        window=window,
        bytes_per_window_token=kv_bytes_per_token([shapes[layer] for layer in sorted(of_windows)], dtype),
        context_length=config.context_length,
    )
