"""A client's request as one plain struct: it crosses the wire, and the scheduler takes it as it is.

A new field touches three files: this one, its reader in entrypoints/, and the one that acts on it (CONTRIBUTING.md).
Names (of an item trie) and computed values (the suffix of a continuation after a parent that ended within a token)
are resolved into the live `Request`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from .sampling_params import SamplingParams
from .token_buffer import unpack_ids

PoolingKind = Literal["last", "mean", "cls"]


class LogprobOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The logprobs that a request asks for: those of every output token, those of the prompt from position
    ``start_len`` on (-1: none), and with each of them those of the ``top_k`` most likely tokens. prompt_top_k: as many
    for each token of the prompt instead, with the rank of the token itself; None for as many as of the output, and no
    ranks. token_ids: also the logprobs of these, at every position."""

    start_len: int = -1
    top_k: int = 0
    prompt_top_k: int | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def input_top_k(self) -> int:
        return self.top_k if self.prompt_top_k is None else self.prompt_top_k

    @property
    def ranks_prompt(self) -> bool:
        return self.prompt_top_k is not None


class PoolingSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt that is pooled, not continued: one vector is its whole output.

    output: hidden, the pooled final hidden state; labels, the logits of the model's classification head; tokens, the
    logprobs of ``token_ids`` as the next token. kind: what is pooled where output is hidden: the state of the last
    token, the mean over all tokens, or the state of the first one (cls). Labels and tokens always use the last.
    """

    kind: PoolingKind = "last"
    output: Literal["hidden", "labels", "tokens"] = "hidden"
    token_ids: tuple[int, ...] = ()

    @property
    def needs_first_tokens(self) -> bool:
        """True if states of tokens before the last are needed. The cache has K and V of a prefix, and no hidden states,
        so such a prompt is computed as a whole."""
        return self.output == "hidden" and self.kind != "last"


class ContinuationSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which request is continued. RequestSpec.input_ids then holds only the suffix.

    index: which of the parent's samples. at: wait for the parent's end, or fork what it has now. keep_parent: leave the
    parent's lease as it is, for more children. suffix_text: the text that the suffix was tokenised from, None if it
    came as ids. fallback_ids: packed int32, the whole prompt, for the case that the parent has been forgotten.
    """

    parent_rid: str
    index: int = 0
    at: Literal["finish", "now"] = "finish"
    keep_parent: bool = False
    suffix_text: str | None = None
    fallback_ids: bytes | None = None


class Predecessor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished request that may be the start of this one's prompt, such as a conversation's last turn. If the prompt
    does begin with its tokens, it is continued; otherwise, or if it is unknown, the prompt stands by itself. index:
    which sample."""

    rid: str
    index: int = 0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Generate"):
    """One prompt, continued by ``sampling.num_requests`` sequences.

    input_ids: packed int32, the prompt, empty until it is tokenised; of a continuation only what follows the parent's
    tokens.
    stream: send tokens as they come, not only at the end.
    namespace: requests of different namespaces share no cache.
    adapter: name of the adapter that computes it; empty for the model alone. Requests of different adapters share no
    cache either.
    logprobs: None for none.
    returns_prompt: its first output brings the ids of the whole prompt, the parent's included.
    predecessor: a request that may have computed the beginning of the prompt; not with a continuation.
    retain_ttl: seconds for which the finished sequences stay leased for continuations; None takes the
    server's default, and lets the policy keep those of a job; 0 keeps none.
    retain_n: how many of the n sequences (the first, or the best) stay leased; None for all.
    retain_states: how many turn ends of its conversation, the newest first, keep their recurrent state before others.
    state_points: numbers of prompt tokens, ascending, after which its recurrent state is left for later requests, as
    far as there is room: where a later prompt is likely to part from this one.
    banned: token sequences that no output may hold, from ``sampling.bad_words``; empty until they are tokenised.
    client: the client's name as far as it is known, for the budgets per client; "" if it is unknown.
    priority: a higher one is admitted earlier and retracted later; SGLang's name and meaning.
    job_id: the job that it is a step of: an agent's work, with tools that run between its steps; None for none.
    parent_job_id: the job that started this one and waits for it, such as a subagent's; None for none.
    is_last_step: nothing of the job follows; all that is kept for it is given up when this ends.
    unasked: its client asked for no lease and named no job; where it has them, they are the server's doing.
    default_lease: ``retain_ttl`` is the server's default, which its client did not ask for.
    no_reuse_from: once it has ended, no later request reuses more than this many of its tokens, prompt and output;
    None if that is not known.
    diverged_at: position at which the prompt is known to leave the last turn of its conversation; for reports only.
    clamps_output: ``sampling.max_new_tokens`` is a default, lowered where the context leaves less.
    pooling: the request asks for its prompt's vector instead of an output: ``sampling.max_new_tokens`` is 0 and n is 1.
    It is not recorded, so no other request can continue it; its KV goes to the tree like that of any prompt.
    prepares: set by the scheduler alone, on the chunks of a preparation (preparations.py): the finished request whose
    next turn it computes the beginning of. Such a request has the lowest class of all: it runs only when no other
    request is open, breaks no lease, retracts nothing, has no events and no job, and counts in no request's statistics.
    """

    rid: str
    sampling: SamplingParams
    input_ids: bytes = b""
    stream: bool = False
    namespace: str = ""
    adapter: str = ""
    logprobs: LogprobOptions | None = None
    returns_prompt: bool = False
    continuation: ContinuationSpec | None = None
    predecessor: Predecessor | None = None
    retain_ttl: float | None = None
    retain_n: int | None = None
    retain_states: int = 1
    state_points: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    client: str = ""
    priority: int = 0
    job_id: str | None = None
    parent_job_id: str | None = None
    is_last_step: bool = False
    unasked: bool = False
    default_lease: bool = False
    no_reuse_from: int | None = None
    clamps_output: bool = False
    diverged_at: int | None = None
    pooling: PoolingSpec | None = None
    prepares: Predecessor | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n], a read-only view of ``input_ids``."""
        return unpack_ids(self.input_ids)
