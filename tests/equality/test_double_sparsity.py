"""Sparse decodes in the engine: token for token as transformers with an attention function of the same definition, and
as transformers alone where the budget leaves nothing out, whatever happens to the KV."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.attention.double_sparse import Sparsity, is_sparse_layer
from baton.entrypoints.engine import Engine
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.double_sparsity import channel_key
from baton.runtime.runner.model_runner import ModelRunner
from benchmarks.models import checks
from benchmarks.models.checks import CHECKS, Scene, answers
from benchmarks.models.tiny import MODELS

pytestmark = pytest.mark.equality

CHANNELS, TOKENS, THRESHOLD = 3, 12, 40
SPARSE = "double_sparsity_by_definition"


class SparseScene(Scene):
    """A tiny model whose decodes are sparse, by random channels."""

    def __init__(self, name: str, folder: Path, *, tokens: int = TOKENS) -> None:
        (tiny,) = [model for model in MODELS if model.name == name]
        super().__init__(tiny, folder)
        with self.plain_runner() as runner:
            specs = runner._model.specs
        rng = random.Random(3)
        self.channels = {
            layer: [rng.sample(range(spec.head_dim), spec.head_dim) for _ in range(spec.num_kv_heads)]
            for layer, spec in enumerate(specs)
            if is_sparse_layer(spec)
        }
        self.file = folder / "channels.json"
        self.file.write_text(json.dumps({channel_key(layer, "qk"): found for layer, found in self.channels.items()}))
        self.tokens = tokens

    @contextmanager
    def plain_runner(self) -> Iterator[ModelRunner]:
        args = ModelArgs(model_path=str(self.folder), device="cpu", dtype="float32")
        yield ModelRunner(args, context_length=0, num_rows=1, page_size=1, max_total_tokens=64)

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        sparse = {
            "enable_double_sparsity": True,
            "ds_channel_config_path": str(self.file),
            "ds_heavy_channel_num": CHANNELS,
            "ds_heavy_token_num": self.tokens,
            "ds_sparse_decode_threshold": THRESHOLD,
        }
        with super().engine(**(sparse | settings)) as engine:
            yield engine

    def make_reference_sparse(self) -> None:
        """transformers computes decodes by the definition from now on."""
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
        from transformers.modeling_utils import AttentionInterface

        heavy = {layer: torch.tensor(found)[:, :CHANNELS] for layer, found in self.channels.items()}

        def attend(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **_):
            group = query.shape[1] // key.shape[1]
            scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            length = key.shape[2]
            channels = heavy.get(module.layer_idx)
            if query.shape[2] == 1 and channels is not None and length >= THRESHOLD and length > self.tokens:
                at = channels.repeat_interleave(group, 0)
                near_k = key.repeat_interleave(group, 1)[0].gather(2, at[:, None].expand(-1, length, -1))
                near = torch.einsum("hc,hnc->hn", query[0, :, 0].gather(1, at), near_k)
                near[:, -1] = float("inf")
                chosen = near.topk(self.tokens, dim=1).indices
                hidden = torch.full_like(near, float("-inf")).scatter(1, chosen, 0.0)
                scores = scores + hidden[None, :, None]
            elif attention_mask is not None:
                scores = scores + attention_mask[..., :length]
            sinks = getattr(module, "sinks", None)
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
            weights = scores.softmax(-1)[..., :length]
            return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

        AttentionInterface.register(SPARSE, attend)
        AttentionMaskInterface.register(SPARSE, eager_mask)
        self.reference.set_attn_implementation(SPARSE)


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("Llama 3.1 (rope llama3)", "auto"),
        ("Llama 3.1 (rope llama3)", "transformers"),
        ("Qwen 3", "auto"),
        ("Gemma 2", "auto"),
        ("gpt-oss", "auto"),
        ("Mixtral", "auto"),
    ],
)
def test_sparse_decodes_match_their_definition(name: str, impl: str, tmp_path: Path) -> None:
    """Batches and the cache, at both page sizes; with windows, caps, sinks, experts, and transformers' own code."""
    scene = SparseScene(name, tmp_path)
    scene.make_reference_sparse()
    for page_size in (1, 16):
        with scene.engine(page_size=page_size, model_impl=impl) as engine:
            for turn in ("computed", "cached"):
                for prompt, answer in zip(scene.prompts, answers(engine, scene.prompts), strict=True):
                    scene.compare(f"page {page_size}, {turn}, {len(prompt)} tokens", prompt, answer["output_ids"])


@pytest.mark.parametrize("backend", ["torch_native", "numba"])
def test_sparse_decodes_differ_from_full_ones(backend: str, tmp_path: Path) -> None:
    """Otherwise the other tests would compare nothing. Host and chunks of one token change nothing."""
    if backend == "numba":
        pytest.importorskip("numba")
    scene = SparseScene("Llama 3.1 (rope llama3)", tmp_path)
    (prompt,) = scene.prompts[-1:]
    full = scene.greedy(prompt)
    scene.make_reference_sparse()
    with scene.engine(attention_backend=backend, chunked_prefill_size=1) as engine:
        (answer,) = answers(engine, [prompt])
        scene.compare("chunks of one token", prompt, answer["output_ids"])
    assert answer["output_ids"] != full
    checks.check_host(scene, continued=False)


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("name", ["Llama 3.1 (rope llama3)", "Gemma 3 (text)"])
def test_a_budget_for_all_tokens_is_exact(
    name: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in another order go through handoffs, forks, retractions, beams, host and pages as others do. Sequences
    within the budget, which are attended in full otherwise, are sparse here."""
    monkeypatch.setattr(Sparsity, "least_length", property(lambda sparsity: sparsity.threshold))
    scene = SparseScene(name, tmp_path, tokens=10_000)
    CHECKS[column](scene)


@pytest.mark.parametrize("column", ["page 1", "handoff"])
def test_layers_that_share_keys(column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are put in order once in a step, and the queries of both."""
    monkeypatch.setattr(Sparsity, "least_length", property(lambda sparsity: sparsity.threshold))
    CHECKS[column](SparseScene("Gemma 4, shared KV", tmp_path, tokens=10_000))


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    scene = SparseScene("Llama 3.1 (rope llama3)", tmp_path)
    good = json.loads(scene.file.read_text())
    name = channel_key(1, "qk")
    for content, reason in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        (json.dumps({key: value for key, value in good.items() if key != name}), "has no model.layers.1"),
        (json.dumps(good | {name: good[name][:1]}), "a list for each of the"),
        (json.dumps(good | {name: [[0, 0, 1], [0, 1, 2]]}), "head 0"),
        (json.dumps(good | {name: [[0, 1, 2], [0, 1, 1 << 40]]}), "head 1"),
        (json.dumps(good | {name: [[0, 1, 2], [0, 1, True]]}), "head 1"),
        (json.dumps(good | {name: [[0, 1, 2], [0, 1]]}), "head 1"),
        (json.dumps(good | {name: [[0, 1, 2], [0, 1, 2, 8]]}), "head 1"),
        (json.dumps(good | {name: [[0, 1, 2, 2], [0, 1, 2]]}), "head 0"),
        (json.dumps(good | {channel_key(3, "k"): good[name]}), "layer 3, but this model has only 3"),
    ):
        scene.file.write_text(content)
        with pytest.raises(ModelLoadError, match=reason), scene.engine():
            pass
    scene.file.write_text(json.dumps(good))
    with pytest.raises(ModelLoadError, match="keys have 8 channels"), scene.engine(ds_heavy_channel_num=9):
        pass


def test_models_without_whole_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="latents"):
        (tiny,) = [model for model in MODELS if model.name == "DeepSeek V3, Kimi K2"]
        scene = Scene(tiny, tmp_path)
        (tmp_path / "channels.json").write_text("{}")
        flags = {"enable_double_sparsity": True, "ds_channel_config_path": str(tmp_path / "channels.json")}
        with scene.engine(**flags):
            pass
