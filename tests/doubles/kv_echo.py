"""A fake model that proves where KV went.

Its "KV" of a token is a hash of the token and of the KV *read back* at the position before, through the device mirror
of req_to_token; its next token is a hash over the KV of the whole sequence, read back the same way. One wrong slot, one
page freed too early, one bad split, and the output differs from `expected_output`, which needs no KV at all. An adapter
computes other KV of the same tokens. A model with recurrent states (`tests.doubles.state_echo`) mixes the state of the
whole sequence into the next token too: one update lost, made twice or made to another state, and the output differs.
One with windows (`tests.doubles.window_echo`) mixes in the last tokens, read back from a pool of their own.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import numpy as np

from baton.radix.tiers.host_tier import TierCopy
from baton.scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch, SequenceInfo, StepResult
from baton.scheduler.beam.search import BeamGroup, Hypothesis
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles import state_echo
from tests.doubles.state_echo import EchoStates, mix_state
from tests.doubles.window_echo import EchoWindows, digest_window, windowed

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


class Memory(NamedTuple):
    """All that the model has of a sequence before it says the next token."""

    kv: np.ndarray
    """uint64 [n]"""
    state: int | None = None
    """None for a model without states."""
    window: np.ndarray | None = None
    """uint64 [window at most]: what it has of the last tokens; None for a model without windows."""
    reach: int = 0
    """The window's length."""

    def digest(self) -> np.uint64:
        """A hash of all of it."""
        with np.errstate(over="ignore"):
            summed = (self.kv * np.arange(1, 2 * len(self.kv), 2, dtype=np.uint64)).sum()
        if self.window is not None:
            summed ^= digest_window(self.window)
        return summed if self.state is None else summed ^ np.uint64(self.state)

    def add(self, token: int, shift: int) -> Memory:
        """What it has after one more token."""
        kv = np.append(self.kv, np.uint64(_mix(int(self.kv[-1]) if len(self.kv) else _START, token + shift)))
        state = None if self.state is None else mix_state(self.state, token + shift)
        window = None if self.window is None else np.append(self.window, windowed(kv[-1:]))[-self.reach :]
        return Memory(kv, state, window, self.reach)


class Snapshot(NamedTuple):
    """A state, and the KV of the tokens behind the last whole block."""

    kv: tuple[int, ...]
    state: int
    length: int


def _next_token(memory: Memory) -> int:
    return int(memory.digest() >> np.uint64(33)) % VOCAB


def _token_logprobs(memory: Memory) -> np.ndarray:
    """float32 [VOCAB]: what follows a sequence, as log-probabilities of a kind: all different, none positive."""
    digest = memory.digest()
    with np.errstate(over="ignore"):
        mixed = (digest ^ np.arange(1, VOCAB + 1, dtype=np.uint64)) * np.uint64(_MULTIPLIER) + np.uint64(_INCREMENT)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MULTIPLIER)
    return -(mixed >> np.uint64(44)).astype(np.float32) / np.float32(2**17)


def _guessed(memory: Memory, token: int, count: int, shift: int) -> list[int]:
    """What the model says after a sequence and one more token."""
    tokens = [token]
    for _ in range(count):
        memory = memory.add(tokens[-1], shift)
        tokens.append(_next_token(memory))
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


def _echo(tokens: list[int], shift: int, stateful: bool, reach: int = 0) -> Memory:
    """What the model has of these tokens, computed from them alone."""
    kv, link, state = [], _START, state_echo.START
    for token in tokens:
        link, state = _mix(link, token + shift), mix_state(state, token + shift)
        kv.append(link)
    every = np.array(kv, dtype=np.uint64)
    return Memory(every, state if stateful else None, windowed(every[-reach:]) if reach else None, reach)


def _next_of(memory: Memory, allowed: list[int] | None) -> int:
    return _next_token(memory) if allowed is None else _next_allowed(memory, np.array(allowed))


def _next_allowed(memory: Memory, allowed: np.ndarray) -> int:
    return int(allowed[_token_logprobs(memory)[allowed].argmax()])


def expected_beams(
    prompt: list[int],
    sampling: SamplingParams,
    trie: ItemTrie | None = None,
    end_ids: frozenset[int] = frozenset(),
    constraint: Constraint | None = None,
    adapter: str = "",
    stateful: bool = False,
    reach: int = 0,
) -> list[Hypothesis]:
    """What a beam search finds after ``prompt``, with no KV at all: every beam is computed from its tokens alone."""
    assert sampling.max_new_tokens is not None
    eos = frozenset() if (sampling.ignore_eos and constraint is None) or trie is not None else end_ids
    ends = eos | set(sampling.stop_token_ids)
    limit = sampling.max_new_tokens if trie is None else min(sampling.max_new_tokens, trie.max_depth)
    group = BeamGroup(sampling, limit, ItemConstraint(trie, "items") if trie is not None else constraint, len(ends))
    while not group.done:
        sequences = group.sequences().tolist() if group.num_tokens else [[]]
        every = [_echo(prompt + ids, shift_of(adapter), stateful, reach) for ids in sequences]
        logprobs = np.stack([_token_logprobs(memory) for memory in every])
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


def _expected_item(prompt: list[int], trie: ItemTrie, shift: int, stateful: bool, reach: int) -> list[int]:
    output: list[int] = []
    node = np.zeros(1, dtype=np.int32)
    while not trie.is_leaf(node)[0]:
        output.append(_next_allowed(_echo(prompt + output, shift, stateful, reach), trie.children(node)[1]))
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


def _expected_under(
    prompt: list[int], num_tokens: int, constraint: ReadsOutput, shift: int, stateful: bool, reach: int
) -> list[int]:
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(_next_allowed(_echo(prompt + output, shift, stateful, reach), constraint.allowed()))
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
    stateful: bool = False,
    reach: int = 0,
) -> list[int]:
    """What the model says after ``prompt``: the oracle, computed from the tokens alone."""
    shift = shift_of(adapter)
    if trie is not None:
        return _expected_item(prompt, trie, shift, stateful, reach)
    if constraint is not None:
        return _expected_under(prompt, num_tokens, constraint, shift, stateful, reach)
    memory = _echo(prompt, shift, stateful, reach)
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(_next_token(memory))
        if output[-1] in end_ids:
            break
        memory = memory.add(output[-1], shift)
    return output


Stage = Literal["updates", "copies", "compute", "finish"]
"""Stages of a step, in order. A failure can be placed before any of them."""


class StepFailed(Exception):
    """The injected failure of a step."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(f"failed before {stage}")
        self.is_known_at_launch = stage != "finish"


class KVEchoModel:
    """Computes ScheduleBatches on ``num_slots`` slots (padding included). Reads rows only through its own mirror.
    num_states: of its recurrent states; 0 for a model without them. window: what its layers with a window see; 0 for
    none. num_window_slots: of the pool of these, padding included. page_size: of that pool."""

    def __init__(
        self,
        num_slots: int,
        num_rows: int,
        max_context: int,
        end_ids: frozenset[int] = frozenset(),
        num_states: int = 0,
        window: int = 0,
        num_window_slots: int = 0,
        page_size: int = 1,
    ) -> None:
        self._end_ids = end_ids
        self.windows = EchoWindows(num_window_slots, num_rows, max_context, window, page_size)
        self.states = EchoStates(num_states)
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self.host_kv = np.zeros(0, dtype=np.uint64)
        """What copies between the tiers put on the host; whoever has a host tier makes it as large as that."""
        self._mirror = np.zeros((num_rows, max_context), dtype=np.int32)
        self._last_next_ids = np.zeros(0, dtype=np.int32)
        self.open: dict[int, SequenceInfo] = {}
        """By serial, as the batches said."""
        self.computed_tokens = 0
        self.spoiling: set[int] = set()
        """Token ids whose KV, and the states behind them, are not finite."""
        self.shows_spoiled = True
        """False: it cannot tell where."""
        self.verified = [0, 0]
        """Drafts with a wrong guess, and without one."""
        self.guesses: Callable[[], int] = lambda: 0
        """How many more tokens a row brings than the one that it samples, as if guesses at them had been accepted."""

    def forward(self, batch: ScheduleBatch, fails_before: Stage | None = None) -> StepResult:
        """Compute a step. With ``fails_before`` it raises StepFailed there, all that comes before being done; before
        "finish", everything is, and only the result is lost. The states that it was to write are lost in any case."""
        try:
            return self._compute(batch, fails_before)
        except StepFailed as failure:
            self.states.lose_step(batch, failure.is_known_at_launch)
            raise

    def _compute(self, batch: ScheduleBatch, fails_before: Stage | None) -> StepResult:
        for serial in batch.closed:
            self.open.pop(serial, None)  # the step that opened it may have failed
        for info in batch.opened:
            assert info.serial not in self.open, "a sequence is opened twice"
            self.open[info.serial] = info
        assert set(batch.serials.tolist()) <= self.open.keys(), "a row's sequence was not opened"
        self.states.open_step(batch)
        if fails_before == "updates":
            raise StepFailed(fails_before)
        updates = batch.row_updates
        self._mirror.reshape(-1)[updates.flat_index(self._mirror.shape[1])] = updates.values
        copies = updates.copies
        before = self._mirror.copy() if len(copies) else self._mirror
        for source, target, length in zip(copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist()):
            self._mirror[target, :length] = before[source, :length]
        self.windows.update_rows(batch)
        if fails_before == "copies":
            raise StepFailed(fails_before)
        self._kv[batch.copies.target] = self._kv[batch.copies.source]
        self.windows.copy_slots(batch)
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
            link = int(self._kv[self._mirror[row, old - 1]]) if old else _START
            states = [self.states.read(i)]
            shift = shift_of(self.open[int(batch.serials[i])].adapter)
            for slot, token in zip(slots.tolist(), batch.input_ids[start : start + new].tolist()):
                if token < 0:
                    token = int(self._last_next_ids[-token - 1])
                    assert token >= 0, "a placeholder names a row that sampled nothing"
                is_spoiled = token in self.spoiling or link == SPOILED or states[-1] == state_echo.SPOILED
                link = SPOILED if is_spoiled else _mix(link, token + shift)
                states.append(state_echo.SPOILED if is_spoiled else mix_state(states[-1], token + shift))
                self._kv[slot] = link
            self.windows.write(batch, start, row, old, self._kv[slots])
            kv = self._kv[self._mirror[row, : old + new]]
            memory = self._memory(row, kv, states, new)
            if batch.samples[i] and (kv == SPOILED).any():
                is_sound = self.shows_spoiled and states[0] != state_echo.SPOILED
                failed[i] = int((kv == SPOILED).argmax()) if is_sound else 0
            self.states.write(i, states, old)
            if i in of_search:
                logprobs[i] = _token_logprobs(memory)
            elif batch.samples[i]:
                next_ids[i] = _next_of(memory, allowed.get(samples[i]))
                free = samples[i] not in allowed and i not in failed
                accepted[i] = _guessed(memory, int(next_ids[i]), self.guesses() if free else 0, shift)
            if batch.draft_lens is not None and batch.draft_lens[i]:
                drafted = int(batch.draft_lens[i])
                assert batch.samples[i] and i not in of_search and new > drafted
                says = [
                    _next_of(self._memory(row, kv, states, new - drafted + place), allowed.get(samples[i] + place))
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
        self.states.close_step()
        if fails_before == "finish":
            raise StepFailed(fails_before)
        beams = [self._answer(step, logprobs) for step in batch.beams]
        rows = [[token, *accepted[row]] if token >= 0 else [] for row, token in enumerate(next_ids.tolist())]
        return StepResult.of_rows(rows, beams, failed)

    def _memory(self, row: int, kv: np.ndarray, states: list[int], end: int) -> Memory:
        """What the model has of a row after ``end`` of its new tokens. kv: uint64 [n] of all its tokens."""
        length = len(kv) - len(states) + 1 + end
        window = self.windows.read(row, length) if self.windows.reach else None
        return Memory(kv[:length], states[end] if len(self.states) else None, window, self.windows.reach)

    def write_block(self, slots: np.ndarray) -> np.ndarray:
        """What the host holds in these slots."""
        return self.host_kv[slots].copy()

    def read_block(self, slots: np.ndarray, block: np.ndarray | None) -> None:
        """Put a block there; None leaves rubbish."""
        self.host_kv[slots] = np.arange(len(slots), dtype=np.uint64) if block is None else block

    def write_snapshot(self, slots: np.ndarray, state: int) -> Snapshot:
        """What the host holds in these slots, and in that of a state."""
        length = int(self.states.host_lengths[state])
        assert length != state_echo.UNKNOWN, "a snapshot of a state that nothing has written"
        return Snapshot(tuple(self.host_kv[slots].tolist()), int(self.states.host_hashes[state]), length)

    def read_snapshot(self, slots: np.ndarray, state: int, snapshot: Snapshot | None) -> None:
        """Put a snapshot there; None leaves rubbish."""
        if snapshot is None:
            snapshot = Snapshot(tuple(range(len(slots))), 0xBAD, state_echo.UNKNOWN)
        self.host_kv[slots] = np.array(snapshot.kv, dtype=np.uint64)
        self.states.host_hashes[state], self.states.host_lengths[state] = snapshot.state, snapshot.length

    def copy(self, copy: TierCopy, ok: bool = True) -> None:
        """Make a copy between device and host; one that fails leaves rubbish behind."""
        source, target, froms, tos = self._kv, self.host_kv, copy.device_slots, copy.host_slots
        if not copy.to_host:
            source, target, froms, tos = target, source, tos, froms
        target[tos] = source[froms] if ok else np.arange(len(tos), dtype=np.uint64)
        self.states.copy(copy, ok)

    def _answer(self, step: BeamStep, logprobs: dict[int, np.ndarray]) -> BeamCandidates | None:
        if step.num_candidates == 0:
            return None
        sampling = self.open[step.serial].sampling
        has_eos = not sampling.ignore_eos or sampling.grammar is not None
        ends = (self._end_ids if has_eos else frozenset()) | set(sampling.stop_token_ids)
        return _candidates(step, np.stack([logprobs[row] for row in range(step.start, step.stop)]), ends)
