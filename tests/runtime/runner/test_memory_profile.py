"""The step that a GPU's memory is planned by, run on a CPU: it fits its pool, and makes workspaces grow for graphs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from baton.attention.flashinfer import kernel
from baton.attention.flashinfer.backend import FlashInferBackend
from baton.attention.flashinfer.kv_indices import build_kv_indices
from baton.memory_pool.kv_pool import MHAKVPool
from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.checkpoint.weights import fill_dummy
from baton.runtime.config import ModelArgs
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.models.decoder import Decoder
from baton.runtime.runner import model_runner
from baton.runtime.runner.device_backends import TORCH_BACKENDS, DeviceBackends
from baton.runtime.runner.graph_catalog import GraphCatalog
from baton.runtime.runner.memory_profile import run_largest_step
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.cpu_graphs import graph_backends
from tests.doubles.fake_flashinfer import FakeFlashInfer

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SHAPES = GraphCatalog(max_sequences=100, max_tokens=128, group=2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tokens, rows", [(100, 7), (20, 90)], ids=str)
def test_the_largest_step(folder, monkeypatch, page_size, tokens, rows):
    """A prefill may be shorter than the largest graph, and than the rows that are sampled."""
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    config = load_model_config(folder, context_length=0)
    model = Decoder(config, TORCH_OPS, dtype=torch.float32, device=CPU)
    fill_dummy(model.checkpoint_views())
    made: list[FlashInferBackend] = []

    def attention(pool, specs):
        library = FakeFlashInfer(workspace_per_row=20).library
        made.append(FlashInferBackend(pool, specs, library, build_kv_indices, max_graph_pages=4096))
        return made[0]

    for backends, shapes in (
        (TORCH_BACKENDS, []),
        (DeviceBackends(TORCH_OPS, attention, None), SHAPES.largest_of_each_kind),
    ):
        pool = MHAKVPool(
            num_tokens=-(-tokens // page_size) * page_size,
            page_size=page_size,
            num_layers=2,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=CPU,
        )
        run_largest_step(model, backends, pool, tokens=tokens, rows=rows, shapes=shapes)
        assert all(k[page_size : page_size + tokens].any(dim=(1, 2)).all() for k in pool.k), "every token has its slot"
    assert len(made[0]._arena.workspace) >= 128 * 20, "as the largest graph needs it"


def test_what_it_takes_goes_off_the_pool(folder, monkeypatch):
    """As on a GPU: the step is really run, and its pool is not counted."""
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    taken = 5_000_000

    def profiled(device, run) -> int:
        run()
        return taken

    monkeypatch.setattr(model_runner, "profiled_bytes", profiled)
    plans = []
    plan_memory = model_runner.plan_memory

    def plan(*args, **kwargs):
        plans.append(kwargs)
        return plan_memory(*args, **kwargs)

    monkeypatch.setattr(model_runner, "plan_memory", plan)
    args = ModelArgs(model_path=str(folder), load_format="dummy", device="cpu")
    ModelRunner(
        args,
        context_length=0,
        num_rows=4,
        page_size=16,
        max_total_tokens=512,
        chunked_prefill_size=100,
        backends=graph_backends(),
    )
    (plan_of,) = plans
    per_token = 2 * 2 * 2 * 8 * 4
    assert plan_of["bytes_per_token"] == per_token
    assert plan_of["activation_bytes"] == taken - (112 + 16) * per_token, "seven pages, and one of padding"
    assert plan_of["graph_bytes"] > 0
