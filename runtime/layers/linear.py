"""Linear projections. Those that read the same input (q, k, v; gate and up) are fused into one matrix product; each
part keeps its own name in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .low_rank import LowRankUpdates
from .products import NUMBA, PLAIN, BlockKernel, PackedBlocks, PackedKernel, ProductChoice, Source
from .quantized_weights import Float8Weight, PackedWeight, QuantizedWeight, WeightForm
from .weight_slots import ExpertsSlot, WeightSlot, in_dtype, pick_outputs, widened

Destination = torch.Tensor | WeightSlot | ExpertsSlot
"""Where a tensor of the checkpoint goes."""

USUAL_MULTIPLE = 64
"""Every kernel takes a multiple of so many outputs."""


class Linear:
    """y = x Wᵀ + b for one or several projections of the same input, their outputs side by side.

    parts: checkpoint name -> output features, e.g. {"q_proj": 512, "k_proj": 256, "v_proj": 256}.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shared: torch.Tensor | None = None,
        shared_bias: torch.Tensor | None = None,
        multiple: int = 1,
    ) -> None:
        """shared: [out, in], a weight that another layer owns and fills; shared_bias: [out], likewise. multiple: the
        number of outputs is rounded up to one of it, with outputs behind the others that are 0."""
        self.in_features = in_features
        self.dtype = dtype
        self.parts = parts
        size = sum(parts.values())
        self.out_features = out_features = -(-size // multiple) * multiple
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device) if shared is None else shared
        self.weight: torch.Tensor | None = weight
        """[out, in]; None where the product has a copy of its own, or where the weight is packed."""
        self.is_shared = shared is not None
        """True if another layer owns the weight."""
        self._device = device
        self._slots: dict[str, WeightSlot] | None = None
        self.packed: Sequence[PackedBlocks] | None = None
        """The weight in few bits or in 16, where the product reads that."""
        self.bias = (
            torch.empty(out_features, dtype=dtype, device=device) if bias and shared_bias is None else shared_bias
        )
        for tensor in (weight, self.bias):
            if tensor is not None and size < out_features:
                tensor[size:].zero_()
        self.output_order: torch.Tensor | None = None
        """int64 [out]: for each output, its number in the checkpoint; None: the same. See `reorder_outputs`."""
        self._choice = PLAIN
        self._product = PLAIN.prepare(Source(weight, self.bias))
        self.blocks: torch.Tensor | None = None
        """The weight as oneDNN packs it, where the product reads that."""
        self._updates: LowRankUpdates | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]: the parts, and zeros if there are more outputs."""
        y = self._product(x)
        if self._updates is not None:
            self._updates.add_to(y, x)
        return y

    def read_from(self, weight: torch.Tensor) -> None:
        """Give the own weight up and read the same numbers in this memory, [out, in]. Before `use_product`."""
        assert self.weight is not None and weight.shape == self.weight.shape
        self.weight, self._product = weight, PLAIN.prepare(Source(weight, self.bias))

    def keep_packed(self, form: WeightForm | None) -> None:
        """Load the weight as the checkpoint has it, in few bits or in 16, or, if it has floats, in the form (None: as
        floats). Before `checkpoint_views`; then call `pack` before the first product."""
        assert not self.is_shared, "the weight is another layer's"
        self.weight = None
        self._slots = {name: WeightSlot(size, self.in_features, form) for name, size in self.parts.items()}

    def keep_own_packed(self, form: WeightForm | None) -> list[WeightSlot]:
        """The same for a shared weight, which becomes the layer's own; the slots of its parts take it."""
        self.is_shared = False
        self.keep_packed(form)
        assert self._slots is not None
        return list(self._slots.values())

    def pack(self, kernel: PackedKernel | None) -> list[str]:
        """Bring weights that were kept packed into the form in which they are computed. kernel: multiplies by them;
        where it cannot, and without it, they become floats of the layer's dtype. Returns the forms of those in few bits
        that did."""
        if self._slots is None:
            return []
        weights = [in_dtype(slot.weight, self.dtype) for slot in self._slots.values()]
        if self.output_order is not None:
            weights = pick_outputs(weights, self.output_order[: sum(self.parts.values())].cpu())
        self._slots = None
        if kernel is not None:
            spare = self.out_features - sum(self.parts.values())
            try:
                self.packed = kernel.pack([*weights, _zeros_like(weights[-1], spare)] if spare else weights)
            except ValueError:  # there is no kernel for this form or size
                pass
            else:
                self._product = kernel.prepare(self.packed, self.bias, self.dtype)
                return []
        whole = torch.zeros(self.out_features, self.in_features, dtype=self.dtype, device=self._device)
        start = 0
        for weight in weights:
            whole[start : start + weight.shape[0]] = widened(weight, whole.dtype)
            start += weight.shape[0]
        self.weight, self._product = whole, PLAIN.prepare(Source(whole, self.bias))
        return [
            f"{weight.form} × {weight.shape[1]} inputs" if isinstance(weight, QuantizedWeight) else "fp8"
            for weight in weights
            if not isinstance(weight, torch.Tensor)
        ]

    def attach_updates(self, updates: LowRankUpdates) -> None:
        """Add the updates of adapters to what the product gives, from now on."""
        self._updates = updates

    def use_product(self, choice: ProductChoice, kernel: BlockKernel | None = None) -> None:
        """Compute with this product from now on. The weights must have been loaded."""
        if choice != self._choice:
            source = self.source(kernel, reads_weight=choice.keeps_weight)
            self._choice, self._product = choice, choice.prepare(source)
            if choice.keeps_weight:
                self.weight, self.blocks = source.weight, None
            else:
                self.weight, self.blocks = None, source.blocks

    def source(self, kernel: BlockKernel | None = None, *, reads_weight: bool = True) -> Source:
        """The operands of a product. Where the weight was dropped it is unpacked again, bit for bit, or, if no product
        of these operands reads it, replaced by a tensor without contents."""
        if self.blocks is None:
            assert self.weight is not None
            return Source(self.weight, self.bias, kernel)
        shape, dtype = (self.out_features, self.in_features), self.blocks.dtype
        weight = self.blocks.to_dense() if reads_weight else torch.empty(shape, dtype=dtype, device="meta")
        source = Source(weight, self.bias, kernel)
        source.blocks = self.blocks
        return source

    def reorder_outputs(self, order: torch.Tensor) -> None:
        """Output i becomes the checkpoint's output order[i]. Call it once, between loading and `use_product`."""
        order = torch.cat((order, torch.arange(len(order), self.out_features)))
        self.output_order = order = order.to(self._device)
        if self._slots is None:
            assert self.weight is not None
            self.weight.copy_(self.weight[order])
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    @property
    def choice(self) -> ProductChoice:
        return self._choice

    def form(self, rows: int) -> str:
        """The form of the product of so many rows."""
        return self._choice.form(rows)

    def is_recordable(self, rows: int) -> bool:
        """True if the product of so many rows is a call of attention's team."""
        return self.packed is not None or self.form(rows) == NUMBA

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint tensor name -> the part of this layer's memory it fills, or a slot that takes it."""
        assert self.weight is not None or self._slots is not None, "weights are loaded before their product is chosen"
        views: dict[str, Destination] = {}
        start = 0
        for name, size in self.parts.items():
            full = f"{prefix}.{name}" if prefix else name
            if self._slots is not None:
                views[f"{full}.weight"] = self._slots[name]
            elif self.weight is not None:
                views[f"{full}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{full}.bias"] = self.bias[start : start + size]
            start += size
        return views


def _zeros_like(weight: torch.Tensor | PackedWeight, outputs: int) -> torch.Tensor | PackedWeight:
    """Outputs that are 0, for the same inputs, in the same form."""
    if isinstance(weight, torch.Tensor):
        return weight.new_zeros(outputs, weight.shape[1])
    zeros = weight.outputs(torch.zeros(outputs, dtype=torch.int64))
    if isinstance(zeros, Float8Weight):
        return replace(zeros, scales=torch.zeros_like(zeros.scales))
    return replace(zeros, rows=torch.zeros(outputs))
