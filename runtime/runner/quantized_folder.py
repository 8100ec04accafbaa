"""Writes a model's folder with weights in few bits, as `--quantization` makes them when a model is loaded.

Such a folder is smaller, and starts sooner: nothing is quantised again, and less is read. Its weights are those of
`QuantizedWeight` and `Float8Weight`, part by part (packing "plain" of checkpoint/quantization_config.py); all others,
and all other files, are copied.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoint.hf_config import load_model_config
from ..checkpoint.load_errors import ModelLoadError
from ..checkpoint.new_folder import ConversionError, copy_others, new_folder, save_tensors
from ..checkpoint.quantization_config import OWN_FORMAT, OWN_METHOD, PLAIN_GROUP
from ..checkpoint.weight_files import INDEX_FILE
from ..checkpoint.weight_source import open_source
from ..checkpoint.weights import check_tensors, check_tied
from ..layers.ops import TORCH_OPS
from ..layers.quantize import narrowed
from ..layers.quantized_weights import QUANTIZATIONS, Float8Weight, PackedWeight, WeightForm
from ..layers.weight_slots import ExpertsSlot, WeightSlot
from ..models.decoder import Decoder

SHARD_BYTES = 2 << 30
"""A file is written once its tensors take so much."""


def quantize_folder(folder: Path, output: Path, quantization: str) -> list[Path]:
    """Write the model in ``folder`` to ``output``, a new folder that appears when everything in it is written. Returns
    its files of weights. Takes as much memory as one of these.

    quantization: one of QUANTIZATIONS, not "auto". Raises ModelLoadError for a model that `--quantization` does not
    take, that has weights in few bits, or one that is NaN or infinite; ConversionError if ``folder`` is none, or
    ``output`` exists or cannot be written."""
    form = QUANTIZATIONS[quantization]
    assert form is not None, quantization
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder")
    forms = _forms(folder, form)
    with new_folder(output) as unfinished:
        copy_others(folder, unfinished)
        names = _write_weights(folder, unfinished, forms)
        _write_config(folder, unfinished, quantization)
    return [output / name for name in names]


def _forms(folder: Path, form: WeightForm) -> dict[str, WeightForm | None]:
    """The weights that the model needs, by name, and the form that each is to have; None: its own. Raises
    ModelLoadError."""
    source = open_source(folder)
    if packed := [name for name, tensor in source.tensors.items() if tensor.is_packed]:
        raise ModelLoadError(
            f"{folder} has weights in few bits already ({packed[0]}: {source.tensors[packed[0]].dtype}); give the "
            "model's release in floats"
        )
    model = Decoder(load_model_config(folder), TORCH_OPS, dtype=torch.float32, device=torch.device("meta"))
    model.keep_packed(form, has_stored_rows=True)
    views = model.checkpoint_views()
    if together := [name for name, view in views.items() if isinstance(view, ExpertsSlot)]:
        raise ModelLoadError(
            f"{folder} holds all experts of a layer in one tensor ({together[0]}), which cannot be converted; serve it "
            "with --quantization"
        )
    check_tensors(views, source, folder)
    check_tied(views, source, folder)
    if small := [name for name in views if source.tensors[name].dtype.startswith("F8_")]:
        raise ModelLoadError(f"{folder} has 8-bit floats without scales ({small[0]}); give a release in 16 or 32 bits")
    # What else there is, such as a copy of a tied embedding, is not needed. Few inputs would not be worth it, and the
    # shapes of their codes and scales would not tell how many bits they have.
    return {
        name: view.form if isinstance(view, WeightSlot) and view.shape[1] > PLAIN_GROUP else None
        for name, view in views.items()
    }


def _write_weights(folder: Path, output: Path, forms: dict[str, WeightForm | None]) -> list[str]:
    """Returns the names of the files written."""
    source, weight_map = open_source(folder), dict[str, str]()
    shard, written = dict[str, torch.Tensor](), list[str]()

    def flush() -> None:
        written.append(f"model-{len(written) + 1:05}.safetensors")
        save_tensors(shard, output / written[-1])
        weight_map.update(dict.fromkeys(shard, written[-1]))
        shard.clear()

    total = 0
    names = sorted(forms, key=lambda name: source.tensors[name].file)
    for name in tqdm(names, desc="Quantising weights", unit="tensor", disable=None):
        weight = source.read(name)
        assert isinstance(weight, torch.Tensor), "the folder has floats alone"
        if (form := forms[name]) is not None:
            if not bool(weight.isfinite().all()):
                raise ModelLoadError(f"tensor {name} in {source.tensors[name].file} has NaN or infinite numbers")
            narrow = narrowed(weight, form)
            assert not isinstance(narrow, torch.Tensor)
            parts = _parts(name.removesuffix("weight"), narrow)
        else:
            parts = {name: weight.clone()}
        shard |= parts
        total += sum(part.nbytes for part in parts.values())
        if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _parts(module: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a weight, by name. module: with its dot."""
    if isinstance(weight, Float8Weight):
        return {f"{module}weight": weight.codes, f"{module}weight_scale": weight.scales}
    parts = {"codes": weight.codes, "rows": weight.rows, "scales": weight.scales, "mins": weight.mins}
    return {f"{module}weight_{part}": tensor for part, tensor in parts.items() if tensor is not None}


def _write_config(folder: Path, output: Path, quantization: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": OWN_METHOD, "format": OWN_FORMAT, "quantization": quantization}
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
