"""The draws on a GPU: kernels against torch, on the device and on the CPU; and each row by itself."""

from __future__ import annotations

import functools

import pytest
import torch

from baton.runtime.sampling import ops as torch_ops
from baton.runtime.sampling.op_providers import select_sampling_ops
from baton.runtime.sampling.ops import TORCH_GPU_OPS, SamplingOps
from baton.runtime.sampling.ranking import row_statistics, top_tokens
from tests.doubles.draw_cases import DrawCase, random_case

pytestmark = pytest.mark.gpu

VOCABULARIES = [1000, 128_256, 151_936]
ROWS = 64
OTHER_TOKENS = 1 / ROWS
"""Share of draws that may differ: last bits of an exponential decide about one race in a million."""


@functools.cache
def ops_for(vocab_size: int) -> SamplingOps:
    return select_sampling_ops(torch.device("cuda"), vocab_size)


def on_cpu(case: DrawCase) -> DrawCase:
    fields = (case.filters.temperature, case.filters.top_k, case.filters.top_p, case.filters.log_min_p)
    return DrawCase(case.logits.cpu(), torch_ops.Filters(*(field.cpu() for field in fields)), case.keys.cpu())


def draw(ops: SamplingOps, name: str, case: DrawCase, width: int) -> torch.Tensor:
    if name == "draw_top_k":
        return ops.draw_top_k(case.logits, width, case.filters, case.keys)
    if name == "draw_nucleus":
        return ops.draw_nucleus(case.logits, case.filters, case.keys)
    return ops.draw_all(case.logits, case.filters, case.keys)


def make_case(name: str, vocab_size: int, width: int, seed: int) -> DrawCase:
    case = random_case(seed, ROWS, vocab_size, most_top_k=width, device="cuda", ties=name != "draw_nucleus")
    if name != "draw_top_k":
        case.filters.top_k.fill_(vocab_size)
    return case


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("draw_top_k", 20),
        ("draw_top_k", 100),
        ("draw_top_k", 250),
        ("draw_top_k", 900),
        ("draw_nucleus", 1),
        ("draw_all", 1),
    ],
)
def test_kernel_draws_match_torch(parity, name, width, vocab_size):
    ops = ops_for(vocab_size)
    for seed in range(4):
        case = make_case(name, vocab_size, width, seed)
        found = draw(ops, name, case, width)
        for twin, expected in (
            ("torch", draw(_torch(), name, case, width)),
            ("the CPU", draw(_torch(), name, on_cpu(case), width).cuda()),
        ):
            others = (found != expected).double().mean()
            parity(f"{name}: share of tokens other than {twin}'s", others, torch.zeros(()), atol=OTHER_TOKENS, rtol=0)


def _torch() -> SamplingOps:
    return TORCH_GPU_OPS


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("name", ["draw_top_k", "draw_nucleus", "draw_all"])
def test_gpu_draws_are_batch_invariant(name, vocab_size):
    ops = ops_for(vocab_size)
    case = make_case(name, vocab_size, 60, 0)
    together = draw(ops, name, case, 60)
    for rows in ([5], [63, 0], list(range(7, 40))):
        index = torch.tensor(rows, device="cuda")
        part = DrawCase(case.logits[index], case.filters.select_rows(index), case.keys[index])
        assert torch.equal(draw(ops, name, part, 60), together[index])


@pytest.mark.parametrize("cut", ["triton", "flashinfer"])
@pytest.mark.parametrize("vocab_size", [128_256])
def test_gpu_nucleus_draws_match_sorted_nucleus(parity, cut, vocab_size):
    """Both that a GPU may have, whichever it prefers."""
    if cut == "flashinfer":
        pytest.importorskip("flashinfer")
        from baton.runtime.sampling import flashinfer_ops, triton_ops

        case = make_case("draw_nucleus", vocab_size, 1, 0)
        found = flashinfer_ops.draw_nucleus(case.logits, case.filters, case.keys, draw_all=triton_ops.draw_all)
    else:
        from baton.runtime.sampling import triton_ops

        case = make_case("draw_nucleus", vocab_size, 1, 0)
        found = triton_ops.draw_nucleus(case.logits, case.filters, case.keys)
    others = (found != torch_ops.draw_nucleus_by_sort(case.logits, case.filters, case.keys)).double().mean()
    parity(f"nucleus by {cut}: share of other tokens", others, torch.zeros(()), atol=OTHER_TOKENS, rtol=0)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gpu_row_statistics_match_torch(parity, vocab_size):
    ops = ops_for(vocab_size)
    logits = random_case(0, 512, vocab_size, device="cuda").logits
    for name, found, expected in zip(
        ("maxima", "best", "log_sum"), ops.row_statistics(logits, 128), row_statistics(logits, 128)
    ):
        parity(f"row_statistics of beams: {name}", found, expected, atol=1e-5 if name == "log_sum" else 0, rtol=0)


@pytest.mark.parametrize("k", [1, 50, 1000])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gpu_ranking_equals_cpu(k, vocab_size):
    case = random_case(k, 16, vocab_size, device="cuda")
    values, ids = top_tokens(case.logits, k)
    expected_values, expected_ids = top_tokens(case.logits.cpu(), k)
    assert torch.equal(ids.cpu(), expected_ids) and torch.equal(values.cpu(), expected_values)


def test_gpu_noise_matches_cpu(parity):
    from baton.runtime.sampling.noise import exponential_noise
    from tests.doubles import noise_kernel

    tokens = torch.arange(16_384, dtype=torch.int32, device="cuda")
    keys = torch.tensor([123_456_789, -987_654_321], dtype=torch.int32, device="cuda")
    bits, noise = torch.empty_like(tokens), torch.empty(len(tokens), device="cuda")
    noise_kernel.write_noise[(1,)](tokens, keys, bits, noise, len(tokens))  # pyright: ignore[reportArgumentType]
    expected = exponential_noise(keys[None].cpu(), tokens.cpu())[0]
    parity("noise of a draw, by Triton", noise, expected, atol=0, rtol=1e-6)
    parity("noise of a draw, by torch", exponential_noise(keys[None], tokens)[0], expected, atol=0, rtol=1e-6)
