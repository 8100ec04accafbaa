"""Chooses the next token of every request of a batch from its logits.

Order, as in SGLang and vLLM:

    logit_bias, penalties → bad words → allowed tokens → min_new_tokens (no eos, no stop id yet)
                          → temperature → top_k → top_p → min_p → draw

All bans come after all arithmetic on logits, so that no sum or quotient lifts a ban.

The same request gets the same token in any batch: tokens are ranked in a total order (`ranking`), the noise of a draw
depends on (seed, output position, token id) alone (`noise`), and sums that decide a cut do not depend on other rows
(`ops`, and its faster twins).

With each token comes the row's highest logit, which is not finite if the row is unusable (`Sampled.peaks`), and, where
anything was banned, the token's own logit, which reveals a banned token (`Sampled.chosen`).

Nothing here waits for the device: `device_copy.upload` sends what a step needs, and the tokens stay on the device.

Cost per row: greedy, an argmax; with top_k, a selection of the largest top_k of the batch (one pass over the
vocabulary); with top_p alone, see `SamplingOps.draw_nucleus`; else one pass of noise over the vocabulary. Rows are
worked on in slices, so that temporary memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import torch

from ...scheduler.constraints.constraint import AllowedTokens
from ...scheduler.sampling_params import SamplingParams
from ..runner.device_copy import upload
from .banned_tokens import BanPlan, ban_tokens
from .noise import draw_keys
from .ops import TORCH_OPS, Filters, SamplingOps
from .penalties import PendingTokens, SeenTokens, apply_penalties
from .ranking import SLICE_ELEMENTS
from .sequences import SequenceState
from .token_masks import allow_only

MAX_RANKED_TOP_K = 4096
"""A larger top_k takes a full sort, in a group of its own, so that it does not widen the others' work."""

MIN_TOP_P = 1e-9
"""Smaller ones are raised to this, which keeps the likeliest token alone as well; they could be 0 in float32."""


@dataclass(slots=True, frozen=True)
class Sampled:
    """The next token of each row, on the device."""

    ids: torch.Tensor
    """int64 [n]"""
    peaks: torch.Tensor
    """float32 [n]: the highest of the row's logits as they came from the model. It is NaN or infinite where a logit is
    NaN or +inf, or all are -inf; the row's token is undefined then."""
    chosen: torch.Tensor | None = None
    """float32 [n]: the logit of each row's token after all bans; -inf or NaN for a token that is banned. None where
    nothing is banned in any row."""


@dataclass(slots=True)
class _Group:
    """Rows of the batch that are drawn in the same way."""

    rows: slice | torch.Tensor
    """Their rows of the logits: a slice where they lie side by side, else int64 [m] on the device."""
    filters: Filters
    kind: _Kind
    width: int
    """Tokens to rank, where the kind is "ranked"."""


_Kind = Literal["ranked", "nucleus", "all"]
"""How to find the tokens that may be drawn: among the first top_k, by top_p alone, or by min_p at most."""


@dataclass(slots=True)
class _Plan:
    """All that stays the same while the same sequences sample together."""

    sequences: list[SequenceState]
    seeds: np.ndarray
    greedy_rows: torch.Tensor | None
    """int64 [m]; None: all rows are greedy."""
    groups: list[_Group]
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """row, token id, value of each logit_bias entry; minus infinity for a token that is always banned."""
    bans: BanPlan | None
    """Plan for the rows with bans that depend on their output."""
    min_new_rows: list[int]
    penalty_rows: list[int]
    seen: list[SeenTokens]
    """Tokens seen by the penalty rows, one entry for each."""


class Sampler:
    """See the module docstring. Owns nothing but the plan of the last batch."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        ops: SamplingOps = TORCH_OPS,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = torch.device(device)
        self.ops = ops
        """The operations that this device draws with."""
        self._slice_elements = SLICE_ELEMENTS[self._device.type]
        self._plan: _Plan | None = None

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence[SequenceState],
        positions: np.ndarray,
        allowed: AllowedTokens | None = None,
        pending: PendingTokens | None = None,
    ) -> Sampled:
        """The next token of each row.

        logits: float32 [n, vocab], not changed. sequences: one for each row. positions: int [n], how many output
        tokens come before the sampled one.
        allowed: the only tokens that the rows it names may get; it overrides all other parameters. Other rows may get
        any. pending: output tokens of a step in flight, which the sequences do not have yet.
        """
        plan = self._plan_for(sequences)
        adjusted = self._adjust(logits, plan, positions, allowed, pending)
        if plan.greedy_rows is None and adjusted is logits:
            peaks, ids = self.ops.best_tokens(logits)
            return Sampled(ids, peaks)
        ids = self._choose(adjusted, plan, positions)
        chosen = None
        if adjusted is not logits:
            # A broken draw may name no token at all; the step runner finds that out.
            chosen = adjusted.gather(1, ids.clamp(0, self._vocab_size - 1).unsqueeze(1)).squeeze(1)
        return Sampled(ids, logits.amax(dim=-1), chosen)

    def _choose(self, logits: torch.Tensor, plan: _Plan, positions: np.ndarray) -> torch.Tensor:
        """Token ids int64 [n] from adjusted logits."""
        if plan.greedy_rows is None:
            return self.ops.best_tokens(logits)[1]
        draw_key = draw_keys(plan.seeds, positions)
        keys = upload([draw_key.view(np.int64)], self._device)[0].view(torch.int32)
        if len(plan.groups) == 1 and not len(plan.greedy_rows):
            return self._draw(logits, plan.groups[0], keys)
        next_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(plan.greedy_rows):
            next_ids[plan.greedy_rows] = self.ops.best_tokens(logits[plan.greedy_rows])[1]
        for group in plan.groups:
            next_ids[group.rows] = self._draw(logits[group.rows], group, keys[group.rows])
        return next_ids

    def _draw(self, logits: torch.Tensor, group: _Group, keys: torch.Tensor) -> torch.Tensor:
        """Drawn token ids int64 [m], for logits float32 [m, vocab] and keys int32 [m, 2]."""
        if group.kind == "ranked":
            return self.ops.draw_top_k(logits, group.width, group.filters, keys)
        if group.kind == "nucleus":
            return self.ops.draw_nucleus(logits, group.filters, keys)
        return self.ops.draw_all(logits, group.filters, keys)

    # -- the plan of a batch -----------------------------------------------------------------------------------------

    def _plan_for(self, sequences: Sequence[SequenceState]) -> _Plan:
        sequences = list(sequences)
        if self._plan is None or self._plan.sequences != sequences:  # they compare by identity
            self._plan = self._make_plan(sequences)
        return self._plan

    def _make_plan(self, sequences: list[SequenceState]) -> _Plan:
        params = [sequence.sampling for sequence in sequences]
        seeds = np.array([sequence.info.seed for sequence in sequences], dtype=np.uint64)
        if all(sequence.is_plain and sequence.sampling.is_greedy for sequence in sequences):
            return _Plan(sequences, seeds, None, [], None, None, [], [], [])
        greedy = [i for i, p in enumerate(params) if p.is_greedy]
        bias = [
            (i, token_id, value)
            for i, sequence in enumerate(sequences)
            for token_id, value in _biases(sequence).items()
            if 0 <= token_id < self._vocab_size
        ]
        slices = list(self._slices(params))
        tensors = iter(
            upload(
                [
                    np.array(greedy, dtype=np.int64),
                    np.array([b[0] for b in bias], dtype=np.int64),
                    np.array([b[1] for b in bias], dtype=np.int64),
                    np.array([b[2] for b in bias], dtype=np.float32),
                    *(array for _, _, rows in slices for array in self._filter_arrays(rows, params)),
                ],
                self._device,
            )
        )
        greedy_rows, bias_rows, bias_ids, bias_values = islice(tensors, 4)
        groups = []
        for kind, width, rows in slices:
            on_device, temperature, top_k, top_p, log_min_p = islice(tensors, 5)
            filters = Filters(temperature, top_k, top_p, log_min_p)
            side_by_side = rows[-1] - rows[0] == len(rows) - 1
            groups.append(_Group(slice(rows[0], rows[-1] + 1) if side_by_side else on_device, filters, kind, width))
        seen = [(i, sequence.seen) for i, sequence in enumerate(sequences) if sequence.seen is not None]
        return _Plan(
            sequences=sequences,
            seeds=seeds,
            greedy_rows=None if len(greedy) == len(sequences) else greedy_rows,
            groups=groups,
            bias=(bias_rows, bias_ids, bias_values) if bias else None,
            bans=BanPlan.of([sequence.banned for sequence in sequences], self._device),
            min_new_rows=[i for i, p in enumerate(params) if p.min_new_tokens > 0],
            penalty_rows=[i for i, _ in seen],
            seen=[tokens for _, tokens in seen],
        )

    def _slices(self, params: list[SamplingParams]) -> Iterator[tuple[_Kind, int, list[int]]]:
        """Yield (kind, width, rows) of each group; a group has no more rows than are drawn at once."""
        drawn = [(i, p) for i, p in enumerate(params) if not p.is_greedy]
        ranked = [i for i, p in drawn if 0 < p.top_k < self._vocab_size]  # more than there are is no limit
        narrow = [i for i in ranked if params[i].top_k <= MAX_RANKED_TOP_K]
        widest = max((params[i].top_k for i in narrow), default=0)
        rest = [(i, p) for i, p in drawn if not 0 < p.top_k < self._vocab_size]
        groups: list[tuple[_Kind, int, list[int]]] = [
            ("ranked", widest, narrow),
            ("ranked", self._vocab_size, [i for i in ranked if params[i].top_k > MAX_RANKED_TOP_K]),
            ("nucleus", 0, [i for i, p in rest if p.top_p < 1.0]),
            ("all", 0, [i for i, p in rest if p.top_p == 1.0]),
        ]
        rows_at_once = max(1, self._slice_elements // self._vocab_size)
        for kind, width, rows in groups:
            for start in range(0, len(rows), rows_at_once):
                yield kind, width, rows[start : start + rows_at_once]

    def _filter_arrays(self, rows: list[int], params: list[SamplingParams]) -> list[np.ndarray]:
        """The rows, and the fields of their Filters."""
        wanted = [params[i] for i in rows]
        return [
            np.array(rows, dtype=np.int64),
            np.array([p.temperature for p in wanted], dtype=np.float32),
            np.array([min(p.top_k, self._vocab_size) if p.top_k > 0 else self._vocab_size for p in wanted], np.int64),
            np.array([max(p.top_p, MIN_TOP_P) if p.top_p < 1.0 else np.inf for p in wanted], dtype=np.float64),
            np.array([np.log(p.min_p) if p.min_p > 0.0 else -np.inf for p in wanted], dtype=np.float32),
        ]

    # -- each step ---------------------------------------------------------------------------------------------------

    def _adjust(
        self,
        logits: torch.Tensor,
        plan: _Plan,
        positions: np.ndarray,
        allowed: AllowedTokens | None,
        pending: PendingTokens | None,
    ) -> torch.Tensor:
        """Apply logit_bias, penalties and bans to a copy; without any, return it as it is."""
        sequences = plan.sequences
        too_short = [i for i in plan.min_new_rows if positions[i] < sequences[i].sampling.min_new_tokens]
        if plan.bias is None and not too_short and not plan.penalty_rows and allowed is None and plan.bans is None:
            return logits
        logits = logits.clone()
        if plan.bias is not None:
            row, token_id, value = plan.bias
            logits[row, token_id] += value
        if plan.penalty_rows:
            params = [sequences[i].sampling for i in plan.penalty_rows]
            apply_penalties(logits, plan.penalty_rows, plan.seen, params, pending)
        if plan.bans is not None:
            ban_tokens(logits, plan.bans, pending)
        if allowed is not None:
            allow_only(logits, allowed, self.ops, finite=True)
        if too_short:
            ends = [(i, t) for i in too_short for t in self._banned_ids(sequences[i], i, allowed)]
            row, token_id = upload([np.array(ends, dtype=np.int64).reshape(-1, 2)], self._device)[0].unbind(1)
            # A plain number would be copied to the device, and waited for.
            logits[row, token_id] = logits.new_full((1,), -float("inf"))
        return logits

    def _banned_ids(self, sequence: SequenceState, row: int, allowed: AllowedTokens | None) -> list[int]:
        """Stop ids and eos ids (unless eos is a token like any other under a constraint); none if the constraint allows
        nothing else."""
        ends = {*sequence.sampling.stop_token_ids, *(self._eos_token_ids if sequence.info.eos_ends else ())}
        if allowed is not None:
            own = allowed.tokens_of(row)
            if 0 < len(own) <= len(ends) and ends.issuperset(own.tolist()):
                return []
        return [i for i in ends if 0 <= i < self._vocab_size]


def _biases(sequence: SequenceState) -> dict[int, float]:
    """Token id -> what is added to its logit, whatever the output."""
    bias = sequence.sampling.logit_bias or {}
    if sequence.banned is None:
        return bias
    return bias | dict.fromkeys(sequence.banned.singles, -float("inf"))
