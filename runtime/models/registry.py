"""The architectures that Baton serves: the name in config.json -> the function that reads its traits.

To add an architecture that fits `decoder.py`, write one small file beside this one and add one line here.
"""

from __future__ import annotations

from ..model_config import HeadKind
from .deepseek import (
    deepseek_v2_traits,
    deepseek_v3_traits,
    glm4_moe_lite_traits,
    minicpm3_traits,
    mistral4_traits,
    youtu_traits,
)
from .ernie import ernie4_5_moe_traits, ernie4_5_traits
from .exaone4 import exaone4_traits
from .gemma import gemma2_traits, gemma3_traits, gemma_traits
from .glm import glm4_moe_traits, glm4_traits, glm_traits
from .gpt_oss import gpt_oss_traits
from .granite import granite_moe_traits, granite_traits
from .lfm2 import lfm2_config, lfm2_moe_traits, lfm2_traits
from .llama import llama_traits
from .llama4 import llama4_traits
from .mamba_hybrids import (
    bamba_traits,
    falcon_h1_traits,
    granite_hybrid_config,
    granite_hybrid_traits,
    mamba2_config,
    mamba2_traits,
    nemotron_h_config,
    nemotron_h_traits,
)
from .mistral import ministral3_traits, ministral_traits, mistral_traits
from .mixtral import mixtral_traits
from .olmo import olmo2_traits, olmo3_traits
from .phi3 import phi3_traits
from .qwen2 import qwen2_traits
from .qwen3 import qwen3_traits
from .qwen_moe import olmoe_traits, qwen2_moe_traits, qwen3_moe_traits
from .qwen_next import qwen3_5_moe_config, qwen3_5_moe_traits, qwen3_5_traits, qwen3_next_traits
from .seed_oss import seed_oss_traits
from .smollm3 import smollm3_traits
from .traits import ConfigReader, TraitsReader

ARCHITECTURES: dict[str, TraitsReader] = {
    "BambaForCausalLM": bamba_traits,
    "DeepseekV2ForCausalLM": deepseek_v2_traits,
    "DeepseekV3ForCausalLM": deepseek_v3_traits,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe_traits,
    "Ernie4_5ForCausalLM": ernie4_5_traits,
    "Exaone4ForCausalLM": exaone4_traits,
    "FalconH1ForCausalLM": falcon_h1_traits,
    "Gemma2ForCausalLM": gemma2_traits,
    "Gemma3ForCausalLM": gemma3_traits,
    "GemmaForCausalLM": gemma_traits,
    "Glm4ForCausalLM": glm4_traits,
    "Glm4MoeForCausalLM": glm4_moe_traits,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite_traits,
    "GlmForCausalLM": glm_traits,
    "GptOssForCausalLM": gpt_oss_traits,
    "GraniteForCausalLM": granite_traits,
    "GraniteMoeForCausalLM": granite_moe_traits,
    "GraniteMoeHybridForCausalLM": granite_hybrid_traits,
    "Lfm2ForCausalLM": lfm2_traits,
    "Lfm2MoeForCausalLM": lfm2_moe_traits,
    "Llama4ForCausalLM": llama4_traits,
    "LlamaForCausalLM": llama_traits,
    "Mamba2ForCausalLM": mamba2_traits,
    "MiniCPM3ForCausalLM": minicpm3_traits,
    "Ministral3ForCausalLM": ministral3_traits,
    "MinistralForCausalLM": ministral_traits,
    "Mistral4ForCausalLM": mistral4_traits,
    "MistralForCausalLM": mistral_traits,
    "MixtralForCausalLM": mixtral_traits,
    "NemotronHForCausalLM": nemotron_h_traits,
    "Olmo2ForCausalLM": olmo2_traits,
    "Olmo3ForCausalLM": olmo3_traits,
    "OlmoeForCausalLM": olmoe_traits,
    "Phi3ForCausalLM": phi3_traits,
    "Qwen2ForCausalLM": qwen2_traits,
    "Qwen2MoeForCausalLM": qwen2_moe_traits,
    "Qwen3_5ForCausalLM": qwen3_5_traits,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_traits,
    "Qwen3ForCausalLM": qwen3_traits,
    "Qwen3MoeForCausalLM": qwen3_moe_traits,
    "Qwen3NextForCausalLM": qwen3_next_traits,
    "SeedOssForCausalLM": seed_oss_traits,
    "SmolLM3ForCausalLM": smollm3_traits,
    "YoutuForCausalLM": youtu_traits,
}

CONFIGS: dict[str, ConfigReader] = {
    "GraniteMoeHybridForCausalLM": granite_hybrid_config,
    "Lfm2ForCausalLM": lfm2_config,
    "Lfm2MoeForCausalLM": lfm2_config,
    "Mamba2ForCausalLM": mamba2_config,
    "NemotronHForCausalLM": nemotron_h_config,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_config,
}
"""Architectures whose config.json has other keys."""

_HEADS: tuple[tuple[str, HeadKind], ...] = (("ForSequenceClassification", "labels"), ("Model", "none"))
"""Ending of an architecture's name -> the head that stands in place of the language model's."""


def decoder_of(architecture: str) -> tuple[str, HeadKind] | None:
    """The architecture of `ARCHITECTURES` whose decoder this one has, and its head; None if it has none of them.

    >>> decoder_of("Qwen3ForSequenceClassification")
    ('Qwen3ForCausalLM', 'labels')
    >>> decoder_of("MistralModel")
    ('MistralForCausalLM', 'none')
    """
    if architecture in ARCHITECTURES:
        return architecture, "language"
    for ending, head in _HEADS:
        if architecture.endswith(ending):
            name = f"{architecture.removesuffix(ending).removesuffix('Text')}ForCausalLM"
            return (name, head) if name in ARCHITECTURES else None
    return None
