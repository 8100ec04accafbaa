"""Chooses a device's table of sampling operations, once, at start-up.

On a GPU no operation may wait for the device, and none should read the vocabulary a dozen times. There a kernel
replaces each operation, if it is installed and gives torch's results on small inputs. On a CPU kernels of Numba's look
for the best token and apply masks, in vocabularies that are large enough.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...attention.error_text import describe_error
from ...scheduler.constraints.constraint import BITS, TokenMasks
from .mask_ops import apply_masks_on_device
from .ops import TORCH_GPU_OPS, TORCH_OPS, Filters, SamplingOps, draw_all, draw_nucleus_by_sort, draw_top_k
from .ranking import best_tokens, row_statistics

logger = logging.getLogger(__name__)


NUMBA_VOCABULARY = 8192
"""For fewer tokens a kernel is not worth the second that it takes to compile it for the first time."""


def select_sampling_ops(device: torch.device, vocab_size: int) -> SamplingOps:
    """The fastest operations that work here. One log line names them, and one warning says what is missing."""
    if device.type != "cuda":
        return TORCH_OPS if vocab_size < NUMBA_VOCABULARY else _on_cpu(vocab_size)
    logger.info("trying out kernels for sampling; the first time they are compiled, which takes a minute or two")
    return probe(device, vocab_size, PROVIDERS)


def _on_cpu(vocab_size: int) -> SamplingOps:
    try:
        from . import numba_masks, numba_ranking  # here: for a CPU only

        ops = replace(TORCH_OPS, apply_masks=numba_masks.apply_masks, best_tokens=numba_ranking.BestTokens())
        for probe_op in (_probe_apply_masks, _probe_best_tokens):
            probe_op(ops, torch.device("cpu"), vocab_size)
    except Exception as error:  # compiled code may raise anything
        logger.warning("torch and numpy look for tokens and apply masks, which takes longer: %s", describe_error(error))
        return TORCH_OPS
    return ops


Provider = Callable[[SamplingOps], dict[str, Callable[..., Any]]]
"""The operations chosen so far -> replacements, by name. May raise anything if it cannot be used here."""


def _triton_ops(ops: SamplingOps) -> dict[str, Callable[..., Any]]:
    from . import triton_ops

    return {name: getattr(triton_ops, name) for name in SamplingOps.__slots__ if hasattr(triton_ops, name)}


def _flashinfer_ops(ops: SamplingOps) -> dict[str, Callable[..., Any]]:
    from . import flashinfer_ops

    return {"draw_nucleus": partial(flashinfer_ops.draw_nucleus, draw_all=ops.draw_all)}


PROVIDERS: dict[str, Provider] = {"triton": _triton_ops, "flashinfer": _flashinfer_ops}


def probe(device: torch.device, vocab_size: int, providers: dict[str, Provider]) -> SamplingOps:
    """Take from each provider the operations that agree with torch; a later provider wins."""
    ops, chosen, troubles = TORCH_GPU_OPS, dict.fromkeys(SamplingOps.__slots__, "torch"), []
    for provider, load in providers.items():
        try:
            found = load(ops)
        except Exception as error:  # not installed, or made for another torch or card
            troubles.append(f"{provider}: {describe_error(error)}")
            continue
        for name, function in found.items():
            candidate = replace(ops, **{name: function})
            try:
                _PROBES[name](candidate, device, vocab_size)
            except Exception as error:  # no compiler, a kernel that this card cannot run, a wrong answer
                troubles.append(f"{name} of {provider}: {describe_error(error)}")
            else:
                ops, chosen[name] = candidate, provider
    logger.info("sampling: %s", ", ".join(f"{name} by {provider}" for name, provider in chosen.items()))
    if troubles:
        advice = "pip install 'baton-serve[cuda]' and a CUDA toolkit (nvcc) bring what is missing"
        logger.warning("slower sampling in use: %s; %s", "; ".join(troubles), advice)
    return ops


# -- probes: each raises if an operation is wrong ----------------------------------------------------------------------


class WrongAnswer(Exception):
    """An operation ran, but its result differs from torch's."""


def _probe_logits(device: torch.device, rows: int, vocab_size: int) -> torch.Tensor:
    """bf16 values, so that there are ties everywhere, with a few likely tokens."""
    logits = 2 * _normal(device, rows, vocab_size)
    logits[:, : vocab_size // 50] += 6
    return logits.bfloat16().float()


def _normal(device: torch.device, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator(device).manual_seed(rows), device=device)


def _probe_filters(device: torch.device, rows: int, *, top_k: int, top_p: float) -> tuple[Filters, torch.Tensor]:
    """With temperatures and keys of many kinds."""
    generator = torch.Generator().manual_seed(rows)
    filters = Filters(
        temperature=(torch.rand(rows, generator=generator) + 0.2).to(device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, dtype=torch.float64, device=device),
        log_min_p=torch.full((rows,), -9.0, device=device),
    )
    return filters, torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32).to(device)


_ROWS = (1, 9)
"""Few: the probes run after the KV pool has taken its share of the memory."""


def _same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise WrongAnswer(f"{what} differ from torch's")


def _mostly_same(found: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor) -> None:
    """Compare drawn ids. Exponentials and logarithms may differ in their last bits, which decides one in a million."""
    if found.dtype != torch.int64 or found.shape != expected.shape or int((found != expected).sum()) > 1:
        raise WrongAnswer("drawn tokens differ from torch's")
    if not bool(((found >= 0) & (found < logits.shape[-1])).all()):
        raise WrongAnswer("drawn tokens lie outside the vocabulary")


def _probe_draw_top_k(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    """Try every width that has a kernel of its own, so that none is compiled at its first use."""
    widths = {min(width, vocab_size) for width in (50, 100, 200, 400, 800, 1600, 3200)}
    for rows, width in itertools.product(_ROWS, sorted(widths)):
        logits = _probe_logits(device, rows, vocab_size)
        filters, keys = _probe_filters(device, rows, top_k=width - width // 6, top_p=0.95)
        expected = draw_top_k(logits, width, filters, keys)
        _mostly_same(ops.draw_top_k(logits, width, filters, keys), expected, logits)


def _probe_draw_all(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    for rows in _ROWS:
        logits = _probe_logits(device, rows, vocab_size)
        filters, keys = _probe_filters(device, rows, top_k=vocab_size, top_p=float("inf"))
        for kept in (None, (logits > logits.mean()).float()):
            _mostly_same(ops.draw_all(logits, filters, keys, kept), draw_all(logits, filters, keys, kept), logits)


def _probe_draw_nucleus(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    """Without ties, which kernels may treat in their own ways. Also check that a row alone gets what it gets in a
    batch."""
    for rows in _ROWS:
        logits = 4 * _normal(device, rows, vocab_size)
        filters, keys = _probe_filters(device, rows, top_k=vocab_size, top_p=0.9)
        found = ops.draw_nucleus(logits, filters, keys)
        _mostly_same(found, draw_nucleus_by_sort(logits, filters, keys), logits)
        last = torch.tensor([rows - 1], device=device)
        _same(
            ops.draw_nucleus(logits[last], filters.select_rows(last), keys[last]), found[last], "draws of a row alone"
        )


def _probe_survey(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    for rows in _ROWS:
        logits = _probe_logits(device, rows, vocab_size)
        maxima, best, log_sum = ops.row_statistics(logits, 128)
        expected_maxima, expected_best, expected_log_sum = row_statistics(logits, 128)
        _same(maxima, expected_maxima, "maxima of chunks")
        _same(best, expected_best, "best logits")
        if not torch.allclose(log_sum, expected_log_sum, atol=1e-5, rtol=1e-5):
            raise WrongAnswer("sums of exponentials differ from torch's")


def _probe_apply_masks(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    for rows in _ROWS:
        logits = _probe_logits(device, rows + 1, vocab_size)
        logits[0, ::3] = logits.new_full((1,), float("nan"))
        expected = logits.clone()
        some = np.random.default_rng(rows).integers(0, 2**32, (2, -(-vocab_size // BITS)), dtype=np.uint32)
        places = np.arange(rows, dtype=np.int32)
        masks = TokenMasks(places, places % 2, some)
        ops.apply_masks(logits, masks, True)
        apply_masks_on_device(expected, masks, True)
        _same(logits, expected, "masked logits")


def _probe_best_tokens(ops: SamplingOps, device: torch.device, vocab_size: int) -> None:
    for rows in _ROWS:
        logits = _probe_logits(device, rows, vocab_size)
        logits[0, vocab_size // 2 :: 7] = logits.new_full((1,), float("nan"))
        best, ids = ops.best_tokens(logits)
        expected, expected_ids = best_tokens(logits)
        _same(ids, expected_ids, "best tokens")
        _same(best.nan_to_num(), expected.nan_to_num(), "best logits")


_PROBES: dict[str, Callable[[SamplingOps, torch.device, int], None]] = {
    "draw_top_k": _probe_draw_top_k,
    "draw_all": _probe_draw_all,
    "draw_nucleus": _probe_draw_nucleus,
    "row_statistics": _probe_survey,
    "apply_masks": _probe_apply_masks,
    "best_tokens": _probe_best_tokens,
}
