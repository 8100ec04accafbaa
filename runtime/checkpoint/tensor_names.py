"""Which tensors of a checkpoint the decoder reads, under which names, and which it leaves out. Data; no torch.

    name in the files ──▶ name in the text decoder ──▶ needed │ known to be harmless: left out │ surplus: an error

A surplus tensor usually means that config.json and weights are of different models, so only tensors listed here may be
left out. To add some for an architecture, add a line to `IGNORED_BY_ARCHITECTURE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TEXT_PREFIXES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.", "model."),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
"""Prefix in a multimodal checkpoint, one that was saved without a head, or one of a Mamba -> prefix of the same tensor
in a checkpoint of another language model; the first counts."""

OTHER_PARTS = re.compile(
    r"(model\.|thinker\.)?"
    r"(visual|vision_tower|vision_model|vision_embed_tokens|vision_encoder|image_newline|multi_modal_projector|"
    r"mm_projector|vision_projector|vit_large_projector|vision_adapter|patch_merger|embed_vision|connector|"
    r"audio_tower|audio_encoder|audio_projection|audio_projector|embed_audio|mlp1|talker|token2wav|code2wav)"
    r"(\.|$)"
)
"""Encoders of pictures and sound, and what connects them with the text part."""

IGNORED: tuple[tuple[str, str], ...] = (
    (r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$", "tables of the rotary embedding, which are computed"),
    (r"(^|\.)(attn|attention|self_attn)\.masked_bias$", "causal masks, which are computed"),
    (r"(^|\.)position_ids$", "positions, which are computed"),
    (r"^(model\.)?mtp(\.|_)", "layers that predict several tokens"),
)
"""Pattern (searched in the name) -> what such tensors are."""

IGNORED_BY_ARCHITECTURE: dict[str, tuple[tuple[str, str], ...]] = {
    "GPT2LMHeadModel": ((r"\.attn\.bias$", "causal masks, which are computed"),),
    "GPTJForCausalLM": ((r"\.attn\.bias$", "causal masks, which are computed"),),
    "GPTNeoForCausalLM": ((r"\.attn\.attention\.bias$", "causal masks, which are computed"),),
    "GPTNeoXForCausalLM": ((r"\.attention\.bias$", "causal masks, which are computed"),),
}
"""Architecture -> the same, for tensors that this architecture alone leaves out."""

TIED_HEAD = "lm_head.weight"
"""Only models with a head of its own need it; in others it is a copy of the embedding, which `load_weights` checks."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def text_tensor_name(name: str) -> str | None:
    """The name that a tensor has in a checkpoint of the text part alone; None if it belongs to another part.

    >>> text_tensor_name("language_model.model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> text_tensor_name("model.visual.patch_embed.weight") is None
    True
    """
    if OTHER_PARTS.match(name):
        return None
    for prefix, replacement in TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


def ignored_reason(name: str, config: Mapping[str, Any]) -> str | None:
    """What an unneeded tensor is, if leaving it out is harmless; None if it is a surplus one.

    name: as `text_tensor_name` gives it. config: the text part's parsed config.json; it says how many layers there are
    (num_hidden_layers) and how many more that only predict further tokens (num_nextn_predict_layers: DeepSeek, GLM).
    """
    if name == TIED_HEAD:
        return "the head, which is tied to the embedding"
    by_architecture = [IGNORED_BY_ARCHITECTURE.get(each, ()) for each in config.get("architectures") or ()]
    for pattern, kind in (*IGNORED, *(rule for rules in by_architecture for rule in rules)):
        if re.search(pattern, name):
            return kind
    layers, extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if layers and extra and (match := _LAYER.search(name)) and layers <= int(match[1]) < layers + extra:
        return "layers that predict several tokens"
    return None
