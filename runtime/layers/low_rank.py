"""Low-rank updates of matrix products, one per adapter, and which tokens of a step use which.

    y = x Wᵀ + b          every token
    y += (x Aᵀ) Bᵀ        the tokens of one adapter, with that adapter's A [rank, in] and B [out, rank]

The idea is LoRA's (Hu et al., 2021). Several adapters in one batch are computed one after another, each for its own
tokens, while the product with W is shared: the idea of Punica and S-LoRA. The scale is part of B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch


class StepAdapters:
    """The adapters of the current step and their tokens. All layers of a model share one object."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, torch.Tensor | None]] = []
        """(key of an adapter, int64 [n]: its tokens; None for all tokens of the step). Empty outside of a step."""

    def set_rows(self, keys: Sequence[str], extend_lens: np.ndarray, device: torch.device) -> None:
        """keys: of each row's adapter, "" for none. extend_lens: int [rows], its new tokens."""
        used = [key for key in dict.fromkeys(keys) if key]
        if len(used) == 1 and all(keys):
            self.parts = [(used[0], None)]
            return
        of_tokens = np.repeat(np.array([used.index(key) if key else -1 for key in keys]), extend_lens)
        self.parts = [
            (key, torch.from_numpy(np.flatnonzero(of_tokens == number)).to(device)) for number, key in enumerate(used)
        ]

    def clear(self) -> None:
        self.parts = []


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The update of one product, or of several that read the same input."""

    a: torch.Tensor
    """[in, ranks]: A transposed, of all outputs side by side."""
    b: list[tuple[slice, slice, torch.Tensor]]
    """(ranks, outputs, B transposed and scaled [rank, outputs]) of each part. Several parts may read the same
    ranks."""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for _, _, b in self.b)


class LowRankUpdates:
    """The updates that adapters add to the output of one linear layer."""

    def __init__(self, step: StepAdapters) -> None:
        self._step = step
        self._updates: dict[str, LowRankUpdate] = {}

    def put_update(self, key: str, update: LowRankUpdate) -> None:
        self._updates[key] = update

    def remove_update(self, key: str) -> None:
        self._updates.pop(key, None)

    def __len__(self) -> int:
        return len(self._updates)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to y [tokens, out], in place, the updates for x [tokens, in]."""
        for key, tokens in self._step.parts:
            update = self._updates.get(key)
            if update is None:
                continue
            if tokens is None:
                low = x @ update.a
                for ranks, outputs, b in update.b:
                    y[:, outputs].addmm_(low[:, ranks], b)
                continue
            low = x.index_select(0, tokens) @ update.a
            for ranks, outputs, b in update.b:
                y[:, outputs].index_add_(0, tokens, low[:, ranks] @ b)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The outputs of one module of a checkpoint, within a layer that computes several side by side."""

    layer: int
    """Number of the layer's product among those of the model; targets of the same product share it."""
    attach: Callable[[LowRankUpdates], None]
    """Make the product add these updates from now on."""
    in_features: int
    size: int
    """Outputs of the module."""
    parts: Sequence[tuple[slice, torch.Tensor | None]]
    """Where they are among those of the product. For each part, int64 [n]: the number of each output in the module;
    None: all, in their order."""


def module_targets(
    layers: Sequence[tuple[Mapping[str, tuple[int, int]], int, torch.Tensor | None, Callable[[LowRankUpdates], None]]],
) -> dict[str, Target]:
    """Targets by module name. layers: of each product, (module name -> its first output in the checkpoint and their
    number, the number of inputs, the order of all outputs, what attaches updates)."""
    targets = {}
    for number, (modules, in_features, order, attach) in enumerate(layers):
        for name, (start, size) in modules.items():
            parts = [(slice(start, start + size), None)] if order is None else _parts(order.cpu() - start, size)
            targets[name] = Target(number, attach, in_features, size, parts)
    return targets


def _parts(numbers: torch.Tensor, size: int) -> list[tuple[slice, torch.Tensor | None]]:
    """Where a module's outputs are that lie among those of others, such as the gates of attention. numbers: int64
    [out]: of each output of the product in the module, beyond 0 … size for those of others."""
    own = torch.nonzero((numbers >= 0) & (numbers < size))[:, 0]
    runs = own.tensor_split((torch.nonzero(own.diff() > 1)[:, 0] + 1).tolist())
    return [(slice(int(run[0]), int(run[-1]) + 1), numbers[run]) for run in runs]
