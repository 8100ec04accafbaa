"""Runs a step, from a ScheduleBatch to tokens on the host: forward, sample or rank beams, logprobs, stop strings.

This is all that happens between the scheduler's `next_batch` and `process_result`. It knows the model runner and the
sampler, not the queues. It knows only what the batches said of each sequence (`SequenceTable`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch, StepResult, StopMatch
from .pooling import Pooler, VectorsInFlight
from .runner.device_copy import HostCopy, to_host, upload
from .runner.forward_batch import last_of_each
from .runner.model_runner import ForwardOutput, ModelRunner
from .runner.step_profile import StepProfiler
from .sampling.beam_candidates import BeamRanker
from .sampling.logprobs import (
    LogprobsInFlight,
    SampledLogprobs,
    TokenLogprobs,
    logprob_rows,
    prompt_logprobs,
    sampled_logprobs,
)
from .sampling.penalties import PendingTokens
from .sampling.sampler import Sampled, Sampler
from .sampling.sequences import SequenceTable
from .sampling.token_masks import forbidden_rows, is_forbidden
from .text.stop_strings import StopStringChecker
from .text.token_bytes import TokenBytes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepOutput:
    """The output of a step: ``result`` for the scheduler, the logprobs for the clients."""

    result: StepResult
    output_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Batch row -> logprobs of its new tokens, for sequences that want them."""
    input_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """(serial, logprobs of prompt tokens that this step computed), in prompt order for each sequence."""
    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    """Batch row -> float32, the vector of a prompt that is pooled and that this step ended."""


@dataclass(slots=True)
class StepInFlight:
    """A step that the device is working on, or has finished. `StepRunner.finish` waits for it."""

    batch: ScheduleBatch
    forward: ForwardOutput
    sampled: SampledStep | None = None
    """None until its tokens are sampled: at once, unless a constraint waits for a token of the step before."""

    @property
    def next_ids(self) -> torch.Tensor:
        """Device int64 [bs]: the sampled token of each row, meaningless where none is. The next step reads it there."""
        assert self.sampled is not None, "a step is sampled before the next one is launched"
        return self.sampled.next_ids


@dataclass(slots=True)
class SampledStep:
    """What was sampled in a step, on its way to the host."""

    next_ids: torch.Tensor
    counts: np.ndarray
    """int32 [bs]: tokens that are sampled for each row, without those of beams; n in all."""
    output_logprobs: SampledLogprobs | None
    input_logprobs: LogprobsInFlight | None
    vectors: VectorsInFlight | None
    copy: HostCopy
    """The sampled tokens, int64 [n]; their peaks, float32 [n]; where something is banned, their own logits, float32
    [n]; then the tensors of the logprobs, and those of the vectors."""
    has_bans: bool
    beams: list[BeamCandidates | None]
    unchecked_rows: list[int]
    """Batch rows of searches for which the stop string check raised."""


class StepRunner:
    """See the module docstring. ``load_token_bytes`` is called once, for the first request with a stop string
    or regex."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        load_token_bytes: Callable[[], TokenBytes],
        profiler: StepProfiler,
    ) -> None:
        self._runner = runner
        self._profiler = profiler
        self._sampler = sampler
        self._ranker = BeamRanker(runner.config.vocab_size, runner.config.eos_token_ids, runner.device, sampler.ops)
        self._load_token_bytes = load_token_bytes
        self._stop_strings: StopStringChecker | None = None
        self._pooler = Pooler(runner)
        self._sequences = SequenceTable()
        self._vocab_size = runner.config.vocab_size

    def run(self, batch: ScheduleBatch) -> StepOutput:
        """Compute one step and wait for it."""
        return self.finish(self.launch(batch, None))

    @torch.inference_mode()
    def launch(
        self, batch: ScheduleBatch, previous: StepInFlight | None, prepared: Callable[[], None] = lambda: None
    ) -> StepInFlight:
        """Launch a step. ``previous`` is the step still in flight, if any; where the host does not know its tokens yet,
        the device fills them in. prepared: called when there is nothing left to do but to compute."""
        self._open_and_close(batch)
        previous_ids = None if previous is None else previous.next_ids
        adapters = self._sequences.adapters_of(batch.serials)
        step = StepInFlight(batch, self._runner.forward(batch, previous_ids, prepared, adapters))
        if not batch.lacks_masks:
            step.sampled = self._sample_step(batch, step.forward, previous_ids)
        return step

    @torch.inference_mode()
    def sample(self, step: StepInFlight) -> None:
        """Sample the tokens of a step that lacked masks when it was launched. The step before has been finished."""
        step.sampled = self._sample_step(step.batch, step.forward, None)

    def _sample_step(
        self, batch: ScheduleBatch, forward: ForwardOutput, previous_ids: torch.Tensor | None
    ) -> SampledStep:
        """previous_ids: of the step before, if it is still in flight."""
        counts = batch.sampled_counts
        for step in batch.beams:
            counts[step.start : step.stop] = 0
        sampled, outputs = self._sample(forward.logits, batch, counts, previous_ids)
        inputs = None
        if forward.logprob_hidden is not None:
            inputs = prompt_logprobs(forward.logprob_hidden, batch, self._sequences, self._runner.compute_logits)
        vectors = None
        if forward.pooled_hidden is not None:
            vectors = self._pooler.pool(forward.pooled_hidden, batch, self._sequences)
        asked = (outputs.scores if outputs is not None else None, inputs, vectors)
        scores = [wanted for wanted in asked if wanted is not None]
        tokens = [sampled.ids, sampled.peaks, *([sampled.chosen] if sampled.chosen is not None else [])]
        copy = to_host([*tokens, *(tensor for score in scores for tensor in score.tensors)])
        next_ids = sampled.ids if (counts == 1).all() else _first_of_each(sampled.ids, counts)
        self._profiler.lap("launch")
        beams: list[BeamCandidates | None] = []
        unchecked: list[int] = []
        if batch.beams:
            beams = self._rank_beams(forward.logits, batch, unchecked)  # last, because it waits for the device
            self._profiler.lap("wait")
        return SampledStep(
            next_ids=next_ids,
            counts=counts,
            output_logprobs=outputs,
            input_logprobs=inputs,
            vectors=vectors,
            copy=copy,
            has_bans=sampled.chosen is not None,
            beams=beams,
            unchecked_rows=unchecked,
        )

    def finish(self, step: StepInFlight) -> StepOutput:
        """Wait for a step and collect what it computed."""
        found = step.sampled
        assert found is not None
        arrays = iter(found.copy.wait())
        sampled, peaks = next(arrays), next(arrays)
        chosen = next(arrays) if found.has_bans else None
        self._profiler.lap("wait")
        counts, accepted, places = found.counts, sampled, _sample_places(step.batch, found.counts)
        if step.batch.draft_lens is not None:
            counts, taken = verify_drafts(step.batch, sampled, counts)
            accepted, peaks, places = sampled[taken], peaks[taken], places[taken]
            chosen = chosen[taken] if chosen is not None else None
        failed: list[int] = []
        if not np.isfinite(peaks).all():
            failed = np.unique(np.repeat(np.arange(len(counts)), counts)[~np.isfinite(peaks)]).tolist()
        for beam, candidates in zip(step.batch.beams, found.beams):
            if candidates is not None and not candidates.is_finite:
                failed += range(beam.start, beam.stop)
        output = StepOutput(StepResult(accepted.astype(np.int32), counts, beams=found.beams))
        output.result.forbidden_rows = self._forbidden_rows(step.batch, found.beams, counts, accepted, places, chosen)
        if found.output_logprobs is not None:
            output.output_logprobs = found.output_logprobs.read_rows(arrays, sampled, counts)
        if found.input_logprobs is not None:
            chunks = found.input_logprobs.read_logprobs(arrays, step.batch.logprob_targets)
            rows = logprob_rows(step.batch)
            failed += [row for row, chunk in zip(rows.tolist(), chunks, strict=True) if np.isnan(chunk.values).any()]
            output.input_logprobs = list(zip(step.batch.serials[rows].tolist(), chunks, strict=True))
        if found.vectors is not None:
            output.vectors = found.vectors.read_vectors(arrays)
            failed += [row for row, vector in output.vectors.items() if not np.isfinite(vector).all()]
        if failed:
            sound = self._runner.sound_tokens(step.batch, failed)
            known = step.batch.seq_lens + counts - found.counts  # wrong guesses do not count
            output.result.failed_rows = {row: n if n < known[row] else 0 for row, n in sound.items()}
        self._take_tokens(step.batch, found.unchecked_rows, output.result)
        return output

    def _forbidden_rows(
        self,
        batch: ScheduleBatch,
        beams: list[BeamCandidates | None],
        counts: np.ndarray,
        accepted: np.ndarray,
        places: np.ndarray,
        chosen: np.ndarray | None,
    ) -> tuple[int, ...]:
        rows = forbidden_rows(batch, counts, accepted, places, chosen, self._vocab_size)
        for beam, found in zip(batch.beams, beams):
            if found is not None and is_forbidden(beam, found, self._vocab_size):
                rows += range(beam.start, beam.stop)
        return tuple(rows)

    def _open_and_close(self, batch: ScheduleBatch) -> None:
        self._sequences.update_sequences(batch.opened, batch.closed)
        self._pooler.drop(batch.closed)
        if self._stop_strings is not None:
            for serial in batch.closed:
                self._stop_strings.drop(serial)

    def _take_tokens(self, batch: ScheduleBatch, unchecked_rows: list[int], result: StepResult) -> None:
        """Record the new tokens of the sequences that need them, and look for their stop strings. Sequences that were
        closed since the launch are skipped, and those that end for a forbidden token. A check that raises ends its
        sequence alone."""
        result.unchecked_rows = tuple(unchecked_rows)
        recording = self._sequences.recording
        if not recording:
            return
        serials, tokens_of, has_states = batch.serials, result.rows(), batch.states is not None
        for row in np.flatnonzero(result.counts).tolist():
            sequence = recording.get(int(serials[row]))
            if sequence is None or row in result.forbidden_rows:
                continue
            if sequence.has_stops:
                try:
                    found = self._stop_string_checker().check_tokens(
                        sequence.info.serial, sequence.sampling, sequence.output_ids, tokens_of[row]
                    )
                except Exception:
                    logger.exception("the stop strings of a request could not be looked for; it ends with an error")
                    result.unchecked_rows += (row,)
                    continue
                if found is not None:
                    result.stop_matches[row] = found
                elif has_states and not sequence.sampling.no_stop_trim:
                    kept = self._stop_string_checker().kept_tokens(sequence.info.serial)
                    if kept is not None:
                        result.stop_begins[row] = kept
            sequence.append(tokens_of[row])

    def _sample(
        self, logits: torch.Tensor, batch: ScheduleBatch, counts: np.ndarray, previous_ids: torch.Tensor | None
    ) -> tuple[Sampled, SampledLogprobs | None]:
        """Sample ``counts`` tokens for each row, int32 [bs]; also the logprobs of those that want them."""
        own = np.flatnonzero(counts)
        rows = np.repeat(own, counts[own])
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
            return Sampled(nothing, nothing.to(torch.float32)), None
        sequences = [self._sequences[serial] for serial in batch.serials[rows].tolist()]
        allowed = batch.allowed
        if len(rows) < len(logits):
            places = _sample_places(batch, counts)
            logits = _take_rows(logits, places)
            if allowed is not None:
                allowed = allowed.renumber(lambda constrained: np.searchsorted(places, constrained).astype(np.int32))
        pending = None
        if previous_ids is not None:
            before = last_of_each(np.cumsum(batch.extend_lens)[own], counts[own])
            pending = PendingTokens(batch.input_ids[before], previous_ids)
        positions = batch.output_positions[rows]
        if len(own) < len(rows):
            positions = positions + last_of_each(counts[own], counts[own])
        sampled = self._sampler.sample(logits, sequences, positions, allowed, pending)
        return sampled, sampled_logprobs(logits, sampled.ids, sequences, rows)

    def _rank_beams(
        self, logits: torch.Tensor, batch: ScheduleBatch, unchecked: list[int]
    ) -> list[BeamCandidates | None]:
        """Parallel to batch.beams; None for searches that want no candidates. unchecked: gets the batch rows of
        searches for which the stop string check raised."""
        steps = [step for step in batch.beams if step.num_candidates > 0]
        if not steps:
            return [None] * len(batch.beams)
        rows = np.concatenate([np.arange(step.start, step.stop) for step in steps])
        sequences = [self._sequences[step.serial] for step in steps]
        places = np.cumsum(batch.sampled_counts)[rows] - 1
        ranked = iter(self._ranker.rank(_take_rows(logits, places), steps, sequences))
        found = [next(ranked) if step.num_candidates > 0 else None for step in batch.beams]
        for step, candidates in zip(batch.beams, found):
            if candidates is not None and step.sequences is not None:
                try:
                    candidates.stops.update(self._stops_of(step, step.sequences, candidates))
                except Exception:
                    logger.exception("the stop strings of a search could not be looked for; it ends with an error")
                    unchecked += range(step.start, step.stop)
        return found

    def _stops_of(self, step: BeamStep, sequences: np.ndarray, candidates: BeamCandidates) -> dict[int, StopMatch]:
        return self._stop_string_checker().check_beams(
            step.serial, self._sequences[step.serial].sampling, sequences, candidates.parents, candidates.tokens
        )

    def _stop_string_checker(self) -> StopStringChecker:
        if self._stop_strings is None:
            self._stop_strings = StopStringChecker(self._load_token_bytes())
        return self._stop_strings


def verify_drafts(batch: ScheduleBatch, sampled: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the samples of each row up to the first that was not guessed; those computed behind it are invalid.

    sampled: int [n], the tokens sampled, row after row; counts: int32 [bs], how many of each row, one more than its
    guesses. Returns int32 [bs], how many are taken of each, and bool [n], which.
    """
    assert batch.draft_lens is not None
    kept, taken = counts.copy(), np.ones(len(sampled), dtype=bool)
    ends, token_ends = np.cumsum(counts), np.cumsum(batch.extend_lens)
    for row in np.flatnonzero((batch.draft_lens > 0) & (counts > 0)).tolist():
        drafted, end, token_end = int(batch.draft_lens[row]), int(ends[row]), int(token_ends[row])
        start = end - drafted - 1
        wrong = np.flatnonzero(sampled[start : end - 1] != batch.input_ids[token_end - drafted : token_end])
        if len(wrong):
            kept[row] = wrong[0] + 1
            taken[start + kept[row] : end] = False
    return kept, taken


def _sample_places(batch: ScheduleBatch, counts: np.ndarray) -> np.ndarray:
    """int [sum(counts)]: the numbers of the samples that ``counts``, int32 [bs], takes of each row: all or none."""
    own = np.flatnonzero(counts)
    return last_of_each(np.cumsum(batch.sampled_counts)[own], counts[own])


def _first_of_each(sampled: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """int64 [bs]: the first of the ``counts`` tokens that were sampled for each row of the batch; 0 for none. No step
    needs the tokens after guesses before the guesses are verified."""
    rows = np.flatnonzero(counts)
    index, first = upload([rows, (np.cumsum(counts) - counts)[rows]], sampled.device)
    return sampled.new_zeros(len(counts)).index_copy_(0, index, sampled.index_select(0, first))


def _take_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """These rows (int64 [n], ascending, at least one) of the logits; a view where they lie side by side."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1:
        return logits[first : first + count]
    (index,) = upload([rows], logits.device)
    return logits.index_select(0, index)
