"""Models of each architecture as GGUF files: config, names, the order of outputs, and numbers, against transformers on
the folder that the file was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="gguf is in the extra [dev]")

import gguf

from baton.entrypoints.engine import Engine
from baton.runtime.checkpoint.folder_check import check_folder
from baton.runtime.checkpoint.model_files import resolve_model_folder
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.gguf_checkpoints import save_folder, write_gguf
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import LLAMA3_ROPE, LONGROPE, MODELS, YARN, make_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
F32 = gguf.GGMLQuantizationType.F32
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32", "linear_backend": "torch"}
"""Settings of an engine that rounds nothing but the weights."""

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama, tied, one KV head": ("llama", "Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases": ("llama", "Llama", {"attention_bias": True}),
    "llama 3.1 rope": ("llama", "Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", *MODELS["llama, linear rope"]),
    "llama, yarn": ("llama", "Llama", {"rope_parameters": YARN}),
    "mistral": ("llama", "Mistral", {"sliding_window": None, "head_dim": 12}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "sliding_window": None,
        },
    ),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 16}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", *MODELS["gemma"]),
    "gemma2": ("gemma2", "Gemma2", MODELS["gemma2"][1] | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        "Gemma3Text",
        MODELS["gemma3"][1] | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    ),
    "phi3": ("phi3", *MODELS["phi3"]),
    "phi4": ("phi3", *MODELS["phi4, longrope of a part"]),
    "olmo2": ("olmo2", *MODELS["olmo2"]),
    "granite": ("granite", "Granite", MODELS["granite"][1] | {"mlp_bias": False}),
    "smollm3": ("smollm3", "SmolLM3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "lfm2": ("lfm2", *MODELS["lfm2"]),
}
"""Architecture of the file, then as in tiny_models."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rope_tensors(name: str, reference: Any) -> dict[str, np.ndarray]:
    """As the converter stores scaled frequencies: what they are divided by."""
    if name == "llama 3.1 rope":
        size = reference.model.rotary_emb.inv_freq.numel()
        plain = LLAMA3_ROPE["rope_theta"] ** -(torch.arange(size).double() / size)
        return {"rope_freqs.weight": (plain / reference.model.rotary_emb.inv_freq.double()).float().numpy()}
    if name == "phi4":
        tables = {f"rope_factors_{kind}.weight": LONGROPE[f"{kind}_factor"] for kind in ("long", "short")}
        return {name: np.array(table, np.float32) for name, table in tables.items()}
    return {}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_each_architecture(name, tmp_path):
    architecture, kind, changes = CASES[name]
    reference = make_reference(kind, changes)
    reference.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "folder", tmp_path / "m.gguf", architecture, extra=rope_tensors(name, reference))
    folder = resolve_model_folder(str(tmp_path / "m.gguf"))
    check_folder(folder, ModelArgs())
    args = ModelArgs(model_path=str(tmp_path / "m.gguf"), **EXACT)
    driver = ModelDriver(ModelRunner(args, context_length=0, num_rows=4, page_size=1, max_total_tokens=1024), seed=1)
    sequence = driver.open(np.random.default_rng(2).integers(0, 131, 60))
    for count in (50, 1, 9):
        output = driver.step([(sequence, count)])
        with torch.no_grad():
            expected = reference(torch.from_numpy(sequence.ids[: sequence.computed].astype(np.int64))[None]).logits
        torch.testing.assert_close(output.logits[0], expected[0, -1], atol=1e-4, rtol=1e-4)


def served_tokens(model: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    options = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    with Engine(model_path=str(model), max_total_tokens=2048, **EXACT) as engine:
        return [engine.generate(input_ids=ids, sampling_params=options)["output_ids"] for ids in prompts]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "MXFP4"])
def test_toy_model_in_each_type(kind, tmp_path):
    """Greedy tokens are those of transformers on the dequantised numbers; blocks of the embedding, too."""
    from transformers import AutoModelForCausalLM

    chosen = gguf.GGMLQuantizationType[kind]
    tokenizer = toy_tokenizer()

    def kinds(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        return chosen if len(shape) > 1 else F32

    numbers = write_gguf(TOY, tmp_path / "toy.gguf", "llama", metadata=tokenizer, kinds=kinds)
    save_folder(tmp_path / "widened", numbers, json.loads((TOY / "config.json").read_text()))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "widened", dtype=torch.float32)
    prompts = [[5, 17, 300, 41, 9, 1001, 3], [1699, 88, 12, 12, 700, 60, 61, 62, 63, 1204, 15]]
    for prompt, tokens in zip(prompts, served_tokens(tmp_path / "toy.gguf", prompts, 16), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen_logits = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == 16 and bool((logits.amax(dim=1) - chosen_logits < 1e-4).all()), tokens


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "Q8_0"), ("mixtral", "Q4_0"), ("lfm2", "Q5_1")])
def test_experts_and_convolutions_in_few_bits(name, kind, tmp_path):
    """The blocks of each expert are its own; convolutions stay plain, as converters leave them."""
    architecture, model, changes = CASES[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "block_multiple_of": 32}
    if name == "qwen3moe":
        sizes |= {"moe_intermediate_size": 32, "head_dim": 16}
    reference = make_reference(model, changes | sizes)
    reference.save_pretrained(tmp_path / "folder")
    chosen = gguf.GGMLQuantizationType[kind]

    def kinds(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        return F32 if len(shape) == 1 or "ffn_gate_inp" in name or "shortconv.conv" in name else chosen

    numbers = write_gguf(tmp_path / "folder", tmp_path / "m.gguf", architecture, kinds=kinds)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    save_folder(tmp_path / "widened", numbers, config)
    widened = type(reference).from_pretrained(tmp_path / "widened", dtype=torch.float32).eval()
    args = ModelArgs(model_path=str(tmp_path / "m.gguf"), **EXACT)
    driver = ModelDriver(ModelRunner(args, context_length=0, num_rows=4, page_size=1, max_total_tokens=1024), seed=1)
    sequence = driver.open(np.random.default_rng(2).integers(0, 131, 60))
    found = driver.step([(sequence, 60)]).logits[0]
    with torch.no_grad():
        expected = widened(torch.from_numpy(sequence.ids.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_mixture_of_k_quants(tmp_path):
    """As in files Q4_K_M: most weights in Q4_K, some in Q5_K and Q6_K, norms in F32. Rounded products of scales move
    logits by a part of what quantising has moved them."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "initializer_range": 0.06}
    reference = make_reference("Llama", wide | {"num_key_value_heads": 4, "num_hidden_layers": 2})
    reference.save_pretrained(tmp_path / "folder")

    def kinds(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        if len(shape) == 1:
            return F32
        rare = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "output": "Q6_K"}
        return gguf.GGMLQuantizationType[rare.get(name.split(".")[-2], "Q4_K")]

    numbers = write_gguf(tmp_path / "folder", tmp_path / "m.gguf", "llama", kinds=kinds)
    args = ModelArgs(model_path=str(tmp_path / "m.gguf"), **EXACT)
    driver = ModelDriver(ModelRunner(args, context_length=0, num_rows=4, page_size=1, max_total_tokens=1024), seed=1)
    sequence = driver.open(np.random.default_rng(2).integers(0, 131, 60))
    found = driver.step([(sequence, 60)]).logits[0]
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    with torch.no_grad():
        plain = reference(ids).logits[0, -1]
        reference.load_state_dict(numbers, strict=False)
        expected = reference(ids).logits[0, -1]
    assert float((found - expected).abs().max()) < 0.05 * float((plain - expected).abs().max())


def toy_tokenizer() -> dict[str, Any]:
    """The metadata of the toy model's tokenizer."""
    raw = json.loads((TOY / "tokenizer.json").read_text())
    vocabulary = dict(raw["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    size = json.loads((TOY / "config.json").read_text())["vocab_size"]
    by_id = {index: token for token, index in vocabulary.items()}
    special = {token["id"] for token in raw["added_tokens"] if token["special"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    return {
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [3 if index in special else 1 if index in by_id else 5 for index in range(size)],
        "tokenizer.ggml.merges": merges,
    }
