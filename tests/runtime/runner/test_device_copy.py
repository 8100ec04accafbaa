from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.runtime.runner.device_copy import pack, pack_arrays, to_host, unpack, unpack_arrays, upload

CPU = torch.device("cpu")


def by_pack(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """As it goes to a GPU."""
    return unpack_arrays(pack_arrays(arrays, pinned=False), arrays)


both_ways = pytest.mark.parametrize("send", [upload, by_pack])


@both_ways
def test_types_shapes_and_order_of_uploads(send):
    rng = np.random.default_rng(0)
    arrays = [
        np.array([-3, 2], dtype=np.int32),
        rng.normal(size=3).astype(np.float32),  # not a whole number of words
        np.empty(0, dtype=np.float32),
        rng.normal(size=(2, 3)).astype(np.float32),
        np.array([True, False]),
        rng.normal(size=5),
        np.arange(6, dtype=np.int64).reshape(3, 2),
        np.empty((0, 4), dtype=np.int16),
    ]
    tensors = send(arrays, CPU)
    assert [t.dtype for t in tensors] == [
        *(torch.int64, torch.float32, torch.float32, torch.float32),
        *(torch.int64, torch.float64, torch.int64, torch.int64),
    ]
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
    assert upload([], CPU) == []


@both_ways
def test_an_array_may_change_after_its_upload(send):
    array = np.arange(4)
    (tensor,) = send([array], CPU)
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3]


@both_ways
def test_strided_arrays_are_uploaded_in_logical_order(send):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert send([array], CPU)[0].tolist() == array.tolist()


@both_ways
def test_lossy_upload_dtypes_are_refused(send):
    for dtype in (np.uint64, np.float16, np.complex64):
        with pytest.raises(TypeError, match=str(np.dtype(dtype))):
            send([np.zeros(2, dtype=dtype)], CPU)


def tensors(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(3, 4, generator=generator).to(device)
    return [
        torch.arange(5, device=device),
        floats,
        floats.t(),
        torch.empty(2, 0, device=device),
        torch.arange(3, dtype=torch.int32, device=device),
        torch.tensor([2**40, -1], device=device),
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_tensors_reach_the_host_unchanged(device, count):
    sent = tensors(device)[:count]
    arrays = to_host(sent).wait()
    assert len(arrays) == count
    for array, tensor in zip(arrays, sent, strict=True):
        expected = tensor.cpu().numpy()
        assert array.dtype == expected.dtype and array.shape == expected.shape
        assert np.array_equal(array, expected)


def test_packed_tensors_unpack_unchanged():
    sent = tensors("cpu")
    sent = [sent[0], sent[5], *sent[1:5]]  # those of 8 bytes first
    packed = pack(sent)
    assert packed.dtype == torch.int32 and packed.shape == (2 * 7 + 12 + 12 + 3,)
    for tensor, expected in zip(unpack(packed, sent), sent, strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


@pytest.mark.gpu
def test_repeated_uploads_to_gpu_arrive_intact():
    arrays = [np.arange(1000, dtype=np.int32), np.linspace(0, 1, 7, dtype=np.float32), np.array([0.1])]
    for _ in range(100):  # buffers are used again while copies are under way
        for tensor, array in zip(upload(arrays, torch.device("cuda")), arrays, strict=True):
            assert tensor.tolist() == array.tolist()
