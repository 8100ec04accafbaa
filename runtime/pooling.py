"""Vectors of prompts that are pooled: embeddings, logits of a classification head, logprobs of named tokens.

Each step computes the hidden states of `ScheduleBatch.pooled`. Embeddings use the final states, which the head
reads (transformers' ``last_hidden_state``), in the model's dtype. A mean is summed in float32 over the steps that
compute a prompt; sentence-transformers computes the same at once. The vectors go to the host with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..scheduler.batch import PooledSpan, ScheduleBatch
from .runner.device_copy import upload
from .runner.model_runner import ModelRunner
from .sampling.logprobs import PROMPT_SLICE
from .sampling.sequences import SequenceTable


@dataclass(slots=True)
class _Gathered:
    """The states of a prompt's first ``count`` tokens."""

    total: torch.Tensor
    """float32 [hidden_size]: their sum, or the state of the first one alone (cls)."""
    count: int


@dataclass(slots=True)
class VectorsInFlight:
    """Vectors that the device is computing. Copy ``tensors`` to the host, where `read_vectors` splits them."""

    tensors: list[torch.Tensor]
    """float32 [rows, width] each."""
    rows: list[list[tuple[int, int]]]
    """(batch row, length of its vector) for each row of each tensor."""

    def read_vectors(self, arrays: Iterator[np.ndarray]) -> dict[int, np.ndarray]:
        """Batch row -> its vector, float32. arrays: begins with ``tensors`` on the host."""
        found: dict[int, np.ndarray] = {}
        for owners in self.rows:
            for vector, (row, length) in zip(next(arrays), owners, strict=True):
                found[row] = vector[:length].copy()  # a view would keep those of the whole step alive
        return found


class Pooler:
    """Owns the sums of prompts that are computed in several steps, by serial."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._gathered: dict[int, _Gathered] = {}

    def __len__(self) -> int:
        """Prompts of which a part has been gathered."""
        return len(self._gathered)

    def drop(self, serials: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for serial in serials:
            self._gathered.pop(serial, None)

    def pool(self, hidden: torch.Tensor, batch: ScheduleBatch, sequences: SequenceTable) -> VectorsInFlight:
        """Pool the states of batch.pooled, which are ``hidden``: [n, hidden_size], span after span. Returns the vectors
        of the prompts that the step ends."""
        by_output: dict[str, list[tuple[PooledSpan, int]]] = {"hidden": [], "labels": [], "tokens": []}
        start = 0
        for span in batch.pooled:
            pooling = sequences[int(batch.serials[span.row])].info.pooling
            assert pooling is not None, "only prompts that are pooled have spans"
            by_output[pooling.output].append((span, start))
            start += span.stop - span.start
        assert start == len(hidden)
        found = VectorsInFlight([], [])
        if embedded := by_output["hidden"]:
            self._add_embeddings(found, hidden, embedded, batch, sequences)
        if labelled := by_output["labels"]:
            vectors = self._runner.compute_labels(_rows_of(hidden, labelled))
            _add(found, vectors, [(span.row, vectors.shape[1]) for span, _ in labelled])
        if named := by_output["tokens"]:
            ids = [_token_ids(sequences, batch, span) for span, _ in named]
            vectors = self._logprobs(_rows_of(hidden, named), ids)
            _add(found, vectors, [(span.row, len(own)) for (span, _), own in zip(named, ids)])
        return found

    def _add_embeddings(
        self,
        found: VectorsInFlight,
        hidden: torch.Tensor,
        embedded: list[tuple[PooledSpan, int]],
        batch: ScheduleBatch,
        sequences: SequenceTable,
    ) -> None:
        states = self._runner.final_states(hidden)
        vectors: list[torch.Tensor] = []
        owners: list[tuple[int, int]] = []
        for span, start in embedded:
            own = states[start : start + span.stop - span.start]
            serial = int(batch.serials[span.row])
            pooling = sequences[serial].info.pooling
            assert pooling is not None
            if pooling.needs_first_tokens:
                gathered = self._gather(serial, span, own)
                if not span.is_last:
                    continue
                del self._gathered[serial]
                vector = gathered.total / gathered.count if pooling.kind == "mean" else gathered.total
            else:
                vector = own[0]
            vectors.append(vector)
            owners.append((span.row, len(vector)))
        if vectors:
            _add(found, torch.stack(vectors), owners)

    def _gather(self, serial: int, span: PooledSpan, states: torch.Tensor) -> _Gathered:
        """Add the states of a span, float32 [n, hidden_size], to those of the prompt's earlier tokens."""
        if span.position == 0:  # it begins, or it was retracted and begins again
            self._gathered[serial] = _Gathered(states.sum(dim=0), len(states))
        elif len(states):
            gathered = self._gathered[serial]
            assert gathered.count == span.position, "a mean needs every token once"
            gathered.total = gathered.total + states.sum(dim=0)
            gathered.count += len(states)
        return self._gathered[serial]

    def _logprobs(self, hidden: torch.Tensor, named: list[tuple[int, ...]]) -> torch.Tensor:
        """float32 [rows, most ids of a row]: logprobs of each row's ids as its next token."""
        table = np.zeros((len(named), max(map(len, named))), dtype=np.int64)
        for row, ids in enumerate(named):
            table[row, : len(ids)] = ids
        (ids_of_row,) = upload([table.reshape(-1)], hidden.device)
        parts = []
        for states, ids in zip(hidden.split(PROMPT_SLICE), ids_of_row.view(table.shape).split(PROMPT_SLICE)):
            logits = self._runner.compute_logits(states)
            parts.append(logits.gather(-1, ids) - logits.logsumexp(dim=-1, keepdim=True))
        return torch.cat(parts)


def _token_ids(sequences: SequenceTable, batch: ScheduleBatch, span: PooledSpan) -> tuple[int, ...]:
    pooling = sequences[int(batch.serials[span.row])].info.pooling
    assert pooling is not None
    return pooling.token_ids


def _rows_of(hidden: torch.Tensor, spans: list[tuple[PooledSpan, int]]) -> torch.Tensor:
    """[spans, hidden_size]: the state of each span, which has one token."""
    if len(spans) == len(hidden):
        return hidden
    (index,) = upload([np.array([start for _, start in spans], dtype=np.int64)], hidden.device)
    return hidden.index_select(0, index)


def _add(found: VectorsInFlight, vectors: torch.Tensor, owners: list[tuple[int, int]]) -> None:
    found.tensors.append(vectors.contiguous())
    found.rows.append(owners)
