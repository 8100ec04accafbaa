"""The adapters in a model's layers: where their updates are added, and which rows of a step use which.

    AdapterFile ──prepare──▶ updates on the device, one per layer ──install──▶ the layers ──▶ steps with that adapter
                 any thread                                        between two steps

Each linear layer that an adapter may update is a `Target`. A layer has no updates, and costs nothing, before the first
adapter that updates it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoint.weight_files import shorten
from ..layers.low_rank import LowRankUpdate, LowRankUpdates, StepAdapters, Target
from .adapter_config import AdapterError
from .adapter_files import AdapterFile, LowRankFactors


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter on the device, in the form in which the layers compute it."""

    key: str
    rank: int
    num_modules: int
    updates: dict[int, LowRankUpdate]
    """By `Target.layer`."""

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.updates.values())


class AdapterWeights:
    """Owns the adapters' weights in the layers of one model. `prepare` may run in any thread; call all else between
    two steps."""

    def __init__(self, targets: Mapping[str, Target], *, dtype: torch.dtype, device: torch.device) -> None:
        """targets: by module name in a checkpoint of the text model."""
        self._targets = targets
        self._dtype, self._device = dtype, device
        self._step = StepAdapters()
        self._layers: dict[int, LowRankUpdates] = {}
        self._installed: dict[str, PreparedAdapter] = {}

    @property
    def keys(self) -> set[str]:
        """Keys of the adapters that a step may use."""
        return set(self._installed)

    @torch.inference_mode()
    def prepare(self, file: AdapterFile) -> PreparedAdapter:
        """Bring an adapter to the device. Raises AdapterError for one that does not fit this model."""
        if unknown := [module for module in file.factors if module not in self._targets]:
            raise AdapterError(
                f"the adapter updates modules that cannot be updated here: {shorten(unknown)}. It is of another base "
                "model, or updates experts, embeddings, norms or the head, which adapters cannot do here; merge it "
                "into the weights with peft's merge_and_unload, and serve those"
            )
        by_layer: dict[int, list[tuple[Target, LowRankFactors]]] = {}
        for module, factors in file.factors.items():
            target = self._targets[module]
            found, expected = (factors.a.shape[1], len(factors.b)), (target.in_features, target.size)
            if found != expected:
                raise AdapterError(
                    f"the adapter is of another base model: it updates {module} with {found[0]} inputs and {found[1]} "
                    f"outputs; here it has {expected[0]} and {expected[1]}"
                )
            by_layer.setdefault(target.layer, []).append((target, factors))
        updates = {layer: self._side_by_side(parts) for layer, parts in by_layer.items()}
        return PreparedAdapter(file.digest, file.rank, len(file.factors), updates)

    def install(self, adapter: PreparedAdapter) -> None:
        """Let steps use an adapter."""
        for module in self._targets.values():
            if module.layer in adapter.updates and module.layer not in self._layers:
                self._layers[module.layer] = LowRankUpdates(self._step)
                module.attach(self._layers[module.layer])
        for layer, update in adapter.updates.items():
            self._layers[layer].put_update(adapter.key, update)
        self._installed[adapter.key] = adapter

    def remove(self, key: str) -> None:
        """Drop an adapter's weights. No later step may use it."""
        adapter = self._installed.pop(key, None)
        if adapter is not None:
            for layer in adapter.updates:
                self._layers[layer].remove_update(key)

    def begin_step(self, keys: Sequence[str], extend_lens: np.ndarray) -> None:
        """Have the next step compute with these adapters. keys: of each row, "" for none; extend_lens: int [rows]."""
        if missing := {key for key in keys if key and key not in self._installed}:
            raise RuntimeError(f"a step uses adapters that are not installed: {shorten(missing)}")
        self._step.set_rows(keys, extend_lens, self._device)

    def end_step(self) -> None:
        self._step.clear()

    def _side_by_side(self, parts: list[tuple[Target, LowRankFactors]]) -> LowRankUpdate:
        outputs, first = [], 0
        for target, factors in parts:
            ranks = slice(first, first := first + len(factors.a))
            for part, numbers in target.parts:
                b = factors.b if numbers is None else factors.b[numbers]
                outputs.append((ranks, part, b.T.to(self._device, self._dtype).contiguous()))
        a = torch.cat([factors.a.to(self._device, self._dtype) for _, factors in parts])
        if not all(factor.isfinite().all() for factor in (a, *(b for _, _, b in outputs))):
            raise AdapterError(f"the adapter's numbers, scaled, are too large for {self._dtype}")
        return LowRankUpdate(a.T.contiguous(), outputs)
