from __future__ import annotations

import numpy as np
import torch

from baton.attention.backend import GraphKind, GraphShape, SharedPrefix
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.runtime.runner.forward_batch import ForwardBatch, attention_batch, build_forward_batch
from baton.scheduler.batch import BeamStep, ForwardMode, KVCopies, ScheduleBatch


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_batch(rows: ReqToTokenPool, **changes) -> ScheduleBatch:
    """Rows 2 and 0: three new tokens over four, one new token over nothing."""
    batch = {
        "step_id": 7,
        "mode": ForwardMode.EXTEND,
        "opened": [],
        "closed": [],
        "serials": np.array([8, 5]),
        "input_ids": int32(11, 12, 13, 21),
        "out_cache_loc": int32(5, 6, 7, 9),
        "req_pool_indices": int32(2, 0),
        "prefix_lens": int32(4, 0),
        "extend_lens": int32(3, 1),
        "samples": np.array([True, True]),
        "output_positions": int32(0, 0),
        "logprob_starts": int32(3, 1),
        "logprob_targets": [],
        "row_updates": rows.take_updates(),
        "copies": KVCopies.join([]),
    }
    return ScheduleBatch(**(batch | changes))


def make_rows() -> tuple[ReqToTokenPool, torch.Tensor]:
    return ReqToTokenPool(3, 16), torch.zeros(4, 16, dtype=torch.int32)


def build(batch: ScheduleBatch, mirror: torch.Tensor, shape: GraphShape | None = None) -> ForwardBatch:
    return build_forward_batch(batch, attention_batch(batch, mirror), None, shape)


def test_positions_slots_and_last_tokens():
    rows, mirror = make_rows()
    forward = build(make_batch(rows), mirror)
    assert forward.inputs.input_ids.tolist() == [11, 12, 13, 21]
    assert forward.inputs.positions.tolist() == [4, 5, 6, 0]
    assert forward.inputs.out_cache_loc.tolist() == [5, 6, 7, 9]
    assert forward.attention.host_rows.tolist() == [2, 0] and forward.attention.pad_row == 3
    assert forward.sample_indices.tolist() == [2, 3]
    assert forward.logprob_indices is None and forward.copies is None
    assert forward.inputs.input_ids.dtype == forward.inputs.out_cache_loc.dtype == torch.int64


def test_only_rows_that_sample_are_selected():
    rows, mirror = make_rows()
    forward = build(make_batch(rows, samples=np.array([False, True])), mirror)
    assert forward.sample_indices.tolist() == [3]
    forward = build(make_batch(rows, samples=np.array([False, False])), mirror)
    assert forward.sample_indices.tolist() == []


def test_logprob_tokens_begin_at_each_row_start():
    rows, mirror = make_rows()
    for starts, expected in (((1, 1), [1, 2]), ((3, 0), [3]), ((0, 0), [0, 1, 2, 3])):
        forward = build(make_batch(rows, logprob_starts=int32(*starts)), mirror)
        assert forward.logprob_indices is not None and forward.logprob_indices.tolist() == expected


def test_the_mirror_follows_the_host_rows():
    rng = np.random.default_rng(0)
    rows, mirror = make_rows()
    for _ in range(50):
        for _ in range(int(rng.integers(0, 4))):
            start, length = int(rng.integers(0, 10)), int(rng.integers(1, 6))
            rows.write(int(rng.integers(0, 3)), start, rng.integers(1, 99, length).astype(np.int32))
        if rng.random() < 0.5:
            rows.write_many(int32(0, 2), int32(3, 15), rng.integers(1, 99, 2).astype(np.int32))
        build(make_batch(rows), mirror)
        assert np.array_equal(mirror[:-1].numpy(), rows.rows) and not mirror[-1].any()


def test_copies_are_uploaded():
    rows, mirror = make_rows()
    copies = KVCopies(source=int32(3, 4), target=int32(8, 3))
    forward = build(make_batch(rows, copies=copies), mirror)
    assert forward.copies is not None
    assert [slots.tolist() for slots in forward.copies] == [[3, 4], [8, 3]]


def test_beams_of_a_decode_share_their_prefix():
    """Not a prompt, not a single beam, and not what computes several tokens each."""
    rows, mirror = ReqToTokenPool(8, 16), torch.zeros(9, 16, dtype=torch.int32)
    steps = [(0, 1, 4), (1, 4, 4), (4, 6, 0), (6, 8, 4)]
    batch = make_batch(
        rows,
        serials=np.repeat(np.arange(4), [1, 3, 2, 2]),
        input_ids=np.arange(10, dtype=np.int32),
        out_cache_loc=np.arange(10, dtype=np.int32),
        req_pool_indices=np.arange(8, dtype=np.int32),
        prefix_lens=int32(5, 6, 6, 6, 7, 7, 4, 4),
        extend_lens=int32(1, 1, 1, 1, 1, 1, 2, 2),
        samples=np.ones(8, dtype=bool),
        output_positions=int32(0, 3, 3, 3, 1, 1, 2, 2),
        logprob_starts=np.full(8, 2, dtype=np.int32),
        beams=[
            BeamStep(serial, start, stop, 8, np.zeros(stop - start, np.float32), shared_len=shared)
            for serial, (start, stop, shared) in enumerate(steps)
        ],
    )
    attention = build(batch, mirror).attention
    assert attention.shared == [SharedPrefix(1, 3, 4)]
    assert attention.decodes is not None, "not a prompt's token, and not several"
    assert attention.decodes.tolist() == [False, True, True, True, True, True, False, False]


def test_rows_of_a_retracted_request_are_decodes_from_its_last_token_on():
    """Its prompt may come one token at a time, as what a step has room for, and other requests use its KV."""
    rows, mirror = ReqToTokenPool(8, 16), torch.zeros(9, 16, dtype=torch.int32)
    batch = make_batch(
        rows,
        prefix_lens=int32(3, 9, 6, 6),
        extend_lens=int32(1, 1, 1, 1),
        samples=np.array([False, True, False, False]),
        output_positions=int32(4, 4, 2, 2),
        logprob_starts=int32(1, 1, 1, 1),
        beams=[BeamStep(2, 2, 4, 0, np.zeros(2, np.float32), shared_len=3)],
    )
    decodes = build(batch, mirror).attention.decodes
    assert decodes is not None and decodes.tolist() == [False, True, True, True], "beams recompute output alone"


def test_padding_of_an_extend():
    """Token 0 at position 0 of the padding row, written to slot 0; the rows that sample are where they were."""
    rows, mirror = make_rows()
    plain = build(make_batch(rows), mirror)
    padded = build(make_batch(rows), mirror, GraphShape(GraphKind.EXTEND, 10, 5))
    assert padded.inputs.input_ids.tolist() == [11, 12, 13, 21, *[0] * 6]
    assert padded.inputs.positions.tolist() == [4, 5, 6, 0, *[0] * 6]
    assert padded.inputs.out_cache_loc.tolist() == [5, 6, 7, 9, *[0] * 6]
    assert padded.attention.host_rows.tolist() == [2, 0, 3, 3, 3]
    assert padded.attention.extend_lens.tolist() == [3, 1, 0, 0, 6]
    assert padded.attention.prefix_lens.tolist() == [4, 0, 1, 1, 0]
    assert padded.sample_indices.tolist() == plain.sample_indices.tolist()
    full = build(make_batch(rows), mirror, GraphShape(GraphKind.EXTEND, 4, 3))
    assert full.attention.extend_lens.tolist() == [3, 1, 0] and full.attention.prefix_lens.tolist() == [4, 0, 1]


def test_padding_of_a_decode():
    rows, mirror = make_rows()
    batch = make_batch(
        rows,
        mode=ForwardMode.DECODE,
        input_ids=int32(11, 21),
        out_cache_loc=int32(5, 9),
        extend_lens=int32(1, 1),
        logprob_starts=int32(1, 1),
    )
    padded = build(batch, mirror, GraphShape(GraphKind.DECODE, 4, 4))
    assert padded.inputs.input_ids.tolist() == [11, 21, 0, 0]
    assert padded.attention.extend_lens.tolist() == [1, 1, 1, 1] and padded.attention.prefix_lens.tolist() == [
        4,
        0,
        0,
        0,
    ]
    assert padded.attention.extend_lens.dtype == padded.attention.host_rows.dtype == np.int32


def test_rows_are_copied_on_the_device():
    rows, mirror = make_rows()
    rows.write(0, 0, int32(5, 6, 7, 8))
    build(make_batch(rows), mirror)
    rows.copy_rows(int32(0), int32(1), 4)
    rows.copy_rows(int32(0), int32(2), 3)
    rows.write(2, 3, int32(9))
    batch = make_batch(rows)
    assert len(batch.row_updates.values) == 1, "the rest is on the device already"
    build(batch, mirror)
    assert (mirror[:3].numpy() == rows.rows).all() and not mirror[3].any()
