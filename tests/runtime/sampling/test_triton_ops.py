"""The kernels of the draws against their torch twins: the arithmetic in Triton's interpreter, on the CPU; and that they
compile for cards that are not here."""

from __future__ import annotations

import pytest
import torch

from baton.runtime.sampling import ops as torch_ops
from baton.runtime.sampling.noise import exponential_noise
from baton.runtime.sampling.ops import Filters
from baton.runtime.sampling.ranking import top_tokens
from tests.doubles.compile_apart import compile_apart
from tests.doubles.draw_cases import random_case

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
"""The interpreter takes up to a second for each case."""


def noise_of_kernel(tokens: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits, noise) of int32 tokens under one key."""
    from tests.doubles import noise_kernel

    bits, noise = torch.empty_like(tokens), torch.empty(len(tokens))
    noise_kernel.write_noise[(1,)](tokens, keys, bits, noise, len(tokens))  # pyright: ignore[reportArgumentType]
    return bits, noise


def hash_of_torch(tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The integer part of noise.exponential_noise, step by step in 64 bits."""

    def wrap(x: torch.Tensor) -> torch.Tensor:
        return x & 0xFFFFFFFF

    multiplier, offset = (wrap(key.to(torch.int64)) for key in keys)
    h = wrap(tokens.to(torch.int64) * (multiplier | 1) + offset)
    h = wrap((h ^ (h >> 16)) * 0x85EBCA6B)
    h = wrap((h ^ (h >> 13)) * 0xC2B2AE35)
    return (h ^ (h >> 16)).to(torch.int32)


@pytest.mark.parametrize("seed", range(4))
def test_triton_noise_has_same_bits_and_near_equal_values(interpreter, seed):
    """The bits are equal; the logarithm is right to a few units in the last place, also where the noise is tiny."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2**31 - 1, (8192,), dtype=torch.int32, generator=generator)
    keys = torch.randint(-(2**31), 2**31, (2,), generator=generator).to(torch.int32)
    bits, noise = noise_of_kernel(tokens, keys)
    assert torch.equal(bits, hash_of_torch(tokens, keys))
    expected = exponential_noise(keys[None], tokens)[0]
    assert (noise.view(torch.int32) - expected.view(torch.int32)).abs().max() <= 4
    assert expected.min() < 1e-3


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 40), (30, 40), (30, 700), (5, 9000)])
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_ranked_draw_equals_torch(interpreter, rows, vocab_size, seed):
    from baton.runtime.sampling import triton_ops

    case = random_case(seed, rows, vocab_size)
    ranked = top_tokens(case.logits, 60)
    expected = torch_ops.draw_ranked(*ranked, case.filters, case.keys)
    assert torch.equal(triton_ops.draw_ranked(*ranked, case.filters, case.keys), expected)


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(2048, 5), (4000, 60), (9001, 128), (20_000, 256), (40, 30), (5000, 300)]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_top_k_draw_equals_torch(interpreter, vocab_size, width, seed):
    """The last two are for the kernel that draws among ranked tokens. bf16 logits: top_k and top_p cut through ties."""
    from baton.runtime.sampling import triton_ops

    case = random_case(seed, 6, vocab_size, most_top_k=width)
    expected = torch_ops.draw_top_k(case.logits, width, case.filters, case.keys)
    assert torch.equal(triton_ops.draw_top_k(case.logits, width, case.filters, case.keys), expected)


@pytest.mark.parametrize("levels", [1, 2, 30])
def test_triton_top_k_draw_with_only_ties(interpreter, levels):
    """The lowest ids are kept, of zeros of both signs too."""
    from baton.runtime.sampling import triton_ops

    case = random_case(0, 8, 4000, most_top_k=50)
    case.logits.copy_((case.logits * 100).round().remainder(levels) * torch.tensor([1.0, -1.0]).repeat(2000))
    case.filters.top_p.clamp_(max=0.9)
    for width in (50, 200):
        expected = torch_ops.draw_top_k(case.logits, width, case.filters, case.keys)
        assert torch.equal(triton_ops.draw_top_k(case.logits, width, case.filters, case.keys), expected)


@pytest.mark.parametrize("vocab_size", [40, 700, 4096, 9001])
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_nucleus_draw_equals_torch(interpreter, vocab_size, seed):
    """With ties where the nucleus ends."""
    from baton.runtime.sampling import triton_ops

    case = random_case(seed, 6, vocab_size)
    case.filters.top_k.fill_(vocab_size)
    expected = torch_ops.draw_nucleus_by_sort(case.logits, case.filters, case.keys)
    assert torch.equal(triton_ops.draw_nucleus(case.logits, case.filters, case.keys), expected)


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 40), (30, 700), (5, 4096), (5, 9001)])
@pytest.mark.parametrize("seed", SEEDS)
def test_triton_full_draw_equals_torch(interpreter, rows, vocab_size, seed):
    from baton.runtime.sampling import triton_ops

    case = random_case(seed, rows, vocab_size)
    for kept in (None, (case.logits > case.logits.mean()).float()):
        expected = torch_ops.draw_all(case.logits, case.filters, case.keys, kept)
        assert torch.equal(triton_ops.draw_all(case.logits, case.filters, case.keys, kept), expected)


def test_triton_ties_go_to_first_of_ranking(interpreter):
    """Without noise there would be nothing but ties; so one token of each row is as likely as can be."""
    from baton.runtime.sampling import triton_ops

    case = random_case(0, 4, 300)
    certain = torch.full((4, 300), -torch.inf)
    certain[:, 7] = 1.0
    filters = Filters(
        case.filters.temperature, torch.full((4,), 300), torch.full((4,), torch.inf).double(), certain[0, :4]
    )
    assert triton_ops.draw_all(certain, filters, case.keys).tolist() == [7] * 4
    assert triton_ops.draw_ranked(*top_tokens(certain, 5), filters, case.keys).tolist() == [7] * 4
    # All weights are zero but for tokens that are not kept.
    kept = torch.ones(4, 300)
    kept[:, 7] = 0
    assert triton_ops.draw_all(certain, filters, case.keys, kept).tolist() == [0] * 4


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_triton_non_finite_row_affects_no_other(interpreter, broken):
    from baton.runtime.sampling import triton_ops

    case = random_case(1, 3, 5000)

    def draw() -> torch.Tensor:
        """[ways to draw, rows]"""
        ranked = top_tokens(case.logits, 60)
        return torch.stack(
            [
                triton_ops.draw_all(case.logits, case.filters, case.keys),
                triton_ops.draw_ranked(*ranked, case.filters, case.keys),
                triton_ops.draw_top_k(case.logits, 60, case.filters, case.keys),
                triton_ops.draw_nucleus(case.logits, case.filters, case.keys),
            ]
        )

    expected = draw()
    case.logits[1] = broken
    drawn = draw()
    assert drawn[:, [0, 2]].equal(expected[:, [0, 2]])
    assert drawn[:, 1].min() >= 0 and drawn[:, 1].max() < 5000
    case.logits[1] = 0.0
    case.logits[1, 4321] = torch.inf
    assert triton_ops.draw_all(case.logits, case.filters, case.keys)[1] == 4321


def test_triton_draws_of_no_rows_and_oversized_widths(interpreter):
    from baton.runtime.sampling import triton_ops

    case = random_case(2, 2, 5000, most_top_k=5000)
    none = torch.empty(0, dtype=torch.int64)
    filters = case.filters.select_rows(none)
    assert triton_ops.draw_all(case.logits[:0], filters, case.keys[:0]).tolist() == []
    assert triton_ops.draw_ranked(case.logits[:0], case.logits[:0].long(), filters, case.keys[:0]).tolist() == []
    assert triton_ops.draw_top_k(case.logits[:0], 50, filters, case.keys[:0]).tolist() == []
    assert triton_ops.draw_nucleus(case.logits[:0], filters, case.keys[:0]).tolist() == []
    ranked = top_tokens(case.logits, triton_ops.MAX_WIDTH + 1)
    expected = torch_ops.draw_ranked(*ranked, case.filters, case.keys)
    assert torch.equal(triton_ops.draw_ranked(*ranked, case.filters, case.keys), expected)


COMPILE = """
from tests.doubles.draw_cases import random_case
from tests.doubles.triton_compile import compiling_for
from baton.runtime.sampling import triton_ops

with compiling_for(capability) as compiled:
    case = random_case(0, 2, vocab_size)
    for width in (50, 256, 4096):
        triton_ops.draw_top_k(case.logits, width, case.filters, case.keys)
    triton_ops.draw_all(case.logits, case.filters, case.keys)
    triton_ops.draw_nucleus(case.logits, case.filters, case.keys)
    triton_ops.row_statistics(case.logits, 128)
names = ["_choose_chunks", "_draw_top_k", "_draw_ranked", "_draw_all", "_cut_nucleus", "_survey"]
print([compiled.count(name) for name in names])
"""


@pytest.mark.parametrize(
    ("capabilities", "vocab_size"),
    [
        ((90,), 151936),
        pytest.param((90,), 32000, marks=pytest.mark.slow),
        pytest.param((80, 100), 151936, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_compile(tmp_path, capabilities, vocab_size):
    found = compile_apart(f"vocab_size = {vocab_size}\n{COMPILE}", tmp_path, capabilities)
    assert found == dict.fromkeys(capabilities, "[2, 2, 1, 2, 1, 1]")
