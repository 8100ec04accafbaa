"""Token embedding and LM head; tied models share one matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from .linear import Destination, Linear
from .norm import RMSNorm
from .ops import Ops
from .products import LookUp, PackedBlocks, PackedKernel, Product
from .quantized_weights import QuantizedWeight, WeightForm
from .weight_slots import UnreadSlot, WeightSlot, in_dtype, widened


class LogitsProduct(Protocol):
    """The head's product where it is not that of a `Linear`, which rounds to the model's dtype."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, /) -> torch.Tensor:
        """x: float32 [rows, hidden_size]; weight: [vocab_size, hidden_size], in the model's dtype -> float32
        [rows, vocab_size], contiguous."""
        ...


def widened_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See LogitsProduct. Copies the weight each time."""
    return F.linear(x, weight.float())


class Embedding:
    """One row per token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ops = ops
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.dtype = dtype
        self._slot: WeightSlot | None = None
        self._look_up: LookUp | None = None
        """Looks packed rows up; None: they are a matrix."""

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden_size]"""
        if self._look_up is not None:
            return self._look_up(input_ids)
        return self._ops.look_up(input_ids, self.weight, self.dtype)

    def read_from(self, rows: torch.Tensor) -> None:
        """Give the own matrix up and look tokens up in this one: the same numbers, in any float dtype."""
        assert rows.shape == self.weight.shape
        self.weight = rows

    def keep_packed(self, form: WeightForm | None, *, is_read: bool) -> None:
        """Load the matrix in few bits, see `Linear.keep_packed`; is_read: False leaves it in its file, for
        `read_from`."""
        out, into = self.weight.shape
        self._slot = WeightSlot(out, into, form) if is_read else UnreadSlot(out, into)

    def pack(self, kernel: PackedKernel | None, rows: torch.Tensor | None) -> torch.Tensor | Sequence[PackedBlocks]:
        """Bring a matrix that was kept packed into the form in which it is read. rows: the checkpoint's own numbers, as
        floats in its file. Tokens are looked up there, unless the matrix is in few bits: then a head that shares it has
        it in memory. Returns the matrix for such a head: packed, or, without a kernel for it, as floats."""
        slot, self._slot = self._slot, None
        if slot is None:
            return self.weight
        if isinstance(slot, UnreadSlot):
            assert rows is not None
            self.weight = rows.to(self.weight.device)  # mapped, on a CPU
            return self.weight
        weight, like = in_dtype(slot.weight, self.dtype), self.weight
        shared: torch.Tensor | Sequence[PackedBlocks] | None = None
        if kernel is not None and isinstance(weight, QuantizedWeight | torch.Tensor):
            with contextlib.suppress(ValueError):  # there may be no kernel for this form or size
                shared = kernel.pack([weight])
        if shared is None:
            self.weight = shared = widened(weight, self.dtype).to(like.device)
        elif isinstance(weight, QuantizedWeight) and kernel is not None:
            self._look_up, self.weight = kernel.look_up(shared, self.dtype), like.new_empty(0)
        elif rows is not None:
            self.weight = rows.to(like.device)
        elif isinstance(weight, torch.Tensor):
            self.weight = weight
        return shared

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        return {f"{prefix}.weight": self.weight if self._slot is None else self._slot}


class LMHead:
    """Hidden states -> logits of the vocabulary, or of classes. ``tied_to``: an embedding that shares its matrix with
    this head. ``name``: that of its weight in the checkpoint."""

    product: LogitsProduct | None = None
    """Computes the logits, if it is set, from a plain weight."""
    packed_product: Product | None = None
    """Computes them, if it is set, from a packed weight: float32."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        name: str = "lm_head",
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.is_tied = tied_to is not None
        self.linear = Linear(
            hidden_size,
            {name: vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            shared=tied_to.weight if tied_to is not None else None,
        )

    def __call__(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[rows, hidden_size], to be normed -> float32 [rows, vocab_size], contiguous: sampling reads whole rows."""
        if self.packed_product is not None:
            return self.packed_product(norm.in_float32(hidden))
        if self.product is None:
            return self.linear(norm(hidden)).to(torch.float32)
        assert self.linear.weight is not None, "the weight was repacked for another product"
        return self.product(norm.in_float32(hidden), self.linear.weight)

    def pack(self, kernel: PackedKernel | None, of_embedding: torch.Tensor | Sequence[PackedBlocks]) -> None:
        """Bring a weight that was kept packed into the form in which it is computed. of_embedding: what
        `Embedding.pack` returned. Logits of a packed weight are not rounded to the model's dtype."""
        packed: torch.Tensor | Sequence[PackedBlocks] | None = of_embedding
        if not self.is_tied:
            self.linear.pack(kernel)
            packed = self.linear.packed
        if isinstance(packed, torch.Tensor):
            self.linear.read_from(packed)
        elif packed is not None:
            assert kernel is not None, "it has packed the weight"
            self.packed_product = kernel.prepare(packed, None, torch.float32)

    def checkpoint_views(self) -> dict[str, Destination]:
        return {} if self.is_tied else self.linear.checkpoint_views("")
