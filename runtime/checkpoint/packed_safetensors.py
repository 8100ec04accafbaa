"""The weights of a checkpoint whose tensors are packed: several tensors of the files make up one weight. No torch.

    q_proj.qweight  int32 [in / 8, out]  ─┐
    q_proj.qzeros   int32 [groups, out / 8] ├──▶ q_proj.weight [out, in], "int4 (gptq)"
    q_proj.scales   float16 [groups, out] ─┘

Their shapes are compared here with each other and with config.json, so that metadata that contradict the tensors are
reported before any number is read. Modules that the quantisation left out keep their plain ``weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .model_files import ModelLoadError
from .quantization_config import OWN_METHOD, PLAIN_GROUP, Packing, PackingSettings, Quantization
from .weight_files import StoredTensor, shorten


@dataclass(frozen=True, slots=True)
class PackedTensor(StoredTensor):
    """A weight in few bits; ``name`` is that of the tensor with its codes. shape: [out, in], or of the experts of
    gpt-oss [experts, in, out], as the model has them in floats."""

    settings: PackingSettings
    parts: Mapping[str, StoredTensor]
    """Last part of the name in the file -> tensor."""

    @property
    def is_packed(self) -> bool:
        return True


_BLOCKS, _SCALES = "_blocks", "_scales"
"""Endings of names of the experts of gpt-oss."""

_CODES: dict[Packing, str] = {
    "gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight", "float8": "weight",
    "plain": "weight_codes",
}  # fmt: skip
_PARTS: dict[Packing, tuple[str, ...]] = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "int8": ("weight", "weight_scale", "weight_zero_point"),
    "float8": ("weight", "weight_scale", "weight_scale_inv"),
    "plain": ("weight_codes", "weight_rows", "weight_scales", "weight_mins"),
}
_CODE_TYPES: dict[Packing, str] = {
    "gptq": "I32", "awq": "I32", "packed": "I32", "int8": "I8", "float8": "F8_E4M3", "plain": "U8",
}  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")
_HARMLESS = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale",
    "q_scale", "activation_scale",
)  # fmt: skip
"""Scales of activations and of the KV cache, which Baton keeps in types of its own."""


def packed_tensors(
    tensors: Mapping[str, StoredTensor], quantization: Quantization, folder: Path
) -> dict[str, StoredTensor]:
    """The weights by name, packed or plain, of ``tensors`` as the files have them. Raises ModelLoadError."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    found: dict[str, StoredTensor] = {}
    for module, parts in modules.items():
        packing = _packing_of(parts)
        taken: set[str] = set()
        if quantization.method == "mxfp4":
            experts = _experts(module, parts)
            found |= experts
            taken = {part for tensor in experts.values() for part in tensor.parts}
        if packing is not None:
            stored = next(iter(parts.values())).name.rpartition(".")[0]  # of the whole model, whose names targets are
            settings = quantization.settings(stored)
            if quantization.method == OWN_METHOD:
                settings = _own_settings(packing, parts)
            if settings is None or settings.packing != packing:
                declared = "no packed weight" if settings is None else f"weights of the kind {settings.packing}"
                raise ModelLoadError(
                    f"{folder}: the tensors of {module} ({shorten(parts)}) are packed as {packing}, but "
                    f"quantization_config ({quantization.method}) of config.json declares {declared} there; "
                    "config.json and weights are of different models"
                )
            used = {part: parts[part] for part in _PARTS[packing] if part in parts}
            if "weight" in parts and "weight" not in _PARTS[packing]:
                raise ModelLoadError(
                    f"{folder}: {module} has a packed weight and a plain one ({shorten(parts)}); which of them counts "
                    "cannot be told: download the folder again"
                )
            make = _plain if packing == "plain" else _packed
            found[f"{module}.weight"] = make(module, used, settings)
            taken = set(used)
        for part, tensor in parts.items():
            if part not in taken and part not in _HARMLESS:
                found[f"{module}.{part}" if module else part] = tensor
    if not any(isinstance(tensor, PackedTensor) for tensor in found.values()):
        raise ModelLoadError(
            f"{folder / 'config.json'} declares quantised weights ({quantization.method}), but no tensor is packed; "
            "remove quantization_config if the weights are plain, else download the folder again"
        )
    return found


def _experts(module: str, parts: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """Those of a module of gpt-oss. Raises ModelLoadError."""
    found: dict[str, PackedTensor] = {}
    for part, blocks in parts.items():
        if not part.endswith(_BLOCKS):
            continue
        stem = part.removesuffix(_BLOCKS)
        scales = parts.get(stem + _SCALES)
        given = {(tensor.dtype, *tensor.shape[3:]) for tensor in (blocks, scales) if tensor is not None}
        if scales is None or given != {("U8", 16), ("U8",)} or blocks.shape[:3] != scales.shape:
            raise ModelLoadError(
                f"{blocks.file}: the weights {module}.{stem} (mxfp4) need blocks U8 [experts, out, in / 32, 16] and "
                f"scales U8 [experts, out, in / 32]; there are {part} {blocks.dtype} {list(blocks.shape)} and "
                f"{f'{scales.dtype} {list(scales.shape)}' if scales is not None else 'no scales'}; download them again"
            )
        experts, out, groups = scales.shape
        found[f"{module}.{stem}"] = PackedTensor(
            blocks.file,
            blocks.name,
            "mxfp4",
            (experts, groups * 32, out),
            PackingSettings("mxfp4", 4, 32),
            {part: blocks, stem + _SCALES: scales},
        )
    return found


def _packing_of(parts: Mapping[str, StoredTensor]) -> Packing | None:
    """That of a module's tensors; None if its weight is plain."""
    if "qweight" in parts:
        # GPTQ packs the inputs, so that the codes have a column for each output, as the scales have; AWQ packs outputs.
        codes, scales = parts["qweight"], parts.get("scales")
        return "gptq" if scales is None or codes.shape[1:] == scales.shape[1:] else "awq"
    if "weight_packed" in parts:
        return "packed"
    if "weight_codes" in parts:
        return "plain"
    weight = parts.get("weight")
    if weight is not None and weight.dtype == "I8":
        return "int8"
    return "float8" if weight is not None and weight.dtype.startswith("F8_") else None


def _packed(module: str, parts: Mapping[str, StoredTensor], settings: PackingSettings) -> PackedTensor:
    """Raises ModelLoadError if the shapes or types do not fit each other."""
    packing, per_word = settings.packing, 32 // settings.bits
    codes = parts[_CODES[packing]]

    def refuse(text: str) -> ModelLoadError:
        shapes = ", ".join(f"{part} {tensor.dtype} {list(tensor.shape)}" for part, tensor in parts.items())
        return ModelLoadError(
            f"{codes.file}: the weight of {module} ({packing}, {settings.bits} bits, group_size "
            f"{settings.group or 'none'}) {text}; it has {shapes}. config.json and weights are of different models, or "
            "the download is damaged"
        )

    if codes.dtype != _CODE_TYPES[packing] or len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse(f"needs codes of type {_CODE_TYPES[packing]} with two dimensions")
    rows, columns = codes.shape
    if packing == "gptq":
        out, into = columns, rows * per_word
    elif packing == "awq":
        out, into = columns * per_word, rows
    elif packing == "packed":
        out, into = rows, columns * per_word
        if "weight_shape" not in parts:
            raise refuse("needs weight_shape")
    else:
        out, into = rows, columns
    scales = parts.get("scales" if packing in ("gptq", "awq") else "weight_scale") or parts.get("weight_scale_inv")
    if scales is None or scales.dtype not in _FLOATS:
        raise refuse("needs scales of a floating-point type")
    group = settings.group or into
    groups = -(-into // group)
    if packing in ("gptq", "awq"):
        fits, wanted = scales.shape == (groups, out), f"[{groups}, {out}]"
    elif settings.block is not None:
        blocks = -(-out // settings.block[0]), -(-into // settings.block[1])
        fits, wanted = scales.shape == blocks, f"{list(blocks)}, for blocks of {list(settings.block)}"
    else:
        whole = [(), (1,), (1, 1), (out,)] if groups == 1 else []
        fits, wanted = scales.shape in [(out, groups), *whole], f"[{out}, {groups}]"
    if not fits:
        raise refuse(f"needs scales {wanted}")
    if group < into and into % group:
        raise refuse(f"has {into} inputs, which groups of {group} do not divide")
    zeros = parts.get("qzeros") or parts.get("weight_zero_point")
    if packing in ("gptq", "awq") and zeros is None:
        raise refuse("needs qzeros")
    allowed = _zeros_shapes(packing, out, groups, per_word)
    if zeros is not None and (zeros.dtype, zeros.shape) not in allowed:
        raise refuse("needs zero points " + " or ".join(f"{kind} {list(shape)}" for kind, shape in allowed))
    if packing in ("gptq", "awq") and out % per_word:
        raise refuse(f"has {out} outputs, which is no multiple of {per_word}")
    kind = "float8" if packing == "float8" else f"int{settings.bits}"
    return PackedTensor(codes.file, codes.name, f"{kind} ({packing})", (out, into), settings, parts)


def _own_settings(packing: Packing, parts: Mapping[str, StoredTensor]) -> PackingSettings | None:
    """The settings of a module that `baton convert` wrote, from its shapes: codes of 4 bits have half as many columns
    as there are inputs. None if the module is of another kind."""
    if packing == "float8":
        return PackingSettings("float8", 8)
    if packing != "plain":
        return None
    codes, scales = (parts[part].shape[1:] if part in parts else () for part in ("weight_codes", "weight_scales"))
    is_wide = [-(-columns // PLAIN_GROUP) for columns in codes] == list(scales)
    return PackingSettings("plain", 8 if is_wide else 4, PLAIN_GROUP)


def _plain(module: str, parts: Mapping[str, StoredTensor], settings: PackingSettings) -> PackedTensor:
    """A weight of `baton convert`. Raises ModelLoadError."""
    codes, scales, mins = parts["weight_codes"], parts.get("weight_scales"), parts.get("weight_mins")
    out, columns = codes.shape if len(codes.shape) == 2 else (0, 0)
    into = columns if settings.bits == 8 else 2 * columns
    table = "F16", (out, -(-into // settings.group))
    wanted = {
        "weight_codes": ("U8", (out, columns)),
        "weight_rows": ("F32", (out,)),
        "weight_scales": table,
        "weight_mins": table,
    }
    has_all = wanted.keys() - {"weight_mins"} <= parts.keys()
    fits = all((tensor.dtype, tensor.shape) == wanted[part] for part, tensor in parts.items())
    if scales is None or not has_all or not fits or not out * into:
        shapes = ", ".join(f"{part} {tensor.dtype} {list(tensor.shape)}" for part, tensor in parts.items())
        raise ModelLoadError(
            f"{codes.file}: the weight of {module} needs weight_codes U8 [out, in or in / 2], weight_rows F32 [out], "
            f"weight_scales F16 [out, in / {settings.group}], and may have weight_mins like these; it has {shapes}. "
            "The file is damaged: convert the model again"
        )
    kind = f"int{settings.bits}" + (" with minima" if mins is not None else "")
    return PackedTensor(codes.file, codes.name, f"{kind} (plain)", (out, into), settings, parts)


def _zeros_shapes(packing: Packing, out: int, groups: int, per_word: int) -> list[tuple[str, tuple[int, ...]]]:
    words = -(-out // per_word)
    if packing in ("gptq", "awq"):
        return [("I32", (groups, words))]
    unpacked = [("I8", (out, groups))] + ([("I8", (out,)), ("I8", (1,)), ("I8", ())] if groups == 1 else [])
    return [("I32", (words, groups)), *unpacked] if packing == "packed" else unpacked
