"""Applies constraints to logits, for samples and beams, and checks afterwards that no forbidden token was drawn.

A draw from masked logits never names a masked token unless something is broken: a number that overflows, a faulty
kernel, logits that are all NaN. So every step is checked, all rows at once, against two records of what is allowed:

    on the device   the token's logit after all bans (`Sampled.chosen`): every kind of ban, on every path
    on the host     the packed bits that the constraint itself gave (`AllowedTokens`), which no arithmetic touched

Without a constraint or a ban in the batch, the check only compares the ids with the vocabulary's size.
"""

from __future__ import annotations

import numpy as np
import torch

from ...scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch
from ...scheduler.constraints.constraint import AllowedTokens
from ..runner.device_copy import upload
from .mask_ops import LARGEST_ALLOWED
from .ops import TORCH_OPS, SamplingOps


def allow_only(
    logits: torch.Tensor,
    allowed: AllowedTokens,
    ops: SamplingOps = TORCH_OPS,
    *,
    rows: np.ndarray | None = None,
    finite: bool = False,
) -> None:
    """Set every token of these rows that is not allowed to -inf, in place. logits: float32 [n, vocab].

    rows: int [k], those with a constraint, some of which may have no token at all; None for those that ``allowed``
    names. finite: allowed tokens get finite logits, so that no draw falls on another token.
    """
    if allowed.dense is not None:
        ops.apply_masks(logits, allowed.dense, finite)
        if rows is None and not len(allowed.rows):
            return
        rows = np.setdiff1d(rows if rows is not None else allowed.rows, allowed.dense.rows)
        if not len(rows):
            return
    of_token, tokens = allowed.unpack_words()
    constrained = of_token[np.flatnonzero(np.diff(of_token, prepend=-1))] if rows is None else rows
    if not len(constrained):
        return
    row, token_id, named = upload([of_token, tokens, constrained], logits.device)
    kept = logits[row, token_id]
    if finite:
        kept.nan_to_num_(nan=-LARGEST_ALLOWED).clamp_(-LARGEST_ALLOWED, LARGEST_ALLOWED)
    logits.index_fill_(0, named, -float("inf"))
    logits[row, token_id] = kept


def forbidden_rows(
    batch: ScheduleBatch,
    counts: np.ndarray,
    tokens: np.ndarray,
    places: np.ndarray,
    chosen: np.ndarray | None,
    vocab_size: int,
) -> list[int]:
    """The rows of a batch that got a token which is not allowed, ascending.

    counts: int [bs], how many tokens each row got; tokens: int [sum(counts)], row after row; places: int [sum(counts)],
    ascending, the number of each among the step's samples; chosen: float32 [sum(counts)], their logits after all bans,
    None where nothing was banned.
    """
    if not len(tokens):
        return []
    wrong = None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = (tokens < 0) | (tokens >= vocab_size)
    if chosen is not None and not (chosen > -np.inf).all():  # a NaN is not above anything
        banned = ~(chosen > -np.inf)
        wrong = banned if wrong is None else wrong | banned
    if batch.allowed is not None and not (held := batch.allowed.holds(places, tokens)).all():
        missed = ~held & np.isin(places, batch.allowed.named_rows())
        wrong = missed if wrong is None else wrong | missed
    if wrong is None:
        return []
    return np.unique(np.repeat(np.arange(len(counts)), counts)[wrong]).tolist()


def is_forbidden(step: BeamStep, candidates: BeamCandidates, vocab_size: int) -> bool:
    """True if a candidate of a search is a token that its beam may not have."""
    tokens = candidates.tokens
    if not len(tokens):
        return False
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return True
    return step.allowed is not None and not bool(step.allowed.holds(candidates.parents, tokens).all())
