"""Details of a finished output that only Baton reports; the same objects in every API."""

from __future__ import annotations

from typing import Any

import msgspec

from ...runtime.answer import Output
from ...scheduler.outcome import MISS_REASONS, FoundTokens
from ..description.json_schema import (
    COUNT,
    Properties,
    answered,
    enum,
    list_of,
    number,
    open_object,
    string,
    whole,
)


def cached_tokens(found: FoundTokens) -> dict[str, Any]:
    """``cached_tokens`` and, as in SGLang, ``cached_tokens_details``: in which tier they were."""
    return {"cached_tokens": found.total, "cached_tokens_details": msgspec.structs.asdict(found)}


def cache_report(output: Output, *, default: bool = False) -> dict[str, Any]:
    """``cache_report``: where the prompt was found, and why the rest of it was not. Empty for an output that has not
    ended, or whose request does not want it. default: it is wanted where the request does not say."""
    report, wanted = output.cache_report, output.prompt.return_cache_report
    if report is None or not (default if wanted is None else wanted):
        return {}
    told: dict[str, Any] = {"found": msgspec.structs.asdict(output.found)}
    told["missed"] = [msgspec.to_builtins(span) for span in report.missed]
    if report.diverged_at is not None:
        told["diverged_at"] = report.diverged_at
    if output.prompt.divergence is not None:
        told["divergence"] = dict(output.prompt.divergence)
    return {"cache_report": told}


def beam_scores(output: Output) -> dict[str, Any]:
    """``cumulative_logprob`` and ``sequence_score`` of a beam search's result; also ``beam_search`` if the search found
    fewer results than it was asked for. Empty for a sample."""
    beam = output.beam
    if beam is None:
        return {}
    scores: dict[str, Any] = {"cumulative_logprob": beam.cumulative_logprob, "sequence_score": beam.sequence_score}
    if beam.shortfall is not None:
        scores["beam_search"] = {"results": beam.num_results, "reason": beam.shortfall}
    return scores


def draft_counts(output: Output) -> dict[str, Any]:
    """Counts of speculative decoding for an output, with SGLang's names; empty if it did nothing."""
    drafts = output.drafts
    if not drafts.verified:
        return {}
    return {
        "spec_verify_ct": drafts.verified,
        "spec_draft_token_num": drafts.drafted,
        "spec_accept_token_num": drafts.accepted,
        "spec_accept_rate": drafts.accepted / drafts.drafted,
    }


def stage_details(output: Output) -> dict[str, Any]:
    """``continuation``: what the request inherited from its parent. ``retained``: what is kept for the next stage, or
    why nothing is. Each appears only if it was asked for. ``prepared_tokens``: how many of the cached tokens were
    computed in idle time; only if there are some. Also the details of the prompt (`Prompt.details`)."""
    details = dict(output.prompt.details)
    if output.prepared_tokens:
        details["prepared_tokens"] = output.prepared_tokens
    if output.continuation is not None:
        details["continuation"] = msgspec.structs.asdict(output.continuation)
    if (retained := output.retained) is not None:
        kept: dict[str, Any] = {"tokens": retained.tokens, "ttl": retained.ttl}
        if retained.refused is not None:
            kept = {"refused": retained.refused}
            if retained.tier is not None:
                kept |= {"tokens": retained.tokens, "tier": retained.tier}
        details["retained"] = kept
    return details


_TIERS = answered(dict.fromkeys(("device", "host", "disk", "remote"), COUNT), title="CachedTokensDetails")

CACHED_TOKENS: Properties = {"cached_tokens": COUNT, "cached_tokens_details": _TIERS}

_MISSED = answered(
    {
        "reason": enum(*MISS_REASONS),
        "start": whole("Position of the first token in the prompt.", 0),
        "tokens": COUNT,
    },
    "Consecutive prompt tokens that were computed for one reason.",
    title="MissedSpan",
    optional={
        "seconds_ago": number("How long ago the last of them left the cache.", 0),
        "by": string("The request that needed their memory: its rid, 'another client', or 'running requests'."),
    },
)

CACHE_REPORT: Properties = {
    "cache_report": answered(
        {"found": _TIERS, "missed": list_of(_MISSED)},
        "Where the prompt's tokens were found in the cache, and why the others were not.",
        title="CacheReport",
        optional={
            "diverged_at": whole("Where the prompt leaves the step that it should continue.", 0),
            "divergence": open_object("Of a chat: the message, and both texts, where it parts from its last turn."),
        },
    )
}

BEAM_SCORES: Properties = {
    "cumulative_logprob": number(),
    "sequence_score": number(),
    "beam_search": answered({"results": COUNT, "reason": string()}, "The search found fewer than it was asked for."),
}

DRAFT_COUNTS: Properties = {
    "spec_verify_ct": COUNT,
    "spec_draft_token_num": COUNT,
    "spec_accept_token_num": COUNT,
    "spec_accept_rate": number("Share of the guessed tokens that were accepted.", 0, 1),
}

STAGE_DETAILS: Properties = {
    "continuation": answered(
        {
            "path": string("handoff, tier or fallback."),
            "inherited_tokens": COUNT,
            "recomputed_tokens": COUNT,
            "trimmed_tokens": COUNT,
        },
        "What was inherited from the parent.",
        title="Continuation",
        optional={"parent": string()},
    ),
    "retained": answered(
        {},
        "What is kept for the next stage, or why nothing is.",
        title="Retained",
        optional={"tokens": COUNT, "ttl": number("Seconds.", 0), "refused": string(), "tier": string()},
    ),
    "prepared_tokens": whole("Cached tokens that were computed in idle time, after the turn before.", 1),
    "normalized_prefix": open_object("Rule of --normalize-prefix -> tokens that it dropped, moved or replaced."),
}

RID_AND_INDEX: Properties = {"rid": string(), "index": whole("Which of the n samples.", 0)}
