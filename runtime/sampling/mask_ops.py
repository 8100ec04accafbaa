"""Sets the logits that whole masks do not allow to -inf, on the host and on devices."""

from __future__ import annotations

import numpy as np
import torch

from ...scheduler.constraints.constraint import BITS, TokenMasks
from ..runner.device_copy import upload

LARGEST_ALLOWED = 1e30
"""Allowed logits are clamped to this distance from 0: even a NaN or -inf then ranks before a token not allowed."""


def apply_masks_on_host(logits: torch.Tensor, masks: TokenMasks, finite: bool) -> None:
    """Set every token that the masks do not allow to -inf, in place; other rows stay as they are. Tokens behind a
    mask's end are not allowed.

    logits: float32 [n, vocab]. finite: allowed tokens get finite logits, so that no draw falls on another token.
    """
    vocab_size, covered = logits.shape[1], masks.masks.shape[1] * BITS
    packed = (~masks.masks).view(np.uint8)
    bits = np.unpackbits(packed, axis=1, bitorder="little", count=min(vocab_size, covered))
    banned = bits.view(bool)
    if covered < vocab_size:
        banned = np.pad(banned, ((0, 0), (0, vocab_size - covered)), constant_values=True)
    if not np.array_equal(masks.mask_of, np.arange(len(banned))):
        banned = banned[masks.mask_of]
    first, count = int(masks.rows[0]), len(masks.rows)
    side_by_side = int(masks.rows[-1]) - first == count - 1
    own = logits[first : first + count] if side_by_side else logits[torch.from_numpy(masks.rows)]
    if finite and not _is_tame(own):
        own.nan_to_num_(nan=-LARGEST_ALLOWED).clamp_(-LARGEST_ALLOWED, LARGEST_ALLOWED)
    np.copyto(own.numpy(), -np.inf, where=banned)  # torch's masked_fill_ takes several times as long
    if not side_by_side:
        logits[torch.from_numpy(masks.rows)] = own


def apply_masks_on_device(logits: torch.Tensor, masks: TokenMasks, finite: bool) -> None:
    """The same; never waits for the device."""
    rows, mask_of, packed = upload_masks(masks, logits.shape[1], logits.device)
    bit = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    banned = ((packed.unsqueeze(2) >> bit) & 1).flatten(1)[:, : logits.shape[1]] == 0
    own = logits[rows]
    if finite:
        own.nan_to_num_(nan=-LARGEST_ALLOWED).clamp_(-LARGEST_ALLOWED, LARGEST_ALLOWED)
    logits[rows] = own.masked_fill_(banned[mask_of], -float("inf"))


def upload_masks(
    masks: TokenMasks, vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows int64 [k], mask_of int64 [k], int32 [m, words]): at least as many words as the vocabulary needs."""
    words = -(-vocab_size // (2 * BITS)) * 2
    packed = np.zeros((len(masks.masks), words), dtype=np.uint32)
    packed[:, : masks.masks.shape[1]] = masks.masks[:, :words]
    rows, mask_of, pairs = upload([masks.rows, masks.mask_of, packed.view(np.int64)], device)
    return rows, mask_of, pairs.view(torch.int32)


def _is_tame(logits: torch.Tensor) -> bool:
    """On the host: no logit would be clamped. One pass instead of three."""
    low, high = torch.aminmax(logits)
    return bool((low >= -LARGEST_ALLOWED) & (high <= LARGEST_ALLOWED))
