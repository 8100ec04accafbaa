"""Sequences as a sampler sees them, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.runtime.sampling.sequences import SequenceState
from baton.scheduler.batch import SequenceInfo
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams


def make_info(
    *,
    prompt: Sequence[int] | None = None,
    seed: int = 0,
    serial: int = 0,
    logprobs: LogprobOptions | None = None,
    eos_ends: bool = True,
    banned: Sequence[Sequence[int]] = (),
    **sampling,
) -> SequenceInfo:
    """What a scheduler says of a sequence. eos_ends: False where a constraint says so."""
    params = SamplingParams(**sampling)
    counted = (prompt or [1]) if params.repetition_penalty != 1.0 else []
    return SequenceInfo(
        serial=serial,
        sampling=params,
        seed=seed,
        logprobs=logprobs,
        eos_ends=eos_ends,
        prompt_ids=np.array(counted, dtype=np.int32),
        banned=tuple(tuple(ids) for ids in banned),
    )


def make_sequence(*, output: Sequence[int] = (), **options) -> SequenceState:
    """An open sequence that has generated ``output``. options: see `make_info`."""
    state = SequenceState(make_info(**options))
    state.append(output)
    return state


@dataclass(eq=False)
class KnownSequence:
    """A sequence beside all its tokens, for slow twins: the state keeps no more than it needs."""

    state: SequenceState
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> SamplingParams:
        return self.state.sampling

    def append(self, token_id: int) -> None:
        self.output.append(token_id)
        self.state.append([token_id])

    def copy(self) -> KnownSequence:
        """Another of the same tokens that grows by itself."""
        state = SequenceState(self.state.info)
        state.append(self.output)
        return KnownSequence(state, self.prompt, list(self.output))


def make_known(*, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **options) -> KnownSequence:
    return KnownSequence(make_sequence(prompt=prompt, output=output, **options), list(prompt), list(output))


def positions_of(sequences: Sequence[KnownSequence]) -> np.ndarray:
    """int32 [n]: output tokens of each, none being in flight."""
    return np.array([len(sequence.output) for sequence in sequences], dtype=np.int32)


def allow(tokens_of: Mapping[int, Sequence[int] | np.ndarray]) -> AllowedTokens:
    """Row -> the tokens that it may get."""
    pairs = [(row, token) for row in sorted(tokens_of) for token in sorted({int(i) for i in tokens_of[row]})]
    rows, tokens = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return AllowedTokens.pack(rows, tokens)
