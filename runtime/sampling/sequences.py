"""The step runner's record of each sequence: its parameters from when it opened, and its tokens since.

So a batch need not repeat this, and the runner needs none of the scheduler's live requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ...scheduler.batch import SequenceInfo
from ...scheduler.sampling_params import SamplingParams
from ...scheduler.token_buffer import TokenBuffer
from .banned_tokens import BannedTokens
from .penalties import SeenTokens


class SequenceState:
    """One open sequence."""

    __slots__ = ("_output", "banned", "has_stops", "info", "sampling", "seen")

    def __init__(self, info: SequenceInfo) -> None:
        self.info = info
        self.sampling: SamplingParams = info.sampling
        self.seen = SeenTokens(info.prompt_ids) if info.sampling.has_penalties else None
        """For penalties; None without."""
        self.banned = BannedTokens(info.banned) if info.banned else None
        """Banned token sequences; None without."""
        self.has_stops = bool(info.sampling.stop or info.sampling.stop_regex)
        """True if its text is searched for stop strings or regexes."""
        self._output = TokenBuffer(np.empty(0, dtype=np.int32)) if self.has_stops else None

    @property
    def is_plain(self) -> bool:
        """True if nothing but temperature and filters stands between the model's logits and the draw."""
        wants = self.sampling.min_new_tokens > 0 or bool(self.sampling.logit_bias)
        return not wants and self.seen is None and self.banned is None

    @property
    def records_tokens(self) -> bool:
        """False if `append` has nothing to do."""
        looks_back = self.banned is not None and self.banned.looks_back
        return self.seen is not None or self._output is not None or looks_back

    @property
    def output_ids(self) -> np.ndarray:
        """int32 view of its output tokens; kept only where its text is searched, else empty."""
        return self._output.view() if self._output is not None else np.empty(0, dtype=np.int32)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add the tokens that a step brought."""
        for token_id in token_ids:
            if self.seen is not None:
                self.seen.count(token_id)
            if self._output is not None:
                self._output.append(token_id)
            if self.banned is not None:
                self.banned.append(token_id)


class SequenceTable:
    """Owns the open sequences, by serial."""

    def __init__(self) -> None:
        self._open: dict[int, SequenceState] = {}
        self._recording: dict[int, SequenceState] = {}
        """The open sequences that record their tokens."""
        self._adapters: dict[int, str] = {}
        """Serial -> the key of its adapter, for open sequences that have one."""

    def __len__(self) -> int:
        return len(self._open)

    def update_sequences(self, opened: Iterable[SequenceInfo], closed: Iterable[int]) -> None:
        """Close and open sequences as a batch says. A closed one may never have been opened here (its step failed)."""
        for serial in closed:
            self._open.pop(serial, None)
            self._recording.pop(serial, None)
            self._adapters.pop(serial, None)
        for info in opened:
            sequence = self._open[info.serial] = SequenceState(info)
            if sequence.records_tokens:
                self._recording[info.serial] = sequence
            if info.adapter:
                self._adapters[info.serial] = info.adapter

    def __getitem__(self, serial: int) -> SequenceState:
        return self._open[serial]

    def adapters_of(self, serials: np.ndarray) -> list[str]:
        """The key of the adapter of each of these sequences, "" for none; empty if none has one. serials: int64 [n]."""
        if not self._adapters:
            return []
        keys = [self._adapters.get(serial, "") for serial in serials.tolist()]
        return keys if any(keys) else []

    @property
    def recording(self) -> Mapping[int, SequenceState]:
        """The open sequences that need to know their tokens, by serial; often none."""
        return self._recording
