"""Log-probabilities of chosen and of likeliest tokens, for output and prompt.

They are those of the model itself: log_softmax of the raw logits, before bias, penalties, temperature and filters, as
in SGLang and vLLM. Results are numpy, so that the worker can put them into messages as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .ranking import SLICE_ELEMENTS, top_tokens

PROMPT_SLICE = 256
"""Hidden states turned into logits at once: 256 × 152,000 float32 are 150 MiB."""


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """m consecutive tokens of one sequence, and the k likeliest tokens at each place, likeliest first."""

    ids: np.ndarray
    """int32 [m]"""
    values: np.ndarray
    """float32 [m]"""
    top_ids: np.ndarray
    """int32 [m, k]"""
    top_values: np.ndarray
    """float32 [m, k]"""


@torch.inference_mode()
def output_logprobs(logits: torch.Tensor, next_ids: torch.Tensor, top_ks: Sequence[int]) -> list[TokenLogprobs]:
    """One TokenLogprobs of one token for each row.

    logits: float32 [n, vocab], raw; next_ids: int [n], what was sampled; top_ks: likeliest tokens wanted for each row.
    """
    values, top_ids, top_values = _score(logits, next_ids, max(top_ks, default=0))
    ids = next_ids.to("cpu", torch.int32).numpy()
    return [
        TokenLogprobs(ids[i : i + 1], values[i : i + 1], top_ids[i : i + 1, :k], top_values[i : i + 1, :k])
        for i, k in enumerate(top_ks)
    ]


@torch.inference_mode()
def input_logprobs(
    hidden: torch.Tensor,
    target_ids: Sequence[np.ndarray],
    top_ks: Sequence[int],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> list[TokenLogprobs]:
    """Logprobs of prompt tokens, one TokenLogprobs for each request.

    hidden: [sum of lengths, hidden_size], the final hidden states that predict the targets, request after request;
    target_ids: int32 [length] for each request, the tokens that really follow; top_ks as above;
    compute_logits: [s, hidden_size] -> float32 [s, vocab], called on at most PROMPT_SLICE rows at a time.
    """
    lengths = [len(ids) for ids in target_ids]
    if sum(lengths) != len(hidden):
        raise ValueError(f"{len(hidden)} hidden states for {sum(lengths)} target tokens; they must be as many")
    if not lengths:
        return []
    targets = torch.from_numpy(np.concatenate(target_ids).astype(np.int64)).to(hidden.device)
    k_of_token = np.repeat(np.asarray(top_ks), lengths)
    scores = []
    for start in range(0, len(hidden), PROMPT_SLICE):
        part = slice(start, start + PROMPT_SLICE)
        scores.append(_score(compute_logits(hidden[part]), targets[part], int(k_of_token[part].max())))
    widest = max(top_ks)
    values = np.concatenate([score[0] for score in scores] or [np.empty(0, np.float32)])
    top_ids = _stack([score[1] for score in scores], widest, np.int32)
    top_values = _stack([score[2] for score in scores], widest, np.float32)
    result, start = [], 0
    for ids, length, k in zip(target_ids, lengths, top_ks):
        part = slice(start, start + length)
        result.append(
            TokenLogprobs(ids.astype(np.int32), values[part], top_ids[part, :k], top_values[part, :k]),
        )
        start += length
    return result


def _score(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """values float32 [n], top_ids int32 [n, k], top_values float32 [n, k]; some rows at a time, to bound memory."""
    rows = max(1, SLICE_ELEMENTS[logits.device.type] // logits.shape[-1])
    parts = [_score_rows(*pair, k) for pair in zip(logits.split(rows), ids.split(rows))]
    values, top_ids, top_values = (torch.cat(column).cpu().numpy() for column in zip(*parts))
    return values, top_ids, top_values


def _score_rows(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    values = logits.gather(-1, ids.to(torch.int64)[:, None]) - log_sum
    if k == 0:
        nothing = logits.new_empty(len(logits), 0)
        return values.view(-1), nothing.to(torch.int32), nothing
    top_logits, top_ids = top_tokens(logits, k)
    return values.view(-1), top_ids.to(torch.int32), top_logits - log_sum


def _stack(parts: list[np.ndarray], width: int, dtype) -> np.ndarray:
    """Parts [*, at most width] -> [total, width]; a slice without a wide request leaves its last columns zero."""
    stacked = np.zeros((sum(map(len, parts)), width), dtype=dtype)
    start = 0
    for part in parts:
        stacked[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return stacked
