"""Brings a ScheduleBatch to the device.

All integers of a step are uploaded here in one packed copy: token ids, positions, slots, the row changes for the
mirror, KV copies, and which hidden states are wanted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from ...attention.backend import AttentionBatch, GraphKind, GraphShape, SharedPrefix
from ...scheduler.batch import ScheduleBatch
from ..layers.step_inputs import StepInputs
from .device_copy import upload

COPIED_AT_ONCE = 1 << 22
"""Row entries that are copied at a time."""


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it: its new tokens, in request order."""

    inputs: StepInputs
    attention: AttentionBatch
    sample_indices: torch.Tensor
    """Device int64 [sampled tokens]: the new tokens that are sampled after, batch.sampled_counts of each row."""
    logprob_indices: torch.Tensor | None
    """Device int64 [n]: the new tokens that need input logprobs; None for none."""
    pooled_indices: torch.Tensor | None
    """Device int64 [n]: the new tokens of batch.pooled, in order; None if there are no spans."""
    copies: tuple[torch.Tensor, torch.Tensor] | None
    """(source, target), device int64 [n] each: slots to copy before the step computes anything; None for none."""
    window_copies: tuple[torch.Tensor, torch.Tensor] | None = None
    """The same in the pool of layers with a window."""


def attention_batch(
    batch: ScheduleBatch, req_to_token: torch.Tensor, req_to_window: torch.Tensor | None = None
) -> AttentionBatch:
    """The step as attention needs it. req_to_token: the mirror, its last row all zeros. req_to_window: the other one,
    where layers with a window have a pool of their own."""
    return AttentionBatch(
        req_to_token=req_to_token,
        host_rows=batch.req_pool_indices,
        prefix_lens=batch.prefix_lens,
        extend_lens=batch.extend_lens,
        pad_row=len(req_to_token) - 1,
        shared=shared_prefixes(batch),
        decodes=decode_rows(batch),
        req_to_window=req_to_window,
    )


def decode_rows(batch: ScheduleBatch) -> np.ndarray:
    """bool [bs]: rows with one new token that is output. A retracted request computes its prompt anew although it has
    output; rows with its last token are decodes, and so are all rows of a search, which is retracted with its beams."""
    ends = batch.samples.copy()
    for step in batch.beams:
        ends[step.start : step.stop] = True
    return ends & (batch.extend_lens == 1) & (batch.output_positions > 0)


def pad_attention(batch: AttentionBatch, shape: GraphShape) -> AttentionBatch:
    """Pad the batch to the shape with sequences over the padding row. In a decode each has one new token. In an extend
    the last has all missing tokens, and the others have no token but one position to read."""
    tokens = shape.tokens - int(batch.extend_lens.sum())
    missing = tokens if shape.kind is GraphKind.DECODE else shape.sequences - len(batch.host_rows)
    if missing == 0:
        return batch
    extend_lens = np.ones(missing, dtype=np.int32)
    if shape.kind is GraphKind.EXTEND:
        extend_lens[:] = 0
        extend_lens[-1] = tokens
    return dataclasses.replace(
        batch,
        host_rows=np.append(batch.host_rows, np.full(missing, batch.pad_row, dtype=np.int32)),
        prefix_lens=np.append(batch.prefix_lens, (extend_lens == 0).astype(np.int32)),
        extend_lens=np.append(batch.extend_lens, extend_lens),
        decodes=None,  # no graph is sparse
    )


def padding_only(req_to_token: torch.Tensor, shape: GraphShape) -> AttentionBatch:
    """A step made only of padding. req_to_token: its last row is all zeros."""
    nothing = np.empty(0, dtype=np.int32)
    batch = AttentionBatch(req_to_token, nothing, nothing, nothing, len(req_to_token) - 1, req_to_window=req_to_token)
    return pad_attention(batch, shape)


def build_forward_batch(
    batch: ScheduleBatch,
    attention: AttentionBatch,
    previous_ids: torch.Tensor | None = None,
    shape: GraphShape | None = None,
) -> ForwardBatch:
    """Bring the mirrors (attention.req_to_token and req_to_window, int32, device) up to date and upload the step.

    attention: from `attention_batch`. previous_ids: device int64 [rows of the previous step]; an input id -(i + 1)
    stands for previous_ids[i]. shape: the graph shape to pad the step to, if any.
    """
    req_to_token, extend_lens, updates = attention.req_to_token, batch.extend_lens, batch.row_updates
    ends = np.cumsum(extend_lens, dtype=np.int64)
    tokens = int(ends[-1])
    # Token j of the step is number j - start_i among the new tokens of its row i.
    first_positions = batch.prefix_lens - (ends - extend_lens)
    positions = np.arange(tokens, dtype=np.int64) + np.repeat(first_positions, extend_lens)
    windows = batch.windows
    inputs = [batch.input_ids, positions, batch.out_cache_loc]
    if windows is not None:
        inputs.append(windows.out)
    wanted = logprob_tokens(batch, ends)
    if shape is not None:
        attention = pad_attention(attention, shape)
        inputs = [np.append(array, np.zeros(shape.tokens - tokens, dtype=array.dtype)) for array in inputs]
    in_window_pool = [windows.updates, windows.copies.source, windows.copies.target] if windows is not None else []
    (
        input_ids,
        positions,
        out_cache_loc,
        samples,
        logprobs,
        pooled,
        update_index,
        update_values,
        source,
        target,
        row_sources,
        row_targets,
        row_lengths,
        *window_arrays,
    ) = upload(
        [
            *inputs[:3],
            last_of_each(ends, batch.sampled_counts),
            wanted,
            pooled_tokens(batch, ends),
            updates.flat_index(req_to_token.shape[1]),
            updates.values,
            batch.copies.source,
            batch.copies.target,
            updates.copies.sources,
            updates.copies.targets,
            updates.copies.lengths,
            *inputs[3:],
            *in_window_pool,
        ],
        req_to_token.device,
    )
    if (batch.input_ids < 0).any():
        assert previous_ids is not None, "a placeholder stands for a token of the step before, which was not given"
        input_ids = torch.where(input_ids < 0, previous_ids[(-input_ids - 1).clamp(min=0)], input_ids)
    if len(updates.values):  # overlapping updates carry equal values, so their order does not matter
        req_to_token.view(-1).index_copy_(0, update_index, update_values.to(torch.int32))
    if len(updates.copies):
        copy_rows(req_to_token, row_sources, row_targets, row_lengths, int(updates.copies.lengths.max()))
    out_window_loc, window_copies = None, None
    if windows is not None:
        req_to_window = attention.req_to_window
        assert req_to_window is not None, "a model without a pool for windows cannot compute this step"
        out_window_loc, window_values, *copied = window_arrays
        if len(windows.copies):
            window_copies = copied[0], copied[1]
        req_to_window.view(-1).index_copy_(0, update_index, window_values.to(torch.int32))
        if len(updates.copies):
            copy_rows(req_to_window, row_sources, row_targets, row_lengths, int(updates.copies.lengths.max()))
    return ForwardBatch(
        inputs=StepInputs(input_ids, positions, out_cache_loc, out_window_loc=out_window_loc),
        attention=attention,
        sample_indices=samples,
        logprob_indices=logprobs if len(wanted) else None,
        pooled_indices=pooled if batch.pooled else None,
        copies=(source, target) if len(batch.copies) else None,
        window_copies=window_copies,
    )


def copy_rows(
    mirror: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, longest: int
) -> None:
    """mirror[targets[i], :lengths[i]] = mirror[sources[i], :lengths[i]], all int64 [n] on the device, each target once.
    longest: the greatest length; the host knows it and need not wait for the device."""
    columns, position = mirror[:, :longest], torch.arange(longest, device=mirror.device)
    at_once = max(1, COPIED_AT_ONCE // longest)  # bounds the extra memory
    for source, target, length in zip(sources.split(at_once), targets.split(at_once), lengths.split(at_once)):
        copied = position < length[:, None]
        columns.index_copy_(0, target, torch.where(copied, columns[source], columns[target]))


def last_of_each(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [sum(counts)]: the last ``counts`` numbers before each of ``ends``, int [n] both."""
    return np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)


def shared_prefixes(batch: ScheduleBatch) -> list[SharedPrefix]:
    """One group per search with beams that share slots and compute one token each."""
    return [
        SharedPrefix(step.start, step.stop - step.start, step.shared_len)
        for step in batch.beams
        if step.stop - step.start > 1
        and step.shared_len > 0
        and (batch.extend_lens[step.start : step.stop] == 1).all()
        and (batch.prefix_lens[step.start : step.stop] == batch.prefix_lens[step.start]).all()
    ]


def logprob_tokens(batch: ScheduleBatch, ends: np.ndarray) -> np.ndarray:
    """int64 [n]: the new tokens at or after their row's logprob_start. ends: int64 [bs], cumulative extend_lens."""
    starts, lens = batch.logprob_starts, batch.extend_lens
    if not (starts < lens).any():
        return np.empty(0, dtype=np.int64)
    column = np.arange(ends[-1]) - np.repeat(ends - lens, lens)
    return np.flatnonzero(column >= np.repeat(starts, lens))


def pooled_tokens(batch: ScheduleBatch, ends: np.ndarray) -> np.ndarray:
    """int64 [n]: the new tokens of batch.pooled, span after span. ends: int64 [bs], cumulative extend_lens."""
    starts = ends - batch.extend_lens
    spans = [np.arange(starts[span.row] + span.start, starts[span.row] + span.stop) for span in batch.pooled]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
