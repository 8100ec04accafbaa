"""Page numbers against a loop, by torch and by the Triton kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.attention.flashinfer.library import build_kv_indices


def case(page_size: int, device: str = "cpu") -> tuple[dict, np.ndarray]:
    """Arguments, and what must come out."""
    rng = np.random.default_rng(page_size)
    pages = rng.integers(1, 500, (6, 40)).astype(np.int32)
    slots = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(6, -1).astype(np.int32)
    rows = np.array([3, 0, 5, 3], dtype=np.int32)
    starts, counts = np.array([0, 7, 2, 11]) * page_size, np.array([40, 1, 0, 25])
    expected = [pages[row, start // page_size :][:count] for row, start, count in zip(rows, starts, counts)]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays = {"req_to_token": slots, "rows": rows, "starts": starts.astype(np.int32), "kv_indptr": indptr}
    arguments: dict = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    arguments |= {"page_size": page_size, "most_pages": int(counts.max())}
    arguments["out"] = torch.full((int(counts.sum()),), -1, dtype=torch.int32, device=device)
    return arguments, np.concatenate(expected)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_torch_kv_indices_match_loop(page_size):
    arguments, expected = case(page_size)
    build_kv_indices(**arguments)
    np.testing.assert_array_equal(arguments["out"].numpy(), expected)


def check_triton(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.attention.flashinfer import triton_kv_indices

    monkeypatch.setattr(triton_kv_indices, "BLOCK", 16)  # several programs for a sequence
    for page_size in (1, 16, 64):
        arguments, expected = case(page_size, device)
        triton_kv_indices.build_kv_indices(**arguments)
        np.testing.assert_array_equal(arguments["out"].cpu().numpy(), expected)


@pytest.mark.usefixtures("interpreter")
def test_interpreted_triton_kv_indices_match_loop(monkeypatch):
    check_triton("cpu", monkeypatch)


@pytest.mark.gpu
def test_triton_kv_indices_on_gpu_match_loop(monkeypatch):
    check_triton("cuda", monkeypatch)
