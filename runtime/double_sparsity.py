"""The file of heavy channels for `attention/double_sparse.py`: reads it, and finds channels for it.

The form is SGLang's and the paper's: {"model.layers.0.self_attn.qk_proj": [[channel, …] for each KV head], …}, heaviest
first; "q_proj" and "k_proj" are found by queries and keys alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..attention.backend import AttentionBackend, AttentionBatch, AttentionSpec
from ..attention.double_sparse import Sparsity, is_sparse_layer, new_slots
from ..memory_pool.kv_pool import KVPool
from ..memory_pool.kv_rows import read_rows, select_rows
from .checkpoint.model_files import ModelLoadError
from .config import ModelArgs

KINDS = ("qk", "q", "k")
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.")


def channel_key(layer: int, kind: str) -> str:
    """The name of a layer's lists in the file."""
    return f"model.layers.{layer}.self_attn.{kind}_proj"


def load_sparsity(args: ModelArgs, specs: Sequence[AttentionSpec], device: torch.device) -> Sparsity:
    """specs: of the model's attention layers, in their order. Raises ModelLoadError."""
    layers = sparse_layers(specs)
    path = Path(args.ds_channel_config_path)
    content = _read_file(path)
    numbers = [int(found[1]) for name in content if (found := LAYER.match(name))]
    if max(numbers, default=0) >= len(specs):
        raise ModelLoadError(
            f"--ds-channel-config-path: {path} has channels of layer {max(numbers)}, but this model has only "
            f"{len(specs)} layers with attention; make a file for this model with baton ds-channels"
        )
    orders = {}
    for layer, spec in layers.items():
        name = channel_key(layer, args.ds_heavy_channel_type)
        if name not in content:
            raise ModelLoadError(
                f"--ds-channel-config-path: {path} has no {name}; make a file for this model with baton ds-channels"
            )
        if args.ds_heavy_channel_num > spec.head_dim:
            raise ModelLoadError(
                f"--ds-heavy-channel-num is {args.ds_heavy_channel_num}, but keys have {spec.head_dim} channels"
            )
        orders[spec.layer_id] = _read_order(content[name], spec, args.ds_heavy_channel_num, f"{path}: {name}")
    return Sparsity(
        channels=args.ds_heavy_channel_num,
        tokens=args.ds_heavy_token_num,
        threshold=args.ds_sparse_decode_threshold,
        orders={layer: order.to(device) for layer, order in orders.items()},
    )


def sparse_layers(specs: Sequence[AttentionSpec]) -> dict[int, AttentionSpec]:
    """The layers that sparse decodes make sparse, by their number; of layers that share keys only the first. Raises
    ModelLoadError if there is none."""
    if any(spec.values_in_keys for spec in specs):
        raise ModelLoadError("--enable-double-sparsity: this model keeps latents, which have no keys to choose by")
    found: dict[int, AttentionSpec] = {}
    for layer, spec in enumerate(specs):
        if is_sparse_layer(spec) and spec.layer_id not in {known.layer_id for known in found.values()}:
            found[layer] = spec
    if not found:
        raise ModelLoadError("--enable-double-sparsity: every layer of this model sees only a window or a chunk anyway")
    return found


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"--ds-channel-config-path: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"--ds-channel-config-path: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"--ds-channel-config-path: {path} is no JSON object")
    return content


def _read_order(lists: Any, spec: AttentionSpec, channels: int, where: str) -> torch.Tensor:
    """int64 [kv_heads, head_dim]: the first ``channels`` of the list, then the others. The whole list is checked, which
    finds files of models with larger heads."""
    if not isinstance(lists, list) or len(lists) != spec.num_kv_heads:
        raise ModelLoadError(f"{where} must have a list for each of the {spec.num_kv_heads} KV heads")
    rows = []
    for head, given in enumerate(lists):
        entries = given if isinstance(given, list) else []
        is_valid = all(type(channel) is int and 0 <= channel < spec.head_dim for channel in entries)
        if not is_valid or len(set(entries)) < max(channels, len(entries)):
            raise ModelLoadError(
                f"{where}, head {head}: must have at least {channels} channels from 0 to {spec.head_dim - 1}, all "
                "different"
            )
        heavy = entries[:channels]
        rows.append(heavy + sorted(set(range(spec.head_dim)) - set(heavy)))
    return torch.tensor(rows)


class ChannelMeter:
    """AttentionBackend that sums up how large each channel of queries and keys is, and leaves attention to another."""

    name: ClassVar[str] = "channel_meter"

    def __init__(self, kv_pool: KVPool, inner: AttentionBackend, specs: Sequence[AttentionSpec]) -> None:
        self._pool, self._inner = kv_pool, inner
        self._by_spec = {spec: layer for layer, spec in sparse_layers(specs).items()}
        self._sums: dict[tuple[int, str], torch.Tensor] = {}
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan."""
        self._batch = batch
        self._inner.plan(batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        layer = self._by_spec.get(spec)
        if layer is not None and self._batch is not None:
            rows = select_rows(self._pool.k[spec.layer_id], new_slots(self._batch))
            keys = read_rows(rows, spec.head_dim, torch.float64).abs()
            queries = q.reshape(len(q), spec.num_kv_heads, spec.group, -1).double().abs().sum(dim=2)
            for kind, size in (("q", queries.sum(0)), ("k", keys.sum(0))):
                self._sums[layer, kind] = self._sums.get((layer, kind), 0) + size
        return self._inner.run(spec, q, sinks)

    def channels(self) -> dict[str, list[list[int]]]:
        """The content of the file: all channels of each KV head, those with the largest mean first; of "qk" the product
        of both means. Raises ValueError where queries or keys were not finite."""
        found = {}
        for layer in self._by_spec.values():
            q, k = self._sums[layer, "q"], self._sums[layer, "k"]
            if not (q.isfinite().all() and k.isfinite().all()):
                raise ValueError(
                    f"queries or keys of layer {layer} are not finite; if --dtype is float16, try float32 or bfloat16"
                )
            for kind, size in zip(KINDS, (q * k, q, k), strict=True):
                found[channel_key(layer, kind)] = size.argsort(dim=1, descending=True).tolist()
        return found
