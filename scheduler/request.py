"""The life of one sequence as the scheduler sees it. No text, no tensors, no clock.

    parked ──parent ends──▶ waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
                               ▲                                             │
                               └────────────────── retract ──────────────────┘

Only a continuation whose parent still runs is ever parked.

Lengths of a sequence, always committed_len <= scheduled_len <= len(token_ids) + num_output_placeholders:

    token_ids      |----- prompt -----|--- outputs already known ---|
    committed_len  |---------------------------------------|          KV written and its result processed
    scheduled_len  |---------------------------------------------|    KV written, or being written by a step in flight

Only committed tokens may enter the tree, a lease, the host or the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from ..radix.cache import KVSequence
from ..radix.lease import Lease
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .beam.memory import BeamKV
    from .beam.search import BeamGroup
    from .constraints.item_trie import ItemTrie


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended. ``matched`` is the stop token id or stop string, ``message`` explains an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class RequestStatus(Enum):
    PARKED = "parked"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class TokenBuffer:
    """Token ids that only grow: amortised O(1) append, zero-copy int32 view.

    Buffers may share memory, like slices in Go: the one that ends where the memory's used part ends appends in place,
    any other copies first. So a child goes on in its parent's memory, at no cost that grows with the prompt. The ids
    that a buffer begins with are the caller's, who must not change them; the first append copies them.
    """

    __slots__ = ("_length", "_memory")

    def __init__(self, ids: np.ndarray) -> None:
        self._length = len(ids)
        self._memory = _Memory(ids, self._length, writable=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        return int(self._memory.data[position])

    def append(self, token_id: int) -> None:
        self._make_room(1)
        self._memory.data[self._length] = token_id
        self._length += 1
        self._memory.used = self._length

    def extend(self, ids: np.ndarray) -> None:
        """Append int32 [n]."""
        if not len(ids):
            return
        self._make_room(len(ids))
        self._memory.data[self._length : self._length + len(ids)] = ids
        self._length += len(ids)
        self._memory.used = self._length

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """int32 view of ids[start:stop]; valid until the next append."""
        return self._memory.data[start : self._length if stop is None else min(stop, self._length)]

    def share(self) -> TokenBuffer:
        """Another buffer of the same ids in the same memory."""
        other = TokenBuffer.__new__(TokenBuffer)
        other._length, other._memory = self._length, self._memory
        return other

    def cut(self, length: int) -> TokenBuffer:
        """A buffer of the first ``length`` ids. If this one ends the used memory, the ids behind are given up with it
        and must not be read again."""
        if self._memory.used == self._length:
            self._memory.used = length
        other = self.share()
        other._length = length
        return other

    def _make_room(self, count: int) -> None:
        memory = self._memory
        if memory.used == self._length and self._length + count <= memory.writable:
            return
        capacity = self._length + self._length // 4 + 64 + count
        data = np.empty(capacity, dtype=np.int32)
        data[: self._length] = self.view()
        self._memory = _Memory(data, self._length, writable=capacity)


class _Memory:
    """What token buffers share. data: int32, up to ``writable`` ids of it ours to write; those behind ``used`` belong
    to nobody."""

    __slots__ = ("data", "used", "writable")

    def __init__(self, data: np.ndarray, used: int, *, writable: int) -> None:
        self.data = data
        self.used = used
        self.writable = writable


@dataclass(slots=True, frozen=True)
class LogprobOptions:
    """Which logprobs a request wants: of every output token, of the prompt from position ``start_len`` on (-1: none),
    and with each of them those of the ``top_k`` most likely tokens."""

    start_len: int = -1
    top_k: int = 0


@dataclass(slots=True, frozen=True)
class ContinuationSpec:
    """Which request is continued. ``index``: which of its samples. ``at``: wait for its end, or fork what it has now.

    keep_parent: leave the parent's lease as it is, for more children. fallback_ids: int32 [n], the whole prompt, for
    the case that the parent has been forgotten.
    """

    parent_rid: str
    index: int = 0
    at: Literal["finish", "now"] = "finish"
    keep_parent: bool = False
    fallback_ids: np.ndarray | None = None


@dataclass(slots=True, frozen=True)
class RequestSpec:
    """What arrives: one prompt, ``sampling.num_requests`` sequences.

    prompt_ids: int32 [prompt_len]; for a continuation only what follows the parent's tokens, and may be empty.
    retain_ttl: seconds for which the finished sequences stay leased, for continuations; 0 for not at all.
    retain_n: how many of the n sequences, the first or best ones, that is for; None for all.
    item_trie: the items that outputs are limited to, what sampling.item_trie names.
    """

    rid: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    namespace: str = ""
    logprobs: LogprobOptions | None = None
    continuation: ContinuationSpec | None = None
    retain_ttl: float = 0.0
    retain_n: int | None = None
    item_trie: ItemTrie | None = None

    @property
    def num_retained(self) -> int:
        """How many sequences stay leased at their end."""
        if self.retain_ttl <= 0:
            return 0
        return self.sampling.n if self.retain_n is None else min(self.retain_n, self.sampling.n)


ContinuationPath = Literal["handoff", "fork", "match", "fallback"]


@dataclass(slots=True)
class Inheritance:
    """What a continuation got from its parent. ``path``: how (DESIGN: continuation); the counts are in tokens."""

    path: ContinuationPath
    inherited_tokens: int = 0
    """Of the prompt, how many are the parent's."""
    trimmed_tokens: int = 0
    """Tokens of the parent's matched stop that were left out."""
    recomputed_tokens: int = 0
    """Inherited tokens whose KV was not at hand; set at the first admission."""
    lease: Lease | None = None
    """The claimed lease until admission."""
    keep_parent: bool = False

    def lost_claim(self) -> None:
        """Called at admission: a claimed lease that has not been taken over had broken, or another child had it."""
        if self.lease is not None:
            self.lease = None
            if self.path == "handoff":
                self.path = "match"


@dataclass(slots=True, frozen=True)
class Retained:
    """What became of ``retain_ttl``: so many tokens until ``deadline`` (scheduler clock), or ``refused`` and why."""

    tokens: int = 0
    deadline: float = 0.0
    refused: str | None = None


class Request:
    """One sequence. ``index`` numbers the samples of a request with n > 1."""

    __slots__ = (
        "arrival",
        "beam_kv",
        "beams",
        "cached_tokens",
        "committed_len",
        "finish",
        "index",
        "inheritance",
        "item_trie",
        "kv",
        "logprob_next",
        "logprobs",
        "max_new_tokens",
        "namespace",
        "num_output_placeholders",
        "prompt_len",
        "queried",
        "retained",
        "retractions",
        "rid",
        "sampling",
        "scheduled_len",
        "seed",
        "sequence_number",
        "spec",
        "status",
        "token_ids",
        "trie_node",
    )

    def __init__(self, spec: RequestSpec, *, index: int, seed: int, arrival: float, sequence_number: int) -> None:
        self.spec = spec
        self.rid = spec.rid
        self.index = index
        self.namespace = spec.namespace
        self.sampling = spec.sampling
        self.seed = seed
        self.arrival = arrival
        self.sequence_number = sequence_number
        """Order of arrival among all requests; breaks ties of ``arrival``."""
        self.logprobs = spec.logprobs
        self.token_ids = TokenBuffer(spec.prompt_ids)
        self.prompt_len = len(spec.prompt_ids)
        self.max_new_tokens = 0
        """sampling.max_new_tokens, or what the context leaves when that is None."""
        self.logprob_next = 0
        """Next prompt position whose logprob is still owed; prompt_len when none is. Position 0 never has one."""
        self.status = RequestStatus.PARKED
        self.inheritance: Inheritance | None = None
        """Set for a continuation once its parent's tokens are known."""
        self.retained: Retained | None = None
        """Set at the end if the spec asked for it."""
        self.kv: KVSequence | None = None
        self.committed_len = 0
        self.scheduled_len = 0
        self.num_output_placeholders = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache at the first admission."""
        self.queried = False
        """True once cached_tokens is set and counted; a retracted request is not counted again."""
        self.beams: BeamGroup | None = None
        """Set for a beam search once its prompt is known; the generated tokens are in there, not in token_ids."""
        self.beam_kv: BeamKV | None = None
        """What the beams hold, once the prompt is computed; ``kv`` then is the prompt's whole pages."""
        self.item_trie = spec.item_trie
        self.trie_node = 0
        """Where in the item trie the generated tokens are; a beam search keeps one for each beam instead."""
        self.retractions = 0
        self.finish: FinishReason | None = None

    def begin(self, prompt: TokenBuffer, max_new_tokens: int) -> None:
        """The prompt is known, so the request can wait for admission."""
        self.token_ids = prompt
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        start_len = self.logprobs.start_len if self.logprobs is not None else -1
        self.logprob_next = max(1, start_len) if start_len >= 0 else self.prompt_len
        self.status = RequestStatus.WAITING

    @property
    def has_claim(self) -> bool:
        """True while a lease waits for this request's admission."""
        return self.inheritance is not None and self.inheritance.lease is not None and self.inheritance.lease.is_live

    @property
    def held_kv(self) -> KVSequence:
        """``kv`` of a request that is known to hold KV: prefilling or running."""
        assert self.kv is not None, f"{self} holds no KV"
        return self.kv

    @property
    def held_beams(self) -> BeamKV:
        """``beam_kv`` of a search whose prompt is computed."""
        assert self.beam_kv is not None, f"{self} has no beams yet"
        return self.beam_kv

    @property
    def num_computed_beam_tokens(self) -> int:
        """Generated tokens of each beam whose KV is computed, or being computed."""
        return self.beam_kv.length - self.prompt_len if self.beam_kv is not None else 0

    @property
    def key(self) -> tuple[str, int]:
        return self.rid, self.index

    @property
    def prefix_limit(self) -> int:
        """Known tokens that may come from the cache: at least one is computed, and so is all that owes a logprob."""
        limit = len(self.token_ids) - 1
        return min(limit, self.logprob_next - 1) if self.logprob_next < self.prompt_len else limit

    @property
    def is_search(self) -> bool:
        """A beam search: one sequence here, up to n results."""
        return self.sampling.beam_width is not None

    @property
    def ends_at_eos(self) -> bool:
        """An eos token ends it. Not where an item trie says what an output is: there the end of an item does."""
        return not self.sampling.ignore_eos and self.item_trie is None

    @property
    def num_rows(self) -> int:
        """Rows of a decode step it may take: a search one for each beam."""
        return self.sampling.num_rows

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
