"""The architectures that Baton serves: the name in config.json -> the function that reads its traits.

To add an architecture that fits `decoder.py`, write one small file beside this one and add one line here.
"""

from __future__ import annotations

from .llama import llama_traits
from .mistral import mistral_traits
from .qwen2 import qwen2_traits
from .qwen3 import qwen3_traits
from .traits import TraitsReader

ARCHITECTURES: dict[str, TraitsReader] = {
    "LlamaForCausalLM": llama_traits,
    "MistralForCausalLM": mistral_traits,
    "Qwen2ForCausalLM": qwen2_traits,
    "Qwen3ForCausalLM": qwen3_traits,
}
