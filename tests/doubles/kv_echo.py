"""A fake model that proves where KV went.

Its "KV" of a token is a hash of the token and of the KV *read back* at the position before, through the device mirror
of req_to_token; its next token is a hash over the KV of the whole sequence, read back the same way. One wrong slot, one
page freed too early, one bad split, and the output differs from `expected_output`, which needs no KV at all. An adapter
computes other KV of the same tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from baton.radix.tiers.host_tier import TierCopy
from baton.scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch, SequenceInfo, StepResult
from baton.scheduler.beam.search import BeamGroup, Hypothesis
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.sampling_params import SamplingParams

VOCAB = 1000
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, 2**64 - 1
_START = 7
SPOILED = 3
"""The KV of a token that is not finite, and of every token behind it."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids drawn from the whole vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def shift_of(adapter: str) -> int:
    """What an adapter adds to each token, and to the beginning."""
    return zlib.crc32(adapter.encode()) << 10 if adapter else 0


def _mix(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * _MULTIPLIER + _INCREMENT) & _MASK


def _next_token(kv: np.ndarray) -> int:
    with np.errstate(over="ignore"):
        weights = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
        return int((kv * weights).sum() >> np.uint64(33)) % VOCAB


def _token_logprobs(kv: np.ndarray) -> np.ndarray:
    """float32 [VOCAB]: what follows a sequence, as log-probabilities of a kind: all different, none positive."""
    with np.errstate(over="ignore"):
        state = (kv * np.arange(1, 2 * len(kv), 2, dtype=np.uint64)).sum()
        mixed = (state ^ np.arange(1, VOCAB + 1, dtype=np.uint64)) * np.uint64(_MULTIPLIER) + np.uint64(_INCREMENT)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MULTIPLIER)
    return -(mixed >> np.uint64(44)).astype(np.float32) / np.float32(2**17)


def _guessed(kv: np.ndarray, token: int, count: int, shift: int) -> list[int]:
    """What the model says after the KV of a sequence and one more token."""
    tokens = [token]
    for _ in range(count):
        kv = np.append(kv, np.uint64(_mix(int(kv[-1]), tokens[-1] + shift)))
        tokens.append(_next_token(kv))
    return tokens[1:]


def _candidates(step: BeamStep, logprobs: np.ndarray, end_ids: frozenset[int]) -> BeamCandidates:
    """The best continuations, by sorting all of them. logprobs: float32 [rows, VOCAB]."""
    parents, tokens = (array.ravel() for array in np.indices(logprobs.shape, dtype=np.int32))
    if step.allowed is not None:
        parents, tokens = step.allowed.unpack()
    if step.bans_ends:
        free = ~np.isin(tokens, [*end_ids])
        parents, tokens = parents[free], tokens[free]
    each = logprobs[parents, tokens]
    scores = step.scores[parents] + each
    best = np.argsort(-scores, kind="stable")[: step.num_candidates]
    return BeamCandidates(parents[best], tokens[best], scores[best], each[best])


def _echo(tokens: list[int], shift: int) -> np.ndarray:
    kv, state = [], _START
    for token in tokens:
        state = _mix(state, token + shift)
        kv.append(state)
    return np.array(kv, dtype=np.uint64)


def _next_of(kv: np.ndarray, allowed: list[int] | None) -> int:
    return _next_token(kv) if allowed is None else _next_allowed(kv, np.array(allowed))


def _next_allowed(kv: np.ndarray, allowed: np.ndarray) -> int:
    return int(allowed[_token_logprobs(kv)[allowed].argmax()])


def expected_beams(
    prompt: list[int],
    sampling: SamplingParams,
    trie: ItemTrie | None = None,
    end_ids: frozenset[int] = frozenset(),
    constraint: Constraint | None = None,
    adapter: str = "",
) -> list[Hypothesis]:
    """What a beam search finds after ``prompt``, with no KV at all: every beam is computed from its tokens alone."""
    assert sampling.max_new_tokens is not None
    eos = frozenset() if (sampling.ignore_eos and constraint is None) or trie is not None else end_ids
    ends = eos | set(sampling.stop_token_ids)
    limit = sampling.max_new_tokens if trie is None else min(sampling.max_new_tokens, trie.max_depth)
    group = BeamGroup(sampling, limit, ItemConstraint(trie, "items") if trie is not None else constraint, len(ends))
    while not group.done:
        sequences = group.sequences().tolist() if group.num_tokens else [[]]
        logprobs = np.stack([_token_logprobs(_echo(prompt + ids, shift_of(adapter))) for ids in sequences])
        step = BeamStep(
            serial=0,
            start=0,
            stop=len(sequences),
            num_candidates=group.num_candidates,
            scores=group.scores,
            bans_ends=group.bans_ends,
            allowed=group.allowed(),
        )
        group.select(_candidates(step, logprobs, ends), ends)
    return group.results


def _expected_item(prompt: list[int], trie: ItemTrie, shift: int) -> list[int]:
    output: list[int] = []
    node = np.zeros(1, dtype=np.int32)
    while not trie.is_leaf(node)[0]:
        output.append(_next_allowed(_echo(prompt + output, shift), trie.children(node)[1]))
        node = trie.advance(node, np.array(output[-1:], dtype=np.int32))
    return output


class ReadsOutput(Protocol):
    """A constraint of one output, for the oracle."""

    def allowed(self) -> np.ndarray:
        """int [n]: the tokens that may follow."""
        ...

    def ends_with(self, token_id: int) -> bool:
        """Read a token; True if it ends the output."""
        ...


def _expected_under(prompt: list[int], num_tokens: int, constraint: ReadsOutput, shift: int) -> list[int]:
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(_next_allowed(_echo(prompt + output, shift), constraint.allowed()))
        if constraint.ends_with(output[-1]):
            break
    return output


def expected_output(
    prompt: list[int],
    num_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    trie: ItemTrie | None = None,
    constraint: ReadsOutput | None = None,
    adapter: str = "",
) -> list[int]:
    """What the model says after ``prompt``: the oracle, computed from the tokens alone."""
    shift = shift_of(adapter)
    if trie is not None:
        return _expected_item(prompt, trie, shift)
    if constraint is not None:
        return _expected_under(prompt, num_tokens, constraint, shift)
    state: int = _START
    kv: list[int] = []
    for token in prompt:
        state = _mix(state, token + shift)
        kv.append(state)
    output: list[int] = []
    while len(output) < num_tokens:
        token = _next_token(np.array(kv, dtype=np.uint64))
        output.append(token)
        if token in end_ids:
            break
        state = _mix(state, token + shift)
        kv.append(state)
    return output


Stage = Literal["updates", "copies", "compute", "finish"]
"""Stages of a step, in order. A failure can be placed before any of them."""


class StepFailed(Exception):
    """The injected failure of a step."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(f"failed before {stage}")
        self.is_known_at_launch = stage != "finish"


class KVEchoModel:
    """Computes ScheduleBatches on ``num_slots`` slots (padding included). Reads rows only through its own mirror."""

    def __init__(self, num_slots: int, num_rows: int, max_context: int, end_ids: frozenset[int] = frozenset()) -> None:
        self._end_ids = end_ids
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self.host_kv = np.zeros(0, dtype=np.uint64)
        """What copies between the tiers put on the host; whoever has a host tier makes it as large as that."""
        self._mirror = np.zeros((num_rows, max_context), dtype=np.int32)
        self._last_next_ids = np.zeros(0, dtype=np.int32)
        self.open: dict[int, SequenceInfo] = {}
        """By serial, as the batches said."""
        self.computed_tokens = 0
        self.spoiling: set[int] = set()
        """Token ids whose KV is not finite."""
        self.shows_spoiled = True
        """False: it cannot tell where."""
        self.verified = [0, 0]
        """Drafts with a wrong guess, and without one."""
        self.guesses: Callable[[], int] = lambda: 0
        """How many more tokens a row brings than the one that it samples, as if guesses at them had been accepted."""

    def forward(self, batch: ScheduleBatch, fails_before: Stage | None = None) -> StepResult:
        """Compute a step. With ``fails_before`` it raises StepFailed there, all that comes before being done; before
        "finish", everything is, and only the result is lost."""
        for serial in batch.closed:
            self.open.pop(serial, None)  # the step that opened it may have failed
        for info in batch.opened:
            assert info.serial not in self.open, "a sequence is opened twice"
            self.open[info.serial] = info
        assert set(batch.serials.tolist()) <= self.open.keys(), "a row's sequence was not opened"
        if fails_before == "updates":
            raise StepFailed(fails_before)
        updates = batch.row_updates
        self._mirror.reshape(-1)[updates.flat_index(self._mirror.shape[1])] = updates.values
        copies = updates.copies
        before = self._mirror.copy() if len(copies) else self._mirror
        for source, target, length in zip(copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist()):
            self._mirror[target, :length] = before[source, :length]
        if fails_before == "copies":
            raise StepFailed(fails_before)
        self._kv[batch.copies.target] = self._kv[batch.copies.source]
        if fails_before == "compute":
            raise StepFailed(fails_before)
        next_ids = np.full(len(batch), -1, dtype=np.int32)
        accepted: dict[int, list[int]] = {}
        logprobs = {}
        failed: dict[int, int] = {}
        allowed: dict[int, list[int]] = {}
        if batch.allowed is not None:
            dense = batch.allowed.dense
            assert (np.diff(batch.allowed.rows) >= 0).all() and (dense is None or (np.diff(dense.rows) > 0).all())
            for sample, token in zip(*(array.tolist() for array in batch.allowed.unpack())):
                allowed.setdefault(sample, []).append(token)
        samples = (np.cumsum(batch.sampled_counts) - batch.sampled_counts).tolist()
        of_search = {row for step in batch.beams for row in range(step.start, step.stop)}
        start = 0
        for i, (row, old, new) in enumerate(
            zip(batch.req_pool_indices.tolist(), batch.prefix_lens.tolist(), batch.extend_lens.tolist())
        ):
            slots = batch.out_cache_loc[start : start + new]
            assert (slots > 0).all(), "the padding slot was handed out"
            assert np.array_equal(slots, self._mirror[row, old : old + new]), "row and out_cache_loc disagree"
            state = int(self._kv[self._mirror[row, old - 1]]) if old else _START
            shift = shift_of(self.open[int(batch.serials[i])].adapter)
            for slot, token in zip(slots.tolist(), batch.input_ids[start : start + new].tolist()):
                if token < 0:
                    token = int(self._last_next_ids[-token - 1])
                    assert token >= 0, "a placeholder names a row that sampled nothing"
                state = SPOILED if token in self.spoiling or state == SPOILED else _mix(state, token + shift)
                self._kv[slot] = state
            kv = self._kv[self._mirror[row, : old + new]]
            if batch.samples[i] and (kv == SPOILED).any():
                failed[i] = int((kv == SPOILED).argmax()) if self.shows_spoiled else 0
            if i in of_search:
                logprobs[i] = _token_logprobs(kv)
            elif batch.samples[i]:
                next_ids[i] = _next_of(kv, allowed.get(samples[i]))
                free = samples[i] not in allowed and i not in failed
                accepted[i] = _guessed(kv, int(next_ids[i]), self.guesses() if free else 0, shift)
            if batch.draft_lens is not None and batch.draft_lens[i]:
                drafted = int(batch.draft_lens[i])
                assert batch.samples[i] and i not in of_search and new > drafted
                says = [
                    _next_of(kv[: old + new - drafted + place], allowed.get(samples[i] + place))
                    for place in range(drafted + 1)
                ]
                right = 0
                while right < drafted and says[right] == batch.input_ids[start + new - drafted + right]:
                    right += 1
                if i in failed and failed[i] >= old + new - drafted + right:
                    del failed[i]  # only a wrong guess is spoiled
                next_ids[i], accepted[i] = says[0], says[1 : right + 1]
                self.verified[right == drafted] += 1
            start += new
        self.computed_tokens += start
        self._last_next_ids = next_ids
        if fails_before == "finish":
            raise StepFailed(fails_before)
        beams = [self._answer(step, logprobs) for step in batch.beams]
        rows = [[token, *accepted[row]] if token >= 0 else [] for row, token in enumerate(next_ids.tolist())]
        return StepResult.of_rows(rows, beams, failed)

    def write_block(self, slots: np.ndarray) -> np.ndarray:
        """What the host holds in these slots."""
        return self.host_kv[slots].copy()

    def read_block(self, slots: np.ndarray, block: np.ndarray | None) -> None:
        """Put a block there; None leaves rubbish."""
        self.host_kv[slots] = np.arange(len(slots), dtype=np.uint64) if block is None else block

    def copy(self, copy: TierCopy, ok: bool = True) -> None:
        """Make a copy between device and host; one that fails leaves rubbish behind."""
        source, target, froms, tos = self._kv, self.host_kv, copy.device_slots, copy.host_slots
        if not copy.to_host:
            source, target, froms, tos = target, source, tos, froms
        target[tos] = source[froms] if ok else np.arange(len(tos), dtype=np.uint64)

    def _answer(self, step: BeamStep, logprobs: dict[int, np.ndarray]) -> BeamCandidates | None:
        if step.num_candidates == 0:
            return None
        sampling = self.open[step.serial].sampling
        has_eos = not sampling.ignore_eos or sampling.grammar is not None
        ends = (self._end_ids if has_eos else frozenset()) | set(sampling.stop_token_ids)
        return _candidates(step, np.stack([logprobs[row] for row in range(step.start, step.stop)]), ends)
