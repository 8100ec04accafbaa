"""Checks a model folder before a server starts its processes: config, files and headers of the weights. No torch.

Everything here takes milliseconds, so a wrong folder is reported before torch is imported and memory is taken. The
worker then compares every tensor with what the model needs, and reads the numbers (`weights.load_weights`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ModelArgs
from ..model_config import ModelConfig
from .gguf_folder import MARK
from .hf_config import load_model_config
from .model_files import ModelLoadError, UnsupportedModelError
from .tensor_names import TIED_HEAD, ignored_reason
from .text_part import multimodal_name, text_part
from .weight_files import StoredTensor
from .weight_source import open_source

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_folder(folder: Path, args: ModelArgs, *, context_length: int = 0) -> None:
    """Raises ModelLoadError, which names the file, the tensor or the value, and what to change.

    Models that Baton's own code does not compute are checked as far as their files go. Logs if only the text part of a
    multimodal model is served.
    """
    config: ModelConfig | None = None
    is_gguf = (folder / MARK).exists()
    if is_gguf and args.model_impl == "transformers":
        raise ModelLoadError(
            "GGUF files are computed by Baton's own code; leave --model-impl out, or give the model's Hugging Face "
            "folder"
        )
    if args.model_impl != "transformers":
        try:
            config = load_model_config(folder, context_length=context_length)
        except UnsupportedModelError:
            if args.model_impl == "baton" or is_gguf:
                raise
    if args.load_format != "dummy":
        tensors = open_source(folder).tensors
        if config is not None:
            _check_sizes(config, tensors, folder)
    raw = _raw_config(folder)
    if name := multimodal_name(raw):
        logger.info("%s: the text part alone is served; requests with pictures, sound or video are refused", name)


def _check_sizes(config: ModelConfig, tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Compare what any decoder has with its config: the embedding, the head and the number of layers."""
    source = folder / "config.json"
    embedding = tensors.get(_EMBEDDING)
    expected = (config.vocab_size, config.hidden_size)
    if embedding is not None and embedding.shape != expected:
        raise ModelLoadError(
            f"{source} has vocab_size {expected[0]} and hidden_size {expected[1]}, but {embedding.name} in "
            f"{embedding.file.name} has shape {list(embedding.shape)}; config.json and weights are of different models"
        )
    needs_head = config.head == "language" and not config.tie_word_embeddings
    if embedding is not None and TIED_HEAD not in tensors and needs_head:
        raise ModelLoadError(
            f"the weights in {folder} have no {TIED_HEAD}, and {source} does not tie it to the embedding; set "
            "tie_word_embeddings to true if the model's head is its embedding, else download the folder again"
        )
    raw = _raw_config(folder)
    text = text_part(raw) or raw
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name)) and not ignored_reason(name, text)}
    if layers and layers != set(range(config.num_layers)):
        absent = sorted(set(range(config.num_layers)) - layers)
        trouble = f"layer {absent[0]} is missing" if absent else f"they have {max(layers) + 1} layers"
        raise ModelLoadError(
            f"{source} has num_hidden_layers {config.num_layers}, but of the weights in {folder} {trouble}; "
            "config.json and weights are of different models, or the download is not complete"
        )


def _raw_config(folder: Path) -> dict[str, Any]:
    """config.json, which `load_model_config` has read or transformers will; {} if it is not there or broken."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
