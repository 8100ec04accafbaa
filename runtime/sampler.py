"""Chooses the next token of every request of a batch from its logits.

Order, as in SGLang and vLLM:

    allowed tokens → logit_bias → min_new_tokens (no eos, no stop id yet) → penalties
                   → temperature → top_k → top_p → min_p → draw

The same request gets the same token in any batch: tokens are ranked in a total order (`ranking`), the noise of a draw
depends on (seed, output position, token id) alone (`noise`), and sums that decide a cut are float64.

Filters, exactly: top_k keeps the k first tokens of the ranking. top_p keeps its shortest start that holds top_p of the
mass that top_k left. min_p drops tokens less likely than min_p × the likeliest. The likeliest token always stays.

Cost per row: greedy, an argmax; with top_k, a partial selection of the largest top_k of the batch; with top_p alone,
one of NUCLEUS_WIDTH tokens, and a full sort only where those do not hold top_p of the mass; else one pass of noise over
the vocabulary. Work goes in slices of rows, so that temporary memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..scheduler.request import Request
from .forward_batch import upload
from .noise import draw_keys, exponential_noise
from .penalties import Penalties, PendingTokens, uses_penalties
from .ranking import SLICE_ELEMENTS, top_tokens

NUCLEUS_WIDTH = 256
"""Tokens ranked at first for a row with top_p and no top_k; real models' nuclei are nearly always smaller."""

MAX_RANKED_TOP_K = 4096
"""A larger top_k is sorted out by a full sort, in a group of its own, so that it does not widen the others' work."""

MIN_TEMPERATURE = 1e-30
"""A smaller one, though not 0, would be 0 in float32."""

LARGEST_ALLOWED = 1e30
"""The logit of an allowed token is at most so far from 0: even one that is NaN or -inf goes before one not allowed."""


@dataclass(slots=True)
class _Draws:
    """Rows that are drawn in one way. All device tensors of length m; row: which logits row."""

    row: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    """int64; vocab_size where off."""
    top_p: torch.Tensor
    """float64; infinite where off."""
    log_min_p: torch.Tensor
    """-inf where off."""
    host_rows: np.ndarray
    width: int
    """Tokens to rank at first; 0: no ranking needed."""
    complete: bool
    """``width`` ranks all that top_k leaves, so no cut can lie beyond it."""

    def part(self, which: slice | torch.Tensor) -> _Draws:
        host = which if isinstance(which, slice) else which.cpu().numpy()
        return _Draws(
            self.row[which],
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.log_min_p[which],
            self.host_rows[host],
            self.width,
            self.complete,
        )


@dataclass(slots=True)
class _Plan:
    """What stays the same as long as the same requests sample together."""

    requests: list[Request]
    seeds: np.ndarray
    greedy_rows: torch.Tensor | None
    """int64 [m]; None: all rows are greedy."""
    draws: list[_Draws]
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """row, token id, value of each logit_bias entry."""
    min_new_rows: list[int]
    penalty_rows: list[int]


class Sampler:
    """See the module. Owns nothing but the counts of the penalties and the plan of the last batch."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device | str, num_rows: int
    ) -> None:
        """``num_rows``: rows of req_to_token."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = torch.device(device)
        self._penalties = Penalties(num_rows)
        self._slice_elements = SLICE_ELEMENTS[self._device.type]
        self._plan: _Plan | None = None

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        allowed: Mapping[int, np.ndarray] | None = None,
        pending: PendingTokens | None = None,
    ) -> torch.Tensor:
        """Next token ids, int64 [n] on the device. ``logits``: float32 [n, vocab], left as they are; ``requests``: the
        n requests of the rows. Each must hold a row (Request.kv) if it uses penalties.

        allowed: row -> int32 [m], the only tokens it may get, at least one; what they are comes before all other
        wishes. Rows that are not in it may get any. pending: output tokens of a step in flight, which the requests do
        not have yet.
        """
        plan = self._plan_for(requests)
        logits = self._adjust(logits, plan, allowed or {}, pending)
        if plan.greedy_rows is None:
            return logits.argmax(dim=-1)
        next_ids = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
        if len(plan.greedy_rows):
            next_ids[plan.greedy_rows] = logits[plan.greedy_rows].argmax(dim=-1)
        keys = draw_keys(plan.seeds, np.array([_output_position(request) for request in requests]))
        rows_at_once = max(1, self._slice_elements // self._vocab_size)
        for draws in plan.draws:
            for start in range(0, len(draws.host_rows), rows_at_once):
                part = draws.part(slice(start, start + rows_at_once))
                draw_key = torch.from_numpy(keys[part.host_rows]).to(logits.device)
                next_ids[part.row] = self._draw(logits, part, draw_key)
        return next_ids

    # -- what stays the same -----------------------------------------------------------------------------------------

    def _plan_for(self, requests: Sequence[Request]) -> _Plan:
        requests = list(requests)
        if self._plan is None or self._plan.requests != requests:  # requests compare by identity
            self._plan = self._make_plan(requests)
        return self._plan

    def _make_plan(self, requests: list[Request]) -> _Plan:
        params = [request.sampling for request in requests]
        greedy = [i for i, p in enumerate(params) if p.is_greedy]
        ranked_k = [i for i, p in enumerate(params) if not p.is_greedy and 0 < p.top_k <= MAX_RANKED_TOP_K]
        large_k = [i for i, p in enumerate(params) if not p.is_greedy and p.top_k > MAX_RANKED_TOP_K]
        nucleus = [i for i, p in enumerate(params) if not p.is_greedy and p.top_k < 0 and p.top_p < 1.0]
        whole = [i for i, p in enumerate(params) if not p.is_greedy and p.top_k < 0 and p.top_p == 1.0]
        vocab_size = self._vocab_size
        groups = [
            (ranked_k, min(vocab_size, max((params[i].top_k for i in ranked_k), default=0)), True),
            (large_k, vocab_size, True),
            (nucleus, min(vocab_size, NUCLEUS_WIDTH), vocab_size <= NUCLEUS_WIDTH),
            (whole, 0, True),
        ]
        draws = [self._make_draws(requests, rows, width, complete) for rows, width, complete in groups if rows]
        bias = [
            (i, token_id, value)
            for i, p in enumerate(params)
            for token_id, value in (p.logit_bias or {}).items()
            if 0 <= token_id < vocab_size
        ]
        return _Plan(
            requests=requests,
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            greedy_rows=None if len(greedy) == len(requests) else self._to_device(greedy, torch.int64),
            draws=draws,
            bias=(
                self._to_device([b[0] for b in bias], torch.int64),
                self._to_device([b[1] for b in bias], torch.int64),
                self._to_device([b[2] for b in bias], torch.float32),
            )
            if bias
            else None,
            min_new_rows=[i for i, p in enumerate(params) if p.min_new_tokens > 0],
            penalty_rows=[i for i, p in enumerate(params) if uses_penalties(p)],
        )

    def _make_draws(self, requests: list[Request], rows: list[int], width: int, complete: bool) -> _Draws:
        params = [requests[i].sampling for i in rows]
        return _Draws(
            row=self._to_device(rows, torch.int64),
            temperature=self._to_device([max(p.temperature, MIN_TEMPERATURE) for p in params], torch.float32),
            top_k=self._to_device([p.top_k if p.top_k > 0 else self._vocab_size for p in params], torch.int64),
            top_p=self._to_device([p.top_p if p.top_p < 1.0 else float("inf") for p in params], torch.float64),
            log_min_p=self._to_device(
                [float(np.log(p.min_p)) if p.min_p > 0.0 else -float("inf") for p in params], torch.float32
            ),
            host_rows=np.array(rows),
            width=width,
            complete=complete,
        )

    def _to_device(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)

    # -- what each step does -----------------------------------------------------------------------------------------

    def _adjust(
        self, logits: torch.Tensor, plan: _Plan, allowed: Mapping[int, np.ndarray], pending: PendingTokens | None
    ) -> torch.Tensor:
        """Allowed tokens, logit_bias, min_new_tokens, penalties, on a copy; the same tensor where there are none."""
        requests = plan.requests
        too_short = [
            i for i in plan.min_new_rows if _output_position(requests[i]) < requests[i].sampling.min_new_tokens
        ]
        if plan.bias is None and not too_short and not plan.penalty_rows and not allowed:
            return logits
        logits = logits.clone()
        if allowed:
            _allow_only(logits, allowed)
        if plan.bias is not None:
            row, token_id, value = plan.bias
            logits[row, token_id] += value
        if too_short:
            ends = [(i, t) for i in too_short for t in self._banned_ids(requests[i], allowed.get(i))]
            row, token_id = self._to_device(ends, torch.int64).view(-1, 2).unbind(1)
            logits[row, token_id] = -float("inf")
        if plan.penalty_rows:
            self._penalties.apply(logits, plan.penalty_rows, [requests[i] for i in plan.penalty_rows], pending)
        return logits

    def _banned_ids(self, request: Request, allowed: np.ndarray | None) -> list[int]:
        """eos and stop ids. In an item, eos is a token like any other; nothing is banned if nothing else is allowed."""
        ends = {*request.sampling.stop_token_ids, *(self._eos_token_ids if allowed is None else ())}
        if allowed is not None and len(allowed) <= len(ends) and ends.issuperset(allowed.tolist()):
            return []
        return [i for i in ends if 0 <= i < self._vocab_size]

    def _draw(self, logits: torch.Tensor, draws: _Draws, keys: torch.Tensor) -> torch.Tensor:
        """Drawn token ids int64 [m], for keys int32 [m, 2]."""
        row_logits = logits[draws.row]
        best = row_logits.amax(dim=-1, keepdim=True)
        # The likeliest token is at 0, so that no temperature, however small, makes a logit overflow.
        scaled = (row_logits - best) / draws.temperature[:, None]
        if not draws.width:
            ids = torch.arange(self._vocab_size, dtype=torch.int32, device=logits.device)
            kept = scaled >= draws.log_min_p[:, None]
            return _race(scaled, kept, exponential_noise(keys, ids))
        next_ids, inside = self._draw_ranked(scaled, draws, keys, draws.width)
        if not draws.complete and not bool(inside.all()):
            wide = (~inside).nonzero().view(-1)
            next_ids[wide], _ = self._draw_ranked(scaled[wide], draws.part(wide), keys[wide], self._vocab_size)
        return next_ids

    def _draw_ranked(
        self, scaled: torch.Tensor, draws: _Draws, keys: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw among the ``width`` first tokens; also bool [m]: the cut of top_p lies among them."""
        values, ids = top_tokens(scaled, width)
        in_top_k = torch.arange(values.shape[-1], device=values.device) < draws.top_k[:, None]
        mass = values.double().exp_().mul_(in_top_k)
        cumulative = mass.cumsum(dim=-1)
        if draws.complete:
            total = cumulative[:, -1]
        else:
            total = scaled.exp().sum(dim=-1, dtype=torch.float64)
        wanted = draws.top_p * total
        in_top_p = (cumulative - mass) < wanted[:, None]
        kept = in_top_k & in_top_p & (values >= draws.log_min_p[:, None])
        kept[:, 0] = True
        winner = _race(values, kept, exponential_noise(keys, ids.to(torch.int32)))
        return ids.gather(-1, winner[:, None]).view(-1), cumulative[:, -1] >= wanted


def _race(log_weights: torch.Tensor, kept: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Column of the winner, int64 [m]: kept column v with probability proportional to exp(log_weights[v])."""
    return (log_weights.exp().div_(noise)).mul_(kept).argmax(dim=-1)


def _allow_only(logits: torch.Tensor, allowed: Mapping[int, np.ndarray]) -> None:
    """-inf for every other token of these rows, in place."""
    row, token_id, rows = upload(
        [
            np.repeat(np.array(list(allowed)), [len(ids) for ids in allowed.values()]),
            np.concatenate(list(allowed.values())),
            np.array(list(allowed)),
        ],
        logits.device,
    )
    kept = logits[row, token_id].nan_to_num_(nan=-LARGEST_ALLOWED).clamp_(-LARGEST_ALLOWED, LARGEST_ALLOWED)
    logits[rows] = -float("inf")
    logits[row, token_id] = kept


def _output_position(request: Request) -> int:
    """How many output tokens lie before the one that is sampled, those of steps in flight included (the step that
    samples has already counted its own)."""
    return request.num_output_tokens + max(0, request.num_output_placeholders - 1)
