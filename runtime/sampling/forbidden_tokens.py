"""Finds tokens that a request does not allow, whatever drew them: the last look before the scheduler gets them.

Masks and bans are applied where logits are, and a draw from masked logits never names a masked token, unless something
is broken: a number that overflows, a kernel that misbehaves, logits that say nothing. So every step is checked, all
rows at once, against two records of what is allowed:

    on the device   the token's logit after all bans (`Sampled.chosen`): every kind of ban, on every path
    on the host     the packed bits that the constraint itself gave (`AllowedTokens`), which no arithmetic touched

Without a constraint or a ban in the whole batch, all that is left is to compare the ids with the vocabulary.
"""

from __future__ import annotations

import numpy as np

from ...scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch


def forbidden_rows(
    batch: ScheduleBatch, counts: np.ndarray, tokens: np.ndarray, chosen: np.ndarray | None, vocab_size: int
) -> list[int]:
    """The rows of a batch that got a token which is not allowed, ascending.

    counts: int [bs], how many tokens each row got; tokens: int [sum(counts)], row after row; chosen: float32
    [sum(counts)], their logits after all bans, None where nothing was banned.
    """
    if not len(tokens):
        return []
    wrong = None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = (tokens < 0) | (tokens >= vocab_size)
    if chosen is not None and not (chosen > -np.inf).all():  # a NaN is not above anything
        banned = ~(chosen > -np.inf)
        wrong = banned if wrong is None else wrong | banned
    if batch.allowed is None and wrong is None:
        return []
    rows = np.repeat(np.arange(len(counts)), counts)
    found = rows[wrong] if wrong is not None else rows[:0]
    if batch.allowed is not None:
        mine = np.isin(rows, batch.allowed.rows)
        held = batch.allowed.holds(rows[mine], tokens[mine])
        found = np.concatenate([found, rows[mine][~held]])
    return np.unique(found).tolist()


def is_forbidden(step: BeamStep, candidates: BeamCandidates, vocab_size: int) -> bool:
    """True if a candidate of a search is a token that its beam may not have."""
    tokens = candidates.tokens
    if not len(tokens):
        return False
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return True
    return step.allowed is not None and not bool(step.allowed.holds(candidates.parents, tokens).all())
