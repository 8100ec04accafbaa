"""Writes a Llama or Qwen2 of a Hugging Face folder as a GGUF file, in the types that llama.cpp's users load.

    F32, BF16          the weights as they are
    Q8_0, Q4_0         all matrices in blocks of 32 numbers with a scale; Q4_0 keeps the embedding, which is the head
                       too, in Q8_0
    Q4_K_M             llama.cpp's mixture: Q6_K for the embedding and for half of the value and down projections, Q4_K
                       for the rest. Rows that are no multiple of 256 long get Q5_0 in place of Q4_K, and Q8_0 in place
                       of Q6_K

The package ``gguf`` writes; numbers of K types are chosen by ggml itself, out of the shared library of the package
``xllamacpp``.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

TYPES = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M")
FILE_TYPES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
FILE_TYPES |= {"Q4_K_M": "MOSTLY_Q4_K_M"}
SUPER_BLOCK = 256
"""Numbers of a block of the K types."""
PACKAGE = "xllamacpp"


def write_gguf(folder: Path, file: Path, kind: str, ggml: Path | None = None) -> None:
    """Write the folder's weights in one of TYPES, with the tokens of its tokenizer.

    ggml: the shared library that quantises, see `find_ggml`; only Q4_K_M needs it. Raises ValueError for a model that
    is no Llama or Qwen2, and where the library is missing."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ("llama", "qwen2"):
        raise ValueError(f"a GGUF file is written of a llama or a qwen2, not of a {config['model_type']}")
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config["model_type"]]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"llama.cpp has no tensor for {name}")
        if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
            number = heads if "q_proj" in name else config["num_key_value_heads"]
            tensor = side_by_side(tensor, number)
        tensor = np.ascontiguousarray(tensor, np.float32)
        wanted = tensor_type(kind, theirs, tensor.shape, layers)
        writer.add_tensor(theirs, quantize(tensor, wanted, ggml), raw_dtype=gguf.GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the outputs of each head: llama.cpp keeps the two dimensions of a Llama that are rotated together next
    to each other, Hugging Face half a head apart."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensor_type(kind: str, name: str, shape: tuple[int, ...], layers: int) -> str:
    """The type of a tensor, by its name in the file, where the file is of one of TYPES."""
    if len(shape) == 1:
        return "F32"
    shared = name.startswith(("token_embd.", "output."))
    if kind == "Q4_0" and shared:
        return "Q8_0"
    if kind != "Q4_K_M":
        return kind
    finer = shared
    if ".attn_v." in name or ".ffn_down." in name:
        finer = has_more_bits(int(name.split(".")[1]), layers)
    if shape[-1] % SUPER_BLOCK:
        return "Q8_0" if finer else "Q5_0"
    return "Q6_K" if finer else "Q4_K"


def has_more_bits(layer: int, layers: int) -> bool:
    """True in the first and the last eighth of the layers, and in every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def quantize(tensor: np.ndarray, kind: str, ggml: Path | None) -> np.ndarray:
    """float32 [..., n] -> the bytes of a type, uint8 [..., bytes of a row], or float32 itself."""
    import gguf

    if kind == "F32":
        return tensor
    if kind in ("BF16", "Q8_0", "Q4_0"):
        return gguf.quantize(tensor, gguf.GGMLQuantizationType[kind])
    if ggml is None:
        raise ValueError(f"numbers of type {kind} need ggml: name an environment with {PACKAGE}")
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, length = tensor.shape
    found = np.empty((rows, length // block * size), np.uint8)
    library: Any = ctypes.CDLL(str(ggml))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,  # its type
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,  # the first number, rows, numbers of a row
        ctypes.c_void_p,
    ]
    number = int(gguf.GGMLQuantizationType[kind])
    written = library.ggml_quantize_chunk(number, tensor.ctypes.data, found.ctypes.data, 0, rows, length, None)
    if written != found.nbytes:
        raise ValueError(f"ggml wrote {written} bytes of {kind}, where {found.nbytes} were expected")
    return found


def find_ggml(python: str) -> Path | None:
    """The shared library of xllamacpp in the environment of this interpreter; None without one."""
    found = Path(python).absolute().parent.parent.glob(f"lib/python3*/site-packages/{PACKAGE}/{PACKAGE}*.so")
    return next(iter(sorted(found)), None)


def add_tokenizer(writer: Any, folder: Path) -> None:
    """Add the tokens and merges of a folder's byte-level tokenizer. llama.cpp gets token ids here, so nothing depends
    on how it would split words."""
    import gguf

    backend = json.loads((folder / "tokenizer.json").read_text())
    letters = backend["model"]["vocab"]
    words = {token["content"]: token["id"] for token in backend["added_tokens"]}
    special = {token["content"] for token in backend["added_tokens"] if token["special"]}
    ids = letters | words
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = gguf.TokenType

    def kind(token: str) -> int:
        if token in special:
            return kinds.CONTROL
        return kinds.USER_DEFINED if token in words else kinds.NORMAL

    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if "Digits" in json.dumps(backend["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kind(token) for token in tokens])
    writer.add_token_merges(merges or ["! !"])  # of no use, but llama.cpp insists on a list that is not empty
    writer.add_add_bos_token(False)
