"""The settings of the scheduler. CLI flags are generated from these fields (name, default, help)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from ..radix.eviction.registry import ORDERS
from .policies.policy import PinTime
from .policies.registry import POLICIES

MIN_VERIFIED = 64
"""Tokens that a step with speculation may sample at least, even if fewer requests may run."""


def flag(default: object, help: str, choices: Collection[str] = ()) -> Any:
    """A dataclass field that becomes the CLI flag ``--name-with-dashes``.

    help stands alone: what the setting is, its unit, its effect and the meaning of special values such as 0. --help
    adds the default. choices: the allowed values, if the field's type does not list them.
    """
    return field(default=default, metadata={"help": help, "choices": tuple(choices)})


DEFAULT_CHUNK = 2048
"""New prompt tokens per step, if neither the operator nor a trial on a CPU sets them."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Lengths are in tokens."""

    context_length: int = flag(0, "Maximum length of prompt and output together, in tokens; 0: the model's.")
    max_total_tokens: int = flag(0, "Size of the KV pool in tokens; 0: computed from --mem-fraction-static.")
    max_states: int = flag(
        0,
        "Recurrent states that a hybrid or recurrent model keeps at the same time, those of cached prefixes included; "
        "0: computed from --mem-fraction-static. No effect on models without them.",
    )
    swa_full_tokens_ratio: float = flag(
        0.0,
        "Tokens of the pool for layers with a sliding window, as a share of those of the KV pool, which then has the K "
        "and V of other layers alone; 0: as many as running and leased requests need, up to a fifth. With too few, "
        "requests wait or are computed again. No effect on models without such layers, or with a host tier.",
    )
    max_running_requests: int = flag(64, "Maximum number of requests that are computed at the same time.")
    max_beam_width: int = flag(128, "Maximum beam width of a search. Each beam counts as a running request.")
    chunked_prefill_size: int = flag(
        0,
        "Maximum number of new prompt tokens per step; longer prompts are computed in chunks. 0: 2048, or "
        "less on a CPU that is as fast with smaller steps.",
    )
    page_size: int = flag(1, "Tokens per KV page: 1, 16, 64 or another power of two.")
    schedule_policy: str = flag(
        "auto",
        "Order of admission, and choice of what stays cached. auto: by arrival, but agents' older work may overtake "
        "for a bounded time, and their KV is kept while their tools run. fcfs: by arrival. lpm: longest cached prefix "
        "first. dfs-weight: requests that share a cached prefix with most others first. random: random order. The "
        "others are for agents' jobs (docs/policies.md).",
        POLICIES,
    )
    radix_eviction_policy: str = flag(
        "lru",
        "Cached KV that is evicted first. lru: least recently used. lfu: least often used. slru: never used "
        "again. fifo: oldest. priority: left by requests of low priority. learned: least likely to be used "
        "soon, by a model that learns while serving.",
        ORDERS,
    )
    pin_time: PinTime = flag(
        "auto",
        "Method that sets how long a job's KV is pinned while its tool runs. auto: the policy's own. fixed: always "
        "--pin-seconds. cdf, posterior, thompson, gittins: from the tool's past times (docs/policies.md).",
    )
    pin_seconds: float = flag(
        2.0,
        "Seconds for which a job's KV is pinned if --pin-time is fixed, and while nothing is known about the times of "
        "its tool (cdf) or its user (cdf, gittins).",
    )
    learn_tools: bool = flag(
        False,
        "Learn from the words of agents' commands which tools are slow. Needs pip install 'baton-serve[learned]'.",
    )
    provisional_ttl: float = flag(
        1.0, "Seconds for which the KV of a job's step is pinned until its tool call has been read."
    )
    hit_rate_alert: float = flag(
        0.0,
        "Alert threshold, 0 to 1: if the prefix cache has less than this fraction of the prompt tokens over five"
        " minutes, the log and the metric baton:hit_rate_alert report it. 0: never.",
    )
    cache_history: float = flag(
        4.0,
        "Tokens that the server remembers after they have left the prefix cache, as a multiple of the KV pool, to "
        "report why a prompt was not found (cache_report). A token takes about 4 bytes. 0: it remembers none.",
    )
    disable_radix_cache: bool = flag(
        False,
        "Turn the prefix cache off: requests match and share nothing. Continuations still inherit their parent's KV.",
    )
    overlap_schedule: Literal["auto", "on", "off"] = flag(
        "auto",
        "Form and launch the next step before the result of the last one is processed. auto: on with a GPU, "
        "off with a CPU.",
    )
    enable_mixed_chunk: bool = flag(
        False,
        "Let steps that compute prompts also compute one token for each running request, beam searches "
        "excepted. Always on where --chunked-prefill-size 0 has chosen smaller steps on a CPU.",
    )
    speculative_algorithm: Literal["off", "NGRAM"] = flag(
        "off",
        "Speculative decoding. NGRAM: guess the next tokens from earlier text and verify them in one step, "
        "where that is faster.",
    )
    speculative_num_draft_tokens: int = flag(
        16, "Maximum number of tokens guessed at once for a request. Needs --speculative-algorithm."
    )
    disable_jump_forward: bool = flag(
        False,
        "Do not compute the tokens that a grammar forces in one step, but sample one after the other. The outputs are "
        "the same.",
    )
    decode_interval: int = flag(8, "Maximum number of prompt steps in a row while running requests wait for a token.")
    max_queued_requests: int = flag(
        16384, "Maximum number of requests that wait for admission; further ones get 429. 0: no limit."
    )
    request_timeout: float = flag(
        0.0, "Seconds after its arrival at which an unfinished request ends with 408; 0: no limit."
    )
    max_leased_ratio: float = flag(0.5, "Fraction of the KV pool that leases may hold between requests, 0 to 1.")
    max_leased_requests: int = flag(
        64, "Maximum number of leased sequences. Each occupies a row, like a running request."
    )
    max_leases_per_client: int = flag(
        0,
        "Share of --max-leased-requests that a client (user, salt or API key) keeps when others need leases, too; "
        "0: half.",
    )
    max_client_leased_ratio: float = flag(
        0.5,
        "Share of the tokens allowed by --max-leased-ratio that a client keeps when others need leases, too, 0 to 1.",
    )
    max_retain_ttl: float = flag(
        86400.0, "Maximum retain_ttl of a request, in seconds. Larger values are reduced to it."
    )
    lease_protection: float = flag(
        0.0,
        "Seconds for which new requests cannot break an idle lease; 0: the measured time to fill the KV pool.",
    )
    default_retain_ttl: float = flag(0.0, "Seconds for which a finished request stays leased if it sets no retain_ttl.")
    max_finished_requests: int = flag(
        1024, "Maximum number of finished requests whose token ids stay on record for continuations."
    )
    max_finished_tokens: int = flag(
        4_000_000,
        "Maximum number of token ids on record for continuations. Ids that a turn shares with its parent count once.",
    )
    max_jobs: int = flag(
        4096, "Maximum number of jobs (job_id) that are remembered between their steps. Idle jobs are forgotten first."
    )
    max_recognized_turns: int = flag(
        4096,
        "Maximum number of finished requests that a later one is recognized to extend, by a digest of their token ids, "
        "so that it continues their job without a job_id. 0: none is recognized.",
    )
    max_logprobs: int = flag(
        20, "Maximum number of likeliest tokens per position that a request may ask for (top_logprobs_num)."
    )
    random_seed: int | None = flag(None, "Seed from which requests without a seed get theirs. Unset: drawn at start.")

    @property
    def num_rows(self) -> int:
        """Rows of req_to_token: each running or leased sequence keeps one."""
        return self.max_running_requests + self.max_leased_requests

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum number of tokens sampled in one step: one for each row, and those that verify drafts."""
        drafts = self.speculative_algorithm != "off" or not self.disable_jump_forward
        at_least = MIN_VERIFIED if drafts else 0
        return max(self.max_running_requests, min(at_least, self.step_tokens))

    @property
    def step_tokens(self) -> int:
        """New prompt tokens of the largest step."""
        return self.chunked_prefill_size or DEFAULT_CHUNK
