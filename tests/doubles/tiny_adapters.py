"""LoRA adapters of the tiny models, made with peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "qkv_proj", "gate_up_proj"]
EVERY += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
"""Names of linear layers; those that a model lacks are left out."""


def add_adapter(model: Any, name: str, targets: list[str], seed: int, **settings: Any) -> Any:
    """The model as a PeftModel with one more adapter, random and strong enough to change what it says.

    model: of transformers, or a PeftModel. settings: of LoraConfig."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    linears = [name.removesuffix(".base_layer") for name, module in base.named_modules() if hasattr(module, "weight")]
    targets = [target for target in targets if any(name.endswith(f".{target}") for name in linears)]
    settings = {"r": 4, "lora_alpha": 8, **settings}
    config = LoraConfig(target_modules=targets, **settings)
    with warnings.catch_warnings():
        # peft asks transformers for a deprecated attribute.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if f".{name}." in key:
                value.copy_(torch.randn_like(value) * (0.5 if ".lora_B." in key else 0.3))
    return model.eval()


def save_adapter(model: Any, name: str, folder: Path) -> Path:
    """Save one adapter of a PeftModel; returns its folder."""
    model.save_pretrained(folder, selected_adapters=[name])
    return folder / name
