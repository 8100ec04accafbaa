"""Mixture of experts (Shazeer et al. 2017): a router chooses a few MLPs for each token and weighs what they return.

    x ─▶ router ─▶ (experts, weights) of each token ─┐
    └──────────────▶ rows sorted by expert ─▶ one product per expert ─▶ back in order ─▶ Σ weight × output ─▶ + shared

Experts are chosen as transformers chooses them: the same scores in the same dtype, and torch.topk for ties. A layer's
projections are `Linear`s, two for each expert, so that their products have the fastest form, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ..model_config import Choice, ExpertTraits, ModelConfig
from .activations import clamped_swiglu, gated_activation
from .linear import Destination, Linear
from .products import NUMBA, BlockKernel, GroupedProduct, ProductChoice
from .quantized_weights import WeightForm
from .weight_slots import ExpertsSlot, WeightSlot

LEAST_SUM = 1e-12
"""Weights are divided by their sum, or by this if it is smaller."""


class Router:
    """Chooses ``top_k`` experts for each token."""

    def __init__(self, traits: ExpertTraits, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._traits = traits
        self.weight = torch.empty(traits.num_experts, hidden_size, dtype=dtype, device=device)
        self.bias = torch.empty(traits.num_experts, dtype=dtype, device=device) if traits.names.router_bias else None
        self.correction = (
            torch.empty(traits.num_experts, dtype=torch.float32, device=device) if traits.names.correction else None
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> (experts, int64; weights, float32), [tokens, top_k] each."""
        traits, top_k = self._traits, self._traits.top_k
        if traits.routes_in_float32:
            logits = F.linear(x.float(), self.weight.float())
        else:
            logits = F.linear(x, self.weight, self.bias).float()
        if traits.choice in (Choice.LOGITS, Choice.GATES):
            chosen, experts = logits.topk(top_k, dim=-1)
            return experts, chosen.softmax(dim=-1) if traits.choice is Choice.LOGITS else chosen.sigmoid()
        scores = logits.sigmoid() if traits.choice is Choice.SIGMOID else logits.softmax(dim=-1)
        ranked = scores if self.correction is None else scores + self.correction
        if traits.num_groups > 1:
            ranked = self._in_best_groups(ranked)
        experts = ranked.topk(top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if traits.renormalises:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)
        return experts, weights * traits.weight_scale

    def _in_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Scores with -inf outside the best groups: those with the largest score (DeepSeek-V2), or the largest sum of
        their two best (DeepSeek-V3)."""
        groups = ranked.unflatten(1, (self._traits.num_groups, -1))
        strength = groups.topk(self._traits.group_best, dim=-1).values.sum(dim=-1)
        best = strength.topk(self._traits.top_groups, dim=-1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
        return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        names = self._traits.names
        views: dict[str, Destination] = {f"{prefix}.{names.router}.weight": self.weight}
        if self.bias is not None:
            views[f"{prefix}.{names.router}.bias"] = self.bias
        if self.correction is not None:
            # ERNIE 4.5 keeps it as one row.
            view = self.correction[None] if names.correction_is_row else self.correction
            views[f"{prefix}.{names.correction}"] = view
        return views


class Experts:
    """The MLPs: down(act(gate(x)) * up(x)), with weights of their own for each expert."""

    def __init__(self, config: ModelConfig, traits: ExpertTraits, *, dtype: torch.dtype, device: torch.device) -> None:
        size, hidden, names = traits.intermediate_size, config.hidden_size, traits.names
        gate, up, down = names.single
        self._traits = traits
        self._packed = PackedExperts(config, traits, dtype=dtype, device=device) if names.packed is not None else None
        self.gate_up: list[Linear] = []
        self.down: list[Linear] = []
        for expert in range(traits.num_experts):
            weights = self._packed.weights_of(expert) if self._packed is not None else (None,) * 4
            for linears, features, parts, weight, bias in (
                (self.gate_up, hidden, {gate: size, up: size}, weights[0], weights[2]),
                (self.down, size, {down: hidden}, weights[1], weights[3]),
            ):
                linear = Linear(
                    features,
                    parts,
                    bias=traits.has_bias,
                    dtype=dtype,
                    device=device,
                    shared=weight,
                    shared_bias=bias,
                )
                linears.append(linear)
        self._kernel: BlockKernel | None = None
        self._grouped: tuple[ProductChoice, ProductChoice, GroupedProduct, GroupedProduct] | None = None
        """Products of all experts at once, for few rows; and the choices of the products that they stand for."""
        self._activation: Callable[[torch.Tensor], torch.Tensor] = (
            gated_activation(config.activation) if traits.clamp is None else clamped_swiglu(*traits.clamp)
        )

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden]; experts int64, weights float32 [tokens, top_k] -> [tokens, hidden]. Reads the number of
        rows of each expert from the device."""
        tokens, top_k = experts.shape
        by_expert = experts.flatten()
        order = by_expert.argsort(stable=True)
        rows = x.index_select(0, order // top_k)
        if self._traits.choice is Choice.GATES:
            rows = rows * weights.flatten()[order].to(x.dtype).unsqueeze(1)
        counts = torch.bincount(by_expert, minlength=self._traits.num_experts).cpu().numpy()
        products = self._grouped_products(int(counts.max(initial=0)))
        found = self._one_by_one(rows, counts) if products is None else self._at_once(rows, counts, *products)
        outputs = torch.empty_like(found).index_copy_(0, order, found).view(tokens, top_k, x.shape[1])
        if self._traits.choice is Choice.GATES:
            return outputs.sum(dim=1)
        return (outputs * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def use_kernel(self, kernel: BlockKernel | None) -> None:
        """kernel: computes the products of all experts at once, where their layers have the form "numba"."""
        self._kernel = kernel

    def _one_by_one(self, rows: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
        """rows [n, hidden], sorted by expert; counts: int [experts] -> [n, hidden]"""
        found, start = torch.empty_like(rows), 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                own = slice(start, start + count)
                found[own] = self.down[expert](self._activation(self.gate_up[expert](rows[own])))
                start += count
        return found

    def _at_once(
        self, rows: torch.Tensor, counts: np.ndarray, gate_up: GroupedProduct, down: GroupedProduct
    ) -> torch.Tensor:
        """The same numbers from two calls of a kernel."""
        used = np.flatnonzero(counts)
        return down(self._activation(gate_up(rows, used, counts[used])), used, counts[used])

    def _grouped_products(self, most_rows: int) -> tuple[GroupedProduct, GroupedProduct] | None:
        """Products of all experts; None where the layers have others. most_rows: of the expert that has most."""
        first, second = self.gate_up[0].choice, self.down[0].choice
        if self._kernel is None or {first.form(most_rows), second.form(most_rows)} != {NUMBA}:
            return None
        if self._grouped is None or self._grouped[:2] != (first, second):
            gate_up, down = (_group_of(linears, self._kernel) for linears in (self.gate_up, self.down))
            if gate_up is None or down is None:
                self._kernel = None
                return None
            self._grouped = first, second, gate_up, down
        return self._grouped[2:]

    def keep_packed(self, form: WeightForm | None) -> None:
        """Load weights that a checkpoint holds in one tensor as it has them, or in the form: see `Linear.keep_packed`,
        which does it for all others."""
        if self._packed is not None:
            self._packed.keep_packed(
                [[linear.keep_own_packed(form) for linear in linears] for linears in (self.gate_up, self.down)]
            )

    def release_packed(self) -> None:
        """Keep no more references to weights than the `Linear`s, which may replace them."""
        self._packed = None

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        if self._packed is not None:
            return self._packed.checkpoint_views(prefix)
        views: dict[str, Destination] = {}
        for expert, pair in enumerate(zip(self.gate_up, self.down, strict=True)):
            for linear in pair:
                views |= linear.checkpoint_views(f"{prefix}.experts.{expert}")
        return views


def _group_of(linears: list[Linear], kernel: BlockKernel) -> GroupedProduct | None:
    """One product for all these layers of one size; None if one of them does not read blocks."""
    blocks = [linear.blocks for linear in linears if linear.blocks is not None]
    if len(blocks) < len(linears):
        return None
    size = linears[0].out_features, linears[0].in_features
    return kernel.prepare_group(blocks, size, [linear.bias for linear in linears])


class PackedExperts:
    """Weights that a checkpoint holds as one tensor for all experts."""

    def __init__(self, config: ModelConfig, traits: ExpertTraits, *, dtype: torch.dtype, device: torch.device) -> None:
        count, size, hidden = traits.num_experts, traits.intermediate_size, config.hidden_size

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(count, *shape, dtype=dtype, device=device)

        self._weights = [empty(2 * size, hidden), empty(hidden, size)]
        self._slots: list[ExpertsSlot] = []
        """Take the weights, if they are kept packed."""
        self._biases = (empty(2 * size), empty(hidden)) if traits.has_bias else None
        self._names = traits.names

    def weights_of(self, expert: int) -> tuple[torch.Tensor | None, ...]:
        """Weights of gate and up, and of down; then their biases, or None."""
        biases = self._biases or (None, None)
        return (
            *(weight[expert] for weight in self._weights),
            *(None if bias is None else bias[expert] for bias in biases),
        )

    def keep_packed(self, slots: list[list[list[WeightSlot]]]) -> None:
        """slots: of gate and up, and of down, those of each expert."""
        self._weights = []
        self._slots = [ExpertsSlot(each, is_transposed=self._names.is_transposed) for each in slots]

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        assert self._names.packed is not None
        views: dict[str, Destination] = {}
        for number, name in enumerate(self._names.packed):
            if self._slots:
                views[f"{prefix}.{name}"] = self._slots[number]
            else:
                weight = self._weights[number]
                views[f"{prefix}.{name}"] = weight.transpose(1, 2) if self._names.is_transposed else weight
            if self._biases is not None:
                views[f"{prefix}.{name}_bias"] = self._biases[number]
        return views
