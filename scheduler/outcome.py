"""A request's outcome for its client: cached tokens found, finish reason, KV retained after the end. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sequence ended. ``matched``: the stop token id, stop string or regex; ``message`` explains an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class FoundTokens(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where the KV of a prompt's first tokens was found, in tokens."""

    device: int = 0
    host: int = 0
    disk: int = 0
    """Read from disk to the host for this request, then loaded to the device."""
    remote: int = 0
    """As ``disk``, from a remote store."""

    @property
    def below_device(self) -> int:
        """Tokens that had left the device."""
        return self.host + self.disk + self.remote

    @property
    def total(self) -> int:
        return self.device + self.below_device

    def __add__(self, other: FoundTokens) -> FoundTokens:
        return FoundTokens(
            self.device + other.device, self.host + other.host, self.disk + other.disk, self.remote + other.remote
        )


MissReason = Literal[
    "unseen",
    "diverged",
    "evicted",
    "expired",
    "released",
    "dropped",
    "cleared",
    "namespace",
    "page",
    "required",
    "not_loaded",
    "not_looked_up",
    "no_state",
    "no_window",
    "disabled",
]
"""Why prompt tokens were computed.

unseen: this namespace never had them, or so long ago that it is forgotten; or they were another client's.
diverged: never had either, and the prompt is no longer that of the step of its job, or of the turn, with which it has
  most in common: it has left that before here.
evicted: other requests needed the memory.
expired: evicted likewise, but what had kept them was a lease that ran out, and no request has used them since.
released: evicted likewise, but they had been given up: their job was over, their lease was released, or a request said
  that they would not be used again.
dropped: they had left the device, and the tier that kept them gave them up.
cleared: the cache was flushed, or a failure left it untrusted.
namespace: the same client has computed them in another namespace, which shares nothing with this one.
page: they are in the cache or were computed, but do not fill a page that the prompt has too.
required: a request always computes its last token, and those whose logprobs it asks for.
not_loaded: a tier below the device has them, but to load them would have taken longer, or there was no room.
not_looked_up: the request took over its parent's KV, and the cache has them beyond it, but off the device or behind a
  cut or a page that had to be copied.
no_state: the cache has their K and V, but no recurrent state lies behind them, without which a model that keeps some
  cannot continue there.
no_window: the cache has the K and V of layers that see all tokens, but no longer those of the window before the place
  where the model would continue.
disabled: the server runs without a prefix cache.
"""

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

ANOTHER_CLIENT = "another client"
RUNNING_REQUESTS = "running requests"


class MissedSpan(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Consecutive prompt tokens that were computed for one reason."""

    reason: MissReason
    start: int
    """Position of the first token in the prompt."""
    tokens: int
    seconds_ago: float | None = None
    """How long ago the last of them left the cache, where they did."""
    by: str | None = None
    """The rid of the request that needed their memory; `RUNNING_REQUESTS` for several, for their next tokens;
    `ANOTHER_CLIENT` for a request of one; None if it is unknown."""


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the tokens of a prompt that were not found in the cache were not: spans without gaps from the first token
    that was not found to the end of the prompt."""

    missed: tuple[MissedSpan, ...] = ()
    diverged_at: int | None = None
    """Where the prompt leaves the step of its job, or the turn, with which it has most in common; None if it continues
    one, or none is known."""


def missed_by_reason(report: CacheReport | None) -> dict[str, int]:
    """Prompt tokens that were computed, by reason; {} without a report."""
    tokens: dict[str, int] = {}
    for span in report.missed if report is not None else ():
        tokens[span.reason] = tokens.get(span.reason, 0) + span.tokens
    return tokens


class DraftCounts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Speculation counts: of one sequence, or of all."""

    verified: int = 0
    """Steps that verified a draft."""
    drafted: int = 0
    """Tokens in these drafts."""
    accepted: int = 0
    """Drafted tokens that are in the output."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified + other.verified, self.drafted + other.drafted, self.accepted + other.accepted)


NO_DRAFTS = DraftCounts()


@dataclass(slots=True, frozen=True)
class Retained:
    """The outcome of ``retain_ttl``: ``tokens`` leased until ``deadline`` (scheduler clock), or why it was refused."""

    tokens: int = 0
    deadline: float = 0.0
    refused: str | None = None
    tier: str | None = None
    """Where no lease keeps them: the tier that has ``tokens``, in whole pages, or will before they leave the device. It
    gives up what was used least recently."""


class ContextOverflow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The excess length of a request, in tokens, for APIs with their own wording of this error.

    prompt: its length; with ``at_least``, a lower bound, because counting stopped there. output: the length that was
    asked for; 0 where the prompt alone is too long.
    """

    context: int
    prompt: int
    output: int = 0
    at_least: bool = False

    @property
    def prompt_words(self) -> str:
        return f"{'at least ' if self.at_least else ''}{self.prompt} tokens"


class RequestRefused(Exception):
    """A request that cannot be served as it stands, or that has failed. ``code`` names the kind of error, ``param`` the
    field to change; entrypoints/http_statuses.py has the HTTP status of each code. overflow: set if the request is
    longer than the context."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        overflow: ContextOverflow | None = None,
    ):
        super().__init__(message)
        self.message, self.code, self.param, self.overflow = message, code, param, overflow


def context_exceeded(overflow: ContextOverflow, param: str | None) -> RequestRefused:
    """The refusal of a request that is longer than the context, in SGLang's words, which its clients look for."""
    context, prompt, output = overflow.context, overflow.prompt, overflow.output
    if output:
        message = (
            f"Requested token count exceeds the model's maximum context length of {context} tokens: "
            f"{overflow.prompt_words} from the input and {output} tokens for the output. Use {param} <= "
            f"{context - prompt}, or shorten the input"
        )
    else:
        output_words = ", with at least one new one" if prompt <= context else ""
        message = (
            f"The input ({overflow.prompt_words}) is longer than the model's context length ({context} tokens"
            f"{output_words}). Shorten it"
        )
    return RequestRefused(message, code="context_length_exceeded", param=param, overflow=overflow)
