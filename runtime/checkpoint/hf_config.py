"""Reads config.json and generation_config.json into a ModelConfig: all that Baton needs to know of a model. No torch.

Both spellings are read: transformers 5 writes `rope_parameters` and `dtype`, older files `rope_theta` + `rope_scaling`
and `torch_dtype`. Anything that would silently give wrong outputs (unknown rope scaling, unknown quantisation, ...)
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from ...scheduler.sampling_params import SamplingParams
from ..model_config import ACTIVATIONS, DecoderTraits, HeadKind, LabelActivation, ModelConfig
from ..models.registry import ARCHITECTURES, CONFIGS, decoder_of
from ..models.traits import UnsupportedVariant
from .model_files import ModelLoadError, UnsupportedModelError
from .pooling_files import read_embedding_config
from .quantization_config import parse_quantization
from .rope_config import layer_ropes
from .tensor_names import TIED_HEAD
from .text_part import text_part
from .weight_source import has_weights, open_source


def load_model_config(folder: Path, *, context_length: int = 0) -> ModelConfig:
    """Read a model folder. context_length 0 takes the model's. Raises ModelLoadError, which says what to change."""
    raw = _read_json(folder / "config.json")
    generation = load_generation_config(folder)
    config = parse_model_config(raw, generation, context_length=context_length, source=str(folder / "config.json"))
    embedding = read_embedding_config(folder)
    if embedding.is_embedder and config.head == "language" and not config.tie_word_embeddings and _lacks_head(folder):
        config = replace(config, head="none")
    return replace(config, embedding=embedding, traits=_with_packed_experts(config, folder))


PACKED_EXPERTS = "experts.gate_up_proj", "experts.down_proj"
"""Names of the weights of all experts of a layer, below its block, in files that hold them as one tensor each."""


def _with_packed_experts(config: ModelConfig, folder: Path) -> DecoderTraits:
    """The traits, with experts' weights as the files have them: some checkpoints of an architecture hold those of all
    experts of a layer as one tensor, [experts, out, in] or [experts, in, out]."""
    traits, experts = config.traits, config.traits.experts
    if experts is None or experts.names.packed is not None or not has_weights(folder):
        return traits
    _, down = PACKED_EXPERTS
    tensors = open_source(folder).tensors
    shapes = [tensor.shape for name, tensor in tensors.items() if name.endswith(f".{down}")]
    if not shapes:
        return traits
    plain = experts.num_experts, config.hidden_size, experts.intermediate_size
    names = replace(experts.names, packed=PACKED_EXPERTS, is_transposed=shapes[0] != plain)
    return replace(traits, experts=replace(experts, names=names))


def _lacks_head(folder: Path) -> bool:
    """True if the weights are there, and have no head. Raises ModelLoadError."""
    return has_weights(folder) and TIED_HEAD not in open_source(folder).tensors


def parse_model_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    context_length: int = 0,
    source: str = "config.json",
) -> ModelConfig:
    """`load_model_config` for parsed JSON; errors call it ``source``. Of a multimodal model, the text part is read."""
    raw = text_part(raw) or raw

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ModelLoadError(f"{source} has no {key!r}; is it the config of a decoder language model?")
        return raw[key]

    architecture, decoder, head = _supported_architecture(raw, source)
    raw = _usual_keys(raw, decoder, source)
    num_heads, hidden_size = need("num_attention_heads"), need("hidden_size")
    limit = need("max_position_embeddings")
    if context_length < 0 or context_length > limit:
        raise ModelLoadError(
            f"--context-length {context_length} is outside 1..{limit}: the model was trained on {limit} positions "
            "(max_position_embeddings); lower it, or pass 0 to take the model's"
        )
    need("num_hidden_layers")
    try:
        traits = ARCHITECTURES[decoder](raw)
    except KeyError as missing:
        raise ModelLoadError(f"{source} has no {missing}, which {architecture} needs") from None
    except UnsupportedVariant as refused:
        raise UnsupportedModelError(f"{source}: {refused}") from None
    except ValueError as refused:
        raise ModelLoadError(f"{source}: {refused}") from None
    _check_experts(traits, source)
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or hidden_size // num_heads
    if traits.latent is not None:
        num_kv_heads, head_dim = num_heads, traits.latent.rotary_size
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelLoadError(
            f"{source}: {num_heads} heads, {num_kv_heads} KV heads, head_dim {head_dim}: "
            "heads must be a multiple of KV heads and head_dim even"
        )
    activation = traits.activation or raw.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{source}: hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    if len(traits.layer_windows) != raw["num_hidden_layers"]:
        raise ModelLoadError(
            f"{source}: layer_types has {len(traits.layer_windows)} entries for {raw['num_hidden_layers']} layers"
        )
    ropes = layer_ropes(
        raw,
        traits,
        head_dim=head_dim,
        max_positions=limit,
        context_length=context_length or limit,
        source=source,
    )
    eos = (generation or {}).get("eos_token_id")
    ties = bool(raw.get("tie_word_embeddings", traits.ties_by_default))
    labels = _labels(raw, source) if head == "labels" else ()
    return ModelConfig(
        head="language" if head == "none" and ties else head,
        labels=labels,
        label_activation=label_activation(raw, len(labels), source) if labels else "none",
        architecture=architecture,
        vocab_size=need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=need("rms_norm_eps"),
        activation=activation,
        ropes=ropes,
        traits=traits,
        tie_word_embeddings=ties,
        dtype=_parse_dtype(raw, source),
        context_length=context_length or limit,
        max_position_embeddings=limit,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(eos if eos is not None else raw.get("eos_token_id")),
    )


def _labels(raw: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Names of a classification head's classes. transformers leaves out what it assumes: two of them."""
    given = raw.get("id2label")
    if given is None:
        count = raw.get("num_labels", 2)
        if not isinstance(count, int) or count < 1:
            raise ModelLoadError(f"{source}: num_labels is {count!r}; it takes a number of classes")
        return tuple(f"LABEL_{label}" for label in range(count))
    try:
        names = {int(label): str(name) for label, name in given.items()}
        return tuple(names[label] for label in range(len(names)))
    except (AttributeError, TypeError, ValueError, KeyError):
        raise ModelLoadError(f"{source}: id2label must name the classes 0 to their number minus one") from None


def _usual_keys(raw: Mapping[str, Any], decoder: str, source: str) -> Mapping[str, Any]:
    """The config with the keys that most architectures have. Raises ModelLoadError."""
    try:
        return CONFIGS[decoder](raw) if decoder in CONFIGS else raw
    except KeyError as missing:
        raise ModelLoadError(f"{source} has no {missing}, which {decoder} needs") from None


_SAVED_ACTIVATIONS: dict[str, LabelActivation] = {"Sigmoid": "sigmoid", "Identity": "none"}
"""By the last part of a name such as torch.nn.modules.linear.Identity."""


def label_activation(raw: Mapping[str, Any], num_labels: int, source: str) -> LabelActivation:
    """What makes scores of the logits of classes, as in vLLM: the problem's type says; else one class is a sigmoid,
    several are a softmax. For one class, the activation that sentence-transformers has saved comes first, since its
    cross-encoders use it. Raises ModelLoadError, which calls the config ``source``."""
    saved = raw.get("sentence_transformers")
    function = saved.get("activation_fn") if isinstance(saved, Mapping) else None
    function = function or raw.get("sbert_ce_default_activation_function")
    if num_labels == 1 and function is not None:
        if (found := _SAVED_ACTIVATIONS.get(str(function).rpartition(".")[2])) is None:
            raise ModelLoadError(
                f"{source}: activation_fn {function!r} of sentence-transformers is not one of "
                f"{', '.join(_SAVED_ACTIVATIONS)}"
            )
        return found
    problem_type = raw.get("problem_type")
    usual: LabelActivation = "softmax" if num_labels > 1 else "sigmoid"
    kinds: dict[str | None, LabelActivation] = {
        None: usual,
        "single_label_classification": usual,
        "multi_label_classification": "sigmoid",
        "regression": "none",
    }
    if problem_type not in kinds:
        raise ModelLoadError(f"{source}: problem_type {problem_type!r} is not one of {', '.join(filter(None, kinds))}")
    return kinds[problem_type]


def _supported_architecture(raw: Mapping[str, Any], source: str) -> tuple[str, str, HeadKind]:
    """The model's architecture, that of `ARCHITECTURES` with its decoder, and its head. Raises ModelLoadError if it, or
    this variant of it, cannot be served."""
    names = raw.get("architectures") or []
    found = next(((name, *decoder) for name in names if (decoder := decoder_of(name)) is not None), None)
    if found is None:
        near = get_close_matches(names[0], ARCHITECTURES, n=3) if names else []
        raise UnsupportedModelError(
            f"{source}: architecture {', '.join(names) or 'missing'} is not supported; "
            + (f"similar names are {', '.join(near)}; " if near else "")
            + f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    parse_quantization(raw, source)
    if raw.get("is_causal") is False or raw.get("use_bidirectional_attention"):
        raise ModelLoadError(f"{source}: its attention is bidirectional (an encoder); causal models are served")
    return found


def _check_experts(traits: DecoderTraits, source: str) -> None:
    """Raises ModelLoadError if the numbers of experts and groups do not fit each other."""
    experts = traits.experts
    if experts is None:
        return
    if not 0 < experts.top_k <= experts.num_experts:
        raise ModelLoadError(f"{source}: a token uses {experts.top_k} experts of {experts.num_experts}")
    if experts.num_experts % experts.num_groups or not 0 < experts.top_groups <= experts.num_groups:
        raise ModelLoadError(
            f"{source}: {experts.num_experts} experts cannot be divided into {experts.num_groups} groups, of which "
            f"{experts.top_groups} are used; correct n_group and topk_group"
        )
    if experts.num_groups > 1 and experts.group_best > experts.num_experts // experts.num_groups:
        raise ModelLoadError(
            f"{source}: groups are compared by their {experts.group_best} best experts, but {experts.num_experts} "
            f"experts in {experts.num_groups} groups are fewer; correct n_group"
        )
    if experts.top_k > experts.num_experts // experts.num_groups * experts.top_groups:
        raise ModelLoadError(
            f"{source}: a token uses {experts.top_k} experts, but {experts.top_groups} of {experts.num_groups} groups "
            f"hold only {experts.num_experts // experts.num_groups * experts.top_groups}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}; give the folder of a Hugging Face model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def _parse_dtype(raw: Mapping[str, Any], source: str) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelLoadError(f"{source}: dtype {dtype!r} is not supported; supported are float32, float16, bfloat16")
    return dtype


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


GENERATION_FILE = "generation_config.json"

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The recommendations that are used: SGLang's five, and the limit that vLLM reads as well. As there, ``do_sample`` is
ignored: a client that wants no sampling sends ``temperature: 0``."""


def load_generation_config(folder: Path) -> dict[str, Any]:
    """Parse generation_config.json, which names the end tokens and the recommended sampling; {} without the file.
    Raises ModelLoadError."""
    file = folder / GENERATION_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError, too
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def load_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling parameters that generation_config.json recommends, in SGLang's names. Raises ModelLoadError for a
    value that no request could have."""
    given = load_generation_config(folder)
    defaults = {name: given[name] for name in SAMPLING_NAMES if given.get(name) is not None}
    if defaults.get("top_k") == 0:
        del defaults["top_k"]  # no limit, in transformers
    for name, value in defaults.items():
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise ModelLoadError(
                f"{folder / GENERATION_FILE}: {name} is {value!r} ({error}); correct the file, or ignore "
                "its recommendations with --sampling-defaults openai"
            ) from None
    return defaults
