"""The checkpoint of gpt-oss as it is released, with experts in MXFP4, against transformers on the same numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.runtime.config import ModelArgs
from baton.runtime.models.decoder import Decoder, SparseMLP
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import MODELS, make_reference

pytestmark = pytest.mark.equality


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_experts_of_gpt_oss(tmp_path, backend):
    """Its release has two tensors for the weights of all experts of a layer; transformers widens them. So does torch's
    backend; kernels multiply them as they are, by inputs that are rounded to 8 bits."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    name, changes = MODELS["gpt_oss"]
    reference = make_reference(name, changes | {"hidden_size": 64, "intermediate_size": 32})
    reference.save_pretrained(tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    packed = {}
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, into, out = tensors.pop(key).shape
        blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (experts, out, into // 32), dtype=torch.uint8, generator=generator)
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        with torch.no_grad():
            reference.get_parameter(key).copy_(convert_moe_packed_tensors(blocks.clone(), scales.clone()))
    assert len(packed) == 2 * 2 * 3
    save_file(tensors | packed, tmp_path / "folder" / "model.safetensors")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    args = ModelArgs(
        model_path=str(tmp_path / "folder"),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        linear_backend=backend,
    )
    runner = ModelRunner(args, context_length=0, num_rows=4, page_size=1, max_total_tokens=1024)
    assert isinstance(runner._model, Decoder)
    mlps = [layer.mlp for layer in runner._model.layers if isinstance(layer.mlp, SparseMLP)]
    experts = [linear for mlp in mlps for linear in (*mlp.experts.gate_up, *mlp.experts.down)]
    assert experts and all((linear.packed is not None) == (backend == "auto") for linear in experts)
    driver = ModelDriver(runner, seed=1)
    sequence = driver.open(np.random.default_rng(2).integers(0, 131, 60))
    found = driver.step([(sequence, 60)]).logits[0]
    with torch.no_grad():
        expected = reference(torch.from_numpy(sequence.ids.astype(np.int64))[None]).logits[0, -1]
    allowed = 1e-4 if backend == "torch" else 0.06 * float(expected.std())
    torch.testing.assert_close(found, expected, atol=allowed, rtol=1e-4)
