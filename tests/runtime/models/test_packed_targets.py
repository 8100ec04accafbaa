"""Adapters of models with weights in few bits: they update the same outputs of the same layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.checkpoint.weights import load_weights
from baton.runtime.layers.low_rank import Target
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.layers.quantized_weights import INT8
from baton.runtime.models.decoder import Decoder
from tests.doubles.tiny_models import save_reference

pytestmark = pytest.mark.equality


def described(target: Target) -> tuple[int, int, list[tuple[str, list[int] | None]]]:
    """Layer, size and places, comparable."""
    parts = [(str(where), None if order is None else order.tolist()) for where, order in target.parts]
    return target.layer, target.size, parts


@pytest.mark.parametrize("name", ["llama, biases", "glm4", "qwen3_5"])
def test_adapter_targets_do_not_depend_on_the_form_of_weights(tmp_path: Path, name: str) -> None:
    save_reference(name, tmp_path)
    config = load_model_config(tmp_path)
    found = []
    for packs in (False, True):
        model = Decoder(config, TORCH_OPS, dtype=torch.float32, device=torch.device("cpu"))
        if packs:
            model.keep_packed(INT8, has_stored_rows=True)
        load_weights(model.checkpoint_views(), tmp_path)
        model.finish_loading()
        found.append({module: described(target) for module, target in model.adapter_targets().items()})
    assert found[0] == found[1] and len(found[0]) > 10
