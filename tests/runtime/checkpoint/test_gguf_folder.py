"""The folder that stands for a GGUF file: when it is made and made again, and files whose metadata cannot be right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="gguf is in the extra [dev]")

import gguf
import numpy as np
import torch

from baton.runtime.checkpoint.folder_check import check_folder
from baton.runtime.checkpoint.gguf_folder import MARK
from baton.runtime.checkpoint.hf_config import load_model_config, load_sampling_defaults
from baton.runtime.checkpoint.model_files import ModelLoadError, resolve_model_folder
from baton.runtime.checkpoint.weight_source import open_source
from baton.runtime.checkpoint.weights import load_weights, mapped_tensor
from baton.runtime.config import ModelArgs
from baton.runtime.text.tokenizer import Tokenizer, TokenizerError
from baton.runtime.tier_setup import model_fingerprint
from tests.doubles.gguf_checkpoints import config_metadata, finish, save_folder, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
    "input_layernorm": (64,), "post_attention_layernorm": (64,),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "folder"
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 64), "model.norm.weight": torch.randn(64)}
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.randn(size) for name, size in SIZES.items()}
    save_folder(folder, tensors, CONFIG)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "gguf"


def write(plain: Path, file: Path, **options: Any) -> Path:
    write_gguf(plain, file, "llama", **options)
    return file


def test_a_file_becomes_a_folder_once(plain, tmp_path, cache):
    file = write(plain, tmp_path / "m.gguf")
    folder = resolve_model_folder(str(file))
    assert folder.parent == cache and (folder / MARK).read_text().strip() == str(file)
    made = (folder / "config.json").stat()
    assert resolve_model_folder(str(file)) == folder and resolve_model_folder(str(folder)) == folder
    assert (folder / "config.json").stat() == made and [each.name for each in cache.iterdir()] == [folder.name]
    config = load_model_config(folder)
    assert (config.vocab_size, config.num_layers, config.num_kv_heads, config.context_length) == (64, 2, 2, 128)
    check_folder(folder, ModelArgs())
    os.utime(file, (1, 1))
    assert resolve_model_folder(str(file)) != folder, "the file has changed"


def test_only_own_code_computes_gguf_files(plain, tmp_path):
    folder = resolve_model_folder(str(write(plain, tmp_path / "m.gguf")))
    with pytest.raises(ModelLoadError, match="computed by Baton's own code; leave --model-impl out"):
        check_folder(folder, ModelArgs(model_impl="transformers"))


def test_a_folder_with_one_file_stands_for_it(plain, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    file = write(plain, models / "M-Q8_0.GGUF")
    (models / "README.md").write_text("")
    (models / "mmproj-model.gguf").write_bytes(b"the encoder of pictures")
    folder = resolve_model_folder(str(models))
    assert folder == resolve_model_folder(str(file))
    (models / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"holds several GGUF files \(M-Q8_0\.GGUF, other\.gguf\); give the path"):
        resolve_model_folder(str(models))
    (models / "model.safetensors").write_bytes(b"")
    assert resolve_model_folder(str(models)) == models


def test_http_process_makes_the_folder_without_torch(plain, tmp_path):
    file = write(plain, tmp_path / "m.gguf")
    code = (
        "import sys; from baton.runtime.checkpoint.model_files import resolve_model_folder as r; "
        "from baton.runtime.checkpoint.folder_check import check_folder; from baton.runtime.config import ModelArgs; "
        f"check_folder(r({str(file)!r}), ModelArgs()); "
        "assert not {'torch', 'gguf', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_servers_make_it_at_once(plain, tmp_path, cache):
    file = write(plain, tmp_path / "m.gguf")
    code = f"from baton.runtime.checkpoint.model_files import resolve_model_folder as r; print(r({str(file)!r}))"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert all(child.returncode == 0 for child in children) and len(outputs) == 1
    assert len(list(cache.iterdir())) == 1


def test_unwritable_cache_is_explained(plain, tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .*set XDG_CACHE_HOME to a folder that can be written"):
        resolve_model_folder(str(write(plain, tmp_path / "m.gguf")))


def test_fingerprints_of_kv_differ(plain, tmp_path):
    """KV on disk is shared by equal weights only."""
    found = set()
    for number, kind in enumerate(("F32", "F16")):
        chosen = gguf.GGMLQuantizationType[kind]
        folder = resolve_model_folder(str(write(plain, tmp_path / f"{number}.gguf", kinds=lambda *_, k=chosen: k)))
        found.add(model_fingerprint(folder, load_model_config(folder)))
    assert len(found) == 2


def test_plain_tensors_are_mapped(plain, tmp_path):
    folder = resolve_model_folder(str(write(plain, tmp_path / "m.gguf")))
    embedding = mapped_tensor(folder, "model.embed_tokens.weight")
    assert embedding is not None and embedding.shape == (64, 64)
    embedding[0] = 7  # pages of one's own: the file stays as it is
    again = mapped_tensor(folder, "model.embed_tokens.weight")
    assert again is not None and not torch.equal(again[0], embedding[0])


def test_a_file_that_becomes_shorter_is_noticed(plain, tmp_path):
    file = write(plain, tmp_path / "m.gguf")
    source = open_source(resolve_model_folder(str(file)))
    with file.open("r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(ModelLoadError, match=r"become shorter since its header was read"):
        source.read("model.layers.1.mlp.down_proj.weight")


def test_end_tokens_and_sampling_are_those_of_the_file(plain, tmp_path):
    tokens = [*(chr(300 + i) for i in range(61)), "<|im_end|>", "<|endoftext|>", chr(300) + chr(301)]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 61 + [3, 3, 1],
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
        "tokenizer.ggml.eos_token_id": 62,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    folder = resolve_model_folder(str(write(plain, tmp_path / "m.gguf", metadata=metadata)))
    assert load_model_config(folder).eos_token_ids == (62, 61)
    assert load_sampling_defaults(folder) == {"temperature": 0.7, "top_k": 20}
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
    assert tokenizer.special_tokens == {"eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("extra", ["{0} {0}", "{0} y", "x {0}", "{0}{1} {2}"])
def test_merges_without_tokens_are_left_out(plain, tmp_path, caplog, extra):
    tokens = [*(chr(300 + i) for i in range(63)), chr(300) + chr(301)]
    merges = [f"{tokens[0]} {tokens[1]}", extra.format(*tokens)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    folder = resolve_model_folder(str(write(plain, tmp_path / "m.gguf", metadata=metadata)))
    assert "1 of 2 merges are left out: their tokens are not there" in caplog.text
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["merges"] == [[tokens[0], tokens[1]]]


A = "llama."


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3, "split.no": 1}, r"is part 2 of 3 of a model\. .*llama-gguf-split --merge"),
        ({"general.type": "adapter"}, r"no model but 'adapter'"),
        ({A + "block_count": 3}, r"declare 3 layers, and the file holds 2"),
        ({A + "block_count": 2**31 - 1}, r"block_count is 2147483647, which is no sensible count"),
        ({A + "block_count": None}, r"has no llama\.block_count"),
        ({A + "embedding_length": 32}, r"embedding_length is 32, but token_embd\.weight has 64 columns"),
        ({A + "feed_forward_length": 10**8}, r"blk\.\d\.ffn_down\.weight has shape \[64, 96\], the metadata ask for"),
        ({A + "attention.head_count": 0}, r"attention\.head_count is 0, which is no sensible count"),
        (
            {A + "attention.head_count": 8},
            r"attn_output\.weight has shape \[64, 64\], the metadata ask for \[64, 128\]",
        ),
        ({A + "attention.head_count_kv": [2, 1]}, r"head_count_kv differs from layer to layer"),
        ({A + "attention.value_length": 8}, r"keys and values of different lengths"),
        ({A + "rope.dimension_count": 8}, r"8 of 16 coordinates"),
        ({A + "rope.scaling.type": "spiral"}, r"rope\.scaling\.type 'spiral'"),
        ({A + "rope.scaling.type": "linear", A + "rope.scaling.factor": "x"}, r"metadata that contradict each other"),
        ({A + "context_length": "long"}, r"context_length is 'long'"),
        ({A + "attention.layer_norm_rms_epsilon": float("nan")}, r"epsilon is nan, which is no number"),
        ({A + "vocab_size": 65}, r"vocab_size is 65, but its tokenizer has 64 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, r"token_type has 64 entries for 2 tokens"),
        ({"tokenizer.ggml.tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        (
            {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": None},
            r"its tokenizer has 2 tokens, but token_embd\.weight has 64 rows; tokenizer and weights",
        ),
        ({"tokenizer.ggml.eos_token_id": 64}, r"eos_token_id is 64, but its tokenizer has 64 tokens"),
        ({"tokenizer.ggml.merges": ["a b c"]}, r"'a b c' in tokenizer\.ggml\.merges is no pair"),
        ({"tokenizer.ggml.merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.token_type": 5}, r"metadata that contradict each other"),
        ({"tokenizer.ggml.model": "llama"}, r"has no tokenizer\.ggml\.scores"),
    ],
)
def test_metadata_that_cannot_be_right(plain, tmp_path, metadata, message):
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_folder(str(write(plain, tmp_path / "m.gguf", metadata=metadata)))


@pytest.mark.parametrize("key", sorted(key for key, value in config_metadata(CONFIG, "llama").items() if value))
def test_values_of_other_types_are_answered_by_one_error(plain, tmp_path, key):
    for number, value in enumerate(["text", 0, 2**32 - 1, 1e30, float("inf"), True, [1, 2], ["x"]]):
        file = write(plain, tmp_path / f"{number}.gguf", metadata={key: value})
        try:
            folder = resolve_model_folder(str(file))
            check_folder(folder, ModelArgs())
        except ModelLoadError:
            pass


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("llama", "IQ4_NL", r"ffn_up\.weight in IQ4_NL, which is not supported; .*such as Q4_K_M"),
        ("llama", "Q2_K", r"in Q2_K, which is not supported"),
        ("llama", "TQ1_0", r"in TQ1_0, which is not supported"),
        ("mamba9", "F32", r"architecture 'mamba9' is not supported as GGUF; supported are gemma, gemma2"),
    ],
)
def test_types_and_architectures_that_are_not_read_are_named(tmp_path, architecture, kind, message):
    chosen = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[chosen][1]), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=chosen)
    finish(writer)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_folder(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("change", [{"tokenizer.ggml.pre": "unheard-of"}, {"tokenizer.ggml.model": "bert"}])
def test_unknown_tokenizers_leave_the_model_usable_with_another(plain, tmp_path, change):
    folder = resolve_model_folder(str(write(plain, tmp_path / "m.gguf", metadata=change)))
    load_model_config(folder)
    name = next(iter(change.values()))
    with pytest.raises(TokenizerError, match=rf"does not contain its whole tokenizer.*'{name}'.*set --tokenizer-path"):
        Tokenizer.load(folder)


def test_rope_factors_of_the_wrong_size(plain, tmp_path):
    file = write(plain, tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(ModelLoadError, match=r"rope factors must be 8 numbers"):
        resolve_model_folder(str(file))


def test_surplus_tensors_are_named(plain, tmp_path):
    file = write(plain, tmp_path / "m.gguf", extra={"blk.1.mystery.weight": np.ones(5, np.float32)})
    folder = resolve_model_folder(str(file))
    tensors = open_source(folder).tensors
    views = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items() if "mystery" not in name}
    with pytest.raises(ModelLoadError, match=r"unexpected tensor\(s\): blk\.1\.mystery\.weight"):
        load_weights(views, folder)
