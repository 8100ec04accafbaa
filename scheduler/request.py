"""The life of one sequence as the scheduler sees it. No text, no tensors, no clock.

    waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
       ▲                                             │
       └────────────────── retract ──────────────────┘

Lengths of a sequence, always committed_len <= scheduled_len <= len(token_ids) + num_output_placeholders:

    token_ids      |----- prompt -----|--- outputs already known ---|
    committed_len  |---------------------------------------|          KV written and its result processed
    scheduled_len  |---------------------------------------------|    KV written, or being written by a step in flight

Only committed tokens may enter the tree, a lease, the host or the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec
import numpy as np

from ..radix.cache import KVSequence
from .sampling_params import SamplingParams


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended. ``matched`` is the stop token id or stop string, ``message`` explains an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class RequestStatus(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class TokenBuffer:
    """Token ids that only grow: amortised O(1) append, zero-copy int32 view, raw bytes for tree lookups."""

    __slots__ = ("_data", "_length")

    def __init__(self, ids: np.ndarray) -> None:
        self._length = len(ids)
        self._data = np.empty(self._length + 32, dtype=np.int32)
        self._data[: self._length] = ids

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        return int(self._data[position])

    def append(self, token_id: int) -> None:
        if self._length == len(self._data):
            grown = np.empty(2 * self._length, dtype=np.int32)
            grown[: self._length] = self._data
            self._data = grown
        self._data[self._length] = token_id
        self._length += 1

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """int32 view of ids[start:stop]; valid until the next append."""
        return self._data[start : self._length if stop is None else min(stop, self._length)]


@dataclass(slots=True, frozen=True)
class LogprobOptions:
    """Which logprobs a request wants: of every output token, of the prompt from position ``start_len`` on (-1: none),
    and with each of them those of the ``top_k`` most likely tokens."""

    start_len: int = -1
    top_k: int = 0


@dataclass(slots=True)
class RequestSpec:
    """What arrives: one prompt, ``sampling.n`` sequences. prompt_ids: int32 [prompt_len]."""

    rid: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    namespace: str = ""
    logprobs: LogprobOptions | None = None


class Request:
    """One sequence. ``index`` numbers the samples of a request with n > 1."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "committed_len",
        "finish",
        "index",
        "kv",
        "logprob_next",
        "logprobs",
        "max_new_tokens",
        "namespace",
        "num_output_placeholders",
        "prompt_len",
        "queried",
        "retractions",
        "rid",
        "sampling",
        "scheduled_len",
        "seed",
        "sequence_number",
        "status",
        "token_ids",
    )

    def __init__(
        self, spec: RequestSpec, *, index: int, seed: int, max_new_tokens: int, arrival: float, sequence_number: int
    ) -> None:
        self.rid = spec.rid
        self.index = index
        self.namespace = spec.namespace
        self.sampling = spec.sampling
        self.seed = seed
        self.arrival = arrival
        self.sequence_number = sequence_number
        """Order of arrival among all requests; breaks ties of ``arrival``."""
        self.prompt_len = len(spec.prompt_ids)
        self.token_ids = TokenBuffer(spec.prompt_ids)
        self.max_new_tokens = max_new_tokens
        """sampling.max_new_tokens, or what the context leaves when that is None."""
        self.logprobs = spec.logprobs
        start_len = spec.logprobs.start_len if spec.logprobs is not None else -1
        self.logprob_next = max(1, start_len) if start_len >= 0 else self.prompt_len
        """Next prompt position whose logprob is still owed; prompt_len when none is. Position 0 never has one."""
        self.status = RequestStatus.WAITING
        self.kv: KVSequence | None = None
        self.committed_len = 0
        self.scheduled_len = 0
        self.num_output_placeholders = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache at the first admission."""
        self.queried = False
        """True once cached_tokens is set and counted; a retracted request is not counted again."""
        self.retractions = 0
        self.finish: FinishReason | None = None

    @property
    def held_kv(self) -> KVSequence:
        """``kv`` of a request that is known to hold KV: prefilling or running."""
        assert self.kv is not None, f"{self} holds no KV"
        return self.kv

    @property
    def key(self) -> tuple[str, int]:
        return self.rid, self.index

    @property
    def prefix_limit(self) -> int:
        """Known tokens that may come from the cache: at least one is computed, and so is all that owes a logprob."""
        limit = len(self.token_ids) - 1
        return min(limit, self.logprob_next - 1) if self.logprob_next < self.prompt_len else limit

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> np.ndarray:
        """int32 view of the generated tokens."""
        return self.token_ids.view(self.prompt_len)

    def __repr__(self) -> str:
        return (
            f"Request({self.rid}#{self.index} {self.status.value} prompt={self.prompt_len} "
            f"out={self.num_output_tokens} committed={self.committed_len})"
        )
