"""The settings of the scheduler. CLI flags are generated from these fields (name, default, help)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from ..radix.eviction.orders import ORDERS
from .policies.registry import POLICIES
from .policies.tools import PinTime

MIN_VERIFIED = 64
"""With speculation a step samples up to so many tokens, even if fewer requests may run."""


def flag(default, help: str, choices: Collection[str] = ()):
    """A dataclass field that becomes the CLI flag ``--name-with-dashes``. choices: the only values it takes, where its
    type does not say them."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices)})


DEFAULT_CHUNK = 2048
"""New prompt tokens per step, unless said or found otherwise."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Lengths are in tokens."""

    context_length: int = flag(0, "longest prompt + output; 0 takes the model's")
    max_total_tokens: int = flag(0, "tokens in the KV pool; 0 sizes it from --mem-fraction-static")
    max_running_requests: int = flag(64, "requests that are computed at the same time")
    max_beam_width: int = flag(128, "widest beam search; each beam counts as a running request")
    chunked_prefill_size: int = flag(
        0,
        "new prompt tokens per step; longer prompts are computed in chunks; 0: 2048, on a CPU fewer if that is as fast",
    )
    page_size: int = flag(1, "tokens per KV page: 1, 16, 64 or any other power of two")
    schedule_policy: str = flag(
        "fcfs",
        "who goes first and what is kept: first come, longest cached prefix, those with most company below a cached "
        "prefix (dfs-weight), whoever is drawn (random), or one for the jobs of agents",
        POLICIES,
    )
    radix_eviction_policy: str = flag(
        "lru",
        "which cached KV goes first when room is needed: the least recently used (lru), the least often used (lfu), "
        "what was never used again (slru), the oldest (fifo), what requests of a low priority left (priority), or what "
        "by experience is asked for again least likely and latest (learned)",
        ORDERS,
    )
    pin_time: PinTime = flag(
        "auto",
        "how long a job's KV is pinned while its tool runs: for a fixed time, by past times, or as the policy does",
    )
    pin_seconds: float = flag(2.0, "that fixed time, and the time for tools of which nothing is known")
    learn_tools: bool = flag(
        False,
        "learn from the words of commands which tools are slow; needs pip install -e '.[learned]'",
    )
    provisional_ttl: float = flag(1.0, "seconds for which a step of a job is pinned until its tool is known")
    hit_rate_alert: float = flag(
        0.0,
        "share of prompt tokens, 0 to 1: where the prefix cache finds less, over five minutes, the log and "
        "baton:hit_rate_alert say so; 0: never",
    )
    disable_radix_cache: bool = flag(False, "no matching and no sharing between requests")
    overlap_schedule: Literal["auto", "on", "off"] = flag(
        "auto", "form and launch the next step before the last one's result is looked at; auto: on a GPU"
    )
    enable_mixed_chunk: bool = flag(
        False,
        "steps that compute prompts also compute a token for each running request; beam searches excepted; also on "
        "where a CPU has found --chunked-prefill-size by itself",
    )
    speculative_algorithm: Literal["off", "NGRAM"] = flag(
        "off",
        "NGRAM: guess the next tokens from what was said before and verify them together, where that is faster",
    )
    speculative_num_draft_tokens: int = flag(16, "tokens that are guessed at a time for one request, at most")
    decode_interval: int = flag(8, "extend steps in a row, at most, while running requests wait for a token")
    max_queued_requests: int = flag(
        16384, "requests that may wait for admission; more are refused with 429. 0: no limit"
    )
    request_timeout: float = flag(0.0, "seconds from a request's arrival until it ends with 408; 0: no limit")
    max_leased_ratio: float = flag(0.5, "share of the KV pool that leases may hold between requests")
    max_leased_requests: int = flag(64, "sequences that may be leased at the same time; each keeps its row")
    max_leases_per_client: int = flag(
        0, "sequences that one client (user, salt or API key) may keep leased; 0: half of --max-leased-requests"
    )
    max_client_leased_ratio: float = flag(0.5, "share of the leases' tokens that one client may hold")
    max_retain_ttl: float = flag(86400.0, "longest retain_ttl in seconds; longer ones are cut to it")
    lease_protection: float = flag(
        0.0, "seconds for which an idle lease is safe from newcomers; 0: as long as it takes to fill the pool, measured"
    )
    default_retain_ttl: float = flag(0.0, "seconds a finished request stays leased if it does not say retain_ttl")
    max_finished_requests: int = flag(1024, "finished requests whose tokens stay on record for continuations")
    max_finished_tokens: int = flag(
        4_000_000, "room for tokens on record for continuations; a turn shares its parent's, which counts once"
    )
    max_jobs: int = flag(4096, "jobs (job_id) that are remembered between their steps; the idle ones go first")
    max_logprobs: int = flag(20, "likeliest tokens that a request may ask for at each position (top_logprobs_num)")
    random_seed: int | None = flag(None, "seeds the seeds of requests that bring none; drawn at start if not given")

    @property
    def num_rows(self) -> int:
        """Rows of req_to_token: each running or leased sequence keeps one."""
        return self.max_running_requests + self.max_leased_requests

    @property
    def max_sampled_tokens(self) -> int:
        """Tokens that are sampled in one step, at most: one for each row, and those that verify a draft."""
        at_least = MIN_VERIFIED if self.speculative_algorithm != "off" else 0
        return max(self.max_running_requests, min(at_least, self.step_tokens))

    @property
    def step_tokens(self) -> int:
        """New prompt tokens of the largest step."""
        return self.chunked_prefill_size or DEFAULT_CHUNK
