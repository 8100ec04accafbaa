"""Applies constraints to logits, for samples and beams."""

from __future__ import annotations

import numpy as np
import torch

from ...scheduler.constraints.constraint import AllowedTokens
from ..runner.device_copy import upload

LARGEST_ALLOWED = 1e30
"""Allowed logits are clamped to this distance from 0: even a NaN or -inf then ranks before a token not allowed."""


def allow_only(
    logits: torch.Tensor, allowed: AllowedTokens, *, rows: np.ndarray | None = None, finite: bool = False
) -> None:
    """Set every token of these rows that is not allowed to -inf, in place. logits: float32 [n, vocab].

    rows: int [k], those with a constraint, some of which may have no token at all; None for those that ``allowed``
    names. finite: allowed tokens get finite logits, so that no draw falls on another token.
    """
    of_token, tokens = allowed.unpack()
    constrained = np.unique(of_token) if rows is None else rows
    row, token_id, named = upload([of_token, tokens, constrained], logits.device)
    kept = logits[row, token_id]
    if finite:
        kept.nan_to_num_(nan=-LARGEST_ALLOWED).clamp_(-LARGEST_ALLOWED, LARGEST_ALLOWED)
    logits.index_fill_(0, named, -float("inf"))
    logits[row, token_id] = kept
