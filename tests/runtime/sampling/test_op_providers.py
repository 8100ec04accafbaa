"""Which operations a device gets: what is missing, fails or is wrong is replaced by torch, with one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.runtime.sampling import numba_masks, numba_ranking
from baton.runtime.sampling import ops as torch_ops
from baton.runtime.sampling.op_providers import NUMBA_VOCABULARY, PROVIDERS, Provider, probe, select_sampling_ops
from baton.runtime.sampling.ops import TORCH_GPU_OPS, TORCH_OPS, Filters, SamplingOps
from tests.doubles import fake_top_p
from tests.doubles.draw_cases import random_case

CPU = torch.device("cpu")


def providing(**functions: Callable[..., Any]) -> Provider:
    return lambda ops: functions


def select(caplog: pytest.LogCaptureFixture, providers: dict[str, Provider]) -> tuple[SamplingOps, str]:
    """The operations, and the warnings."""
    with caplog.at_level(logging.INFO, logger="baton.runtime.sampling.op_providers"):
        ops = probe(CPU, 3000, providers)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) <= 1 and len(caplog.records) == 1 + len(warnings)
    return ops, "".join(warnings)


def test_good_operations_are_chosen_and_logged(caplog):
    def draw_all(*args: Any) -> torch.Tensor:
        return torch_ops.draw_all(*args)

    ops, warning = select(caplog, {"fast": providing(draw_all=draw_all)})
    assert ops.draw_all is draw_all and ops.draw_top_k is TORCH_GPU_OPS.draw_top_k
    assert warning == ""
    assert caplog.messages == [
        "sampling: draw_top_k by torch, draw_all by fast, draw_nucleus by torch, row_statistics by torch, "
        "apply_masks by torch, best_tokens by torch"
    ]


def test_missing_provider_falls_back_with_warning(caplog):
    def load(ops: SamplingOps) -> dict[str, Callable[..., Any]]:
        raise ImportError("No module named 'triton'\nmore")

    ops, warning = select(caplog, {"triton": load})
    assert ops == TORCH_GPU_OPS
    assert warning.startswith("slower sampling in use: triton: ImportError: No module named 'triton';")
    assert "pip install 'baton-serve[cuda]'" in warning


def test_failing_or_wrong_ops_fall_back_with_warning(caplog):
    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    def second_best(logits: torch.Tensor, width: int, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
        return logits.topk(2).indices[:, 1]

    def outside(logits: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.full((len(logits),), logits.shape[1])

    ops, warning = select(caplog, {"fast": providing(draw_all=broken, draw_top_k=second_best, draw_nucleus=outside)})
    assert ops == TORCH_GPU_OPS
    assert "draw_all of fast: RuntimeError: no kernel image" in warning
    assert (
        "draw_top_k of fast: WrongAnswer: drawn tokens differ" in warning and "draw_nucleus of fast: Wrong" in warning
    )


def test_batch_dependent_draws_are_rejected(caplog):
    """What a row gets must not change with the rows beside it."""

    def shifty(logits: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
        drawn = torch_ops.draw_nucleus_by_sort(logits, filters, keys)
        return drawn if len(logits) > 1 else (drawn + 1) % logits.shape[1]

    ops, warning = select(caplog, {"fast": providing(draw_nucleus=shifty)})
    assert ops == TORCH_GPU_OPS and "draw_nucleus of fast: WrongAnswer" in warning


def test_available_kernels_pass_the_probe(caplog, monkeypatch, interpreter):
    """Triton's in its interpreter; FlashInfer's cut by a stand-in."""
    fake_top_p.install(monkeypatch)
    ops, warning = select(caplog, PROVIDERS)
    assert warning == ""
    expected = (
        "sampling: draw_top_k by triton, draw_all by triton, draw_nucleus by flashinfer, row_statistics by triton, "
        "apply_masks by triton, best_tokens by torch"
    )
    assert caplog.messages[0] == expected
    assert not set(_functions(ops)) & set(_functions(TORCH_OPS))


def _functions(ops: SamplingOps) -> list[Callable[..., Any]]:
    return [ops.draw_top_k, ops.draw_all, ops.draw_nucleus, ops.row_statistics, ops.apply_masks]


@pytest.mark.parametrize("vocab_size", [1, 131, *(pytest.param(size, marks=pytest.mark.slow) for size in (40, 2500))])
def test_kernels_pass_probe_at_any_vocabulary_size(monkeypatch, interpreter, vocab_size):
    fake_top_p.install(monkeypatch)
    ops = probe(CPU, vocab_size, PROVIDERS)
    assert not set(_functions(ops)) & set(_functions(TORCH_OPS))


def test_triton_draws_nucleus_if_flashinfer_fails(caplog, monkeypatch, interpreter):
    def fails(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("Could not find nvcc")

    fake_top_p.install(monkeypatch, fails)
    ops, warning = select(caplog, PROVIDERS)
    assert (
        "draw_nucleus by triton, row_statistics by triton, apply_masks by triton" in caplog.messages[0]
        and "draw_nucleus of flashinfer" in warning
    )
    assert ops.draw_nucleus is not TORCH_GPU_OPS.draw_nucleus


@pytest.mark.parametrize("vocab_size", [500, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_flashinfer_nucleus_matches_sorted_nucleus(monkeypatch, seed, vocab_size):
    """Equal to the sorted one where nothing ties; where tokens tie, what is drawn is as likely as the last kept."""
    fake_top_p.install(monkeypatch)
    from baton.runtime.sampling import flashinfer_ops

    def draw(case) -> torch.Tensor:
        return flashinfer_ops.draw_nucleus(case.logits, case.filters, case.keys, draw_all=torch_ops.draw_all)

    case = random_case(seed, 30, vocab_size, most_top_k=vocab_size, ties=False)
    case.filters.top_k.fill_(vocab_size)
    assert torch.equal(draw(case), torch_ops.draw_nucleus_by_sort(case.logits, case.filters, case.keys))
    case = random_case(seed, 200, vocab_size, most_top_k=vocab_size)
    case.filters.top_k.fill_(vocab_size)
    drawn, expected = draw(case), torch_ops.draw_nucleus_by_sort(case.logits, case.filters, case.keys)
    assert (drawn == expected).float().mean() > 0.9


@pytest.mark.parametrize("vocab_size", [200, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_both_torch_nucleus_draws_agree(seed, vocab_size):
    case = random_case(seed, 60, vocab_size, most_top_k=vocab_size)
    case.filters.top_k.fill_(vocab_size)
    case.filters.top_p.clamp_(max=0.999)
    expected = torch_ops.draw_nucleus_by_sort(case.logits, case.filters, case.keys)
    assert torch.equal(torch_ops.draw_nucleus_at_second_look(case.logits, case.filters, case.keys), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
def test_gpu_has_kernels_for_all_sampling_ops(caplog, vocab_size):
    """Selection compares each with torch; here nothing may have fallen back."""
    with caplog.at_level(logging.INFO, logger="baton.runtime.sampling.op_providers"):
        select_sampling_ops(torch.device("cuda"), vocab_size)
    expected = (
        "sampling: draw_top_k by triton, draw_all by triton, draw_nucleus by flashinfer, row_statistics by triton, "
        "apply_masks by triton, best_tokens by torch"
    )
    assert caplog.messages[1:] == [expected]


@pytest.mark.parametrize("name", ["apply_masks", "best_tokens"])
def test_numba_kernels_serve_large_vocabularies(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where one is wrong, torch and numpy do the work, and one line says so."""
    assert select_sampling_ops(CPU, NUMBA_VOCABULARY - 1) is TORCH_OPS
    ops = select_sampling_ops(CPU, NUMBA_VOCABULARY)
    assert getattr(ops, name) is not getattr(TORCH_OPS, name)
    assert not caplog.records
    if name == "apply_masks":
        monkeypatch.setattr(numba_masks, name, lambda logits, masks, finite: None)  # a kernel that does nothing
    else:
        monkeypatch.setattr(numba_ranking.BestTokens, "__call__", lambda self, logits: logits.min(dim=-1))
    assert select_sampling_ops(CPU, NUMBA_VOCABULARY) is TORCH_OPS
    (message,) = (record.message for record in caplog.records)
    what = "masked logits" if name == "apply_masks" else "best tokens"
    assert message == (
        f"torch and numpy look for tokens and apply masks, which takes longer: WrongAnswer: {what} differ from torch's"
    )
