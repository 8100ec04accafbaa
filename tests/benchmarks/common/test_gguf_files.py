"""GGUF files that benchmarks write: their types, their numbers, and their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.gguf_files import TYPES, find_ggml, has_more_bits, side_by_side, tensor_type, write_gguf
from benchmarks.common.models import LLAMA_TINY, QWEN2_500M, save_random_model, write_tokenizer

gguf = pytest.importorskip("gguf")
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
TINY_QWEN2 = QWEN2_500M | {name: LLAMA_TINY[name] for name in LLAMA_TINY if name != "tie_word_embeddings"}


@pytest.mark.parametrize("shape", [LLAMA_TINY, TINY_QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_numbers_are_those_of_the_folder(tmp_path: Path, shape: dict[str, object], kind: str) -> None:
    from safetensors.numpy import load_file

    save_random_model(tmp_path, shape | SPECIAL)
    write_tokenizer(tmp_path, 512)
    write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    ours = load_file(tmp_path / "model.safetensors")
    assert len(read.tensors) == len(ours)
    found = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in read.tensors}
    down = ours["model.layers.1.mlp.down_proj.weight"]
    step = {"F32": 0, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}[kind] * np.abs(down).max()
    np.testing.assert_allclose(found["blk.1.ffn_down.weight"], down, rtol=0, atol=step)
    heads = LLAMA_TINY["num_attention_heads"] if shape is LLAMA_TINY else 0
    wanted = ours["model.layers.0.self_attn.q_proj.weight"]
    if heads:
        assert not np.array_equal(wanted, side_by_side(wanted, heads))
        wanted = side_by_side(wanted, heads)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], wanted, rtol=0, atol=step * 2)
    types = {tensor.name: tensor.tensor_type.name for tensor in read.tensors}
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("Q8_0" if kind == "Q4_0" else kind)
    words = read.fields["tokenizer.ggml.tokens"].contents()
    assert (words[65], words[130], len(words)) == ("A", "<00130>", 512)


def test_rotated_pairs_come_side_by_side() -> None:
    rows = np.arange(16.0).reshape(16, 1)  # two heads of 8
    assert side_by_side(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_mixture_of_q4_k_m() -> None:
    def kind(name: str, into: int = 4864) -> str:
        return tensor_type("Q4_K_M", f"{name}.weight", (896, into), 24)

    assert [layer for layer in range(24) if has_more_bits(layer, 24)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert (kind("blk.0.ffn_down"), kind("blk.3.ffn_down"), kind("blk.0.ffn_up")) == ("Q6_K", "Q4_K", "Q4_K")
    assert (kind("blk.0.attn_v", 896), kind("blk.3.attn_v", 896), kind("token_embd", 896)) == ("Q8_0", "Q5_0", "Q8_0")
    assert tensor_type("Q4_K_M", "blk.0.attn_q.bias", (896,), 24) == "F32"
    assert set(TYPES) > {"Q4_K_M"}


def test_without_ggml_the_k_types_are_refused(tmp_path: Path) -> None:
    assert find_ggml(str(tmp_path / "bin" / "python")) is None
    save_random_model(tmp_path, LLAMA_TINY | SPECIAL)
    write_tokenizer(tmp_path, 512)
    with pytest.raises(ValueError, match="numbers of type Q5_0 need ggml: name an environment with xllamacpp"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "Q4_K_M")
