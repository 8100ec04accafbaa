"""What `output_details` reports in the answers of every API, as ``/openapi.json`` describes it."""

from __future__ import annotations

from ..description.json_schema import Properties, answered, number, string, whole
from ..description.operation import COUNT

_TIERS = answered(dict.fromkeys(("device", "host", "disk", "remote"), COUNT), title="CachedTokensDetails")

CACHED_TOKENS: Properties = {"cached_tokens": COUNT, "cached_tokens_details": _TIERS}

BEAM_SCORES: Properties = {
    "cumulative_logprob": number(),
    "sequence_score": number(),
    "beam_search": answered({"results": COUNT, "reason": string()}, "The search found fewer than it was asked for."),
}

DRAFT_COUNTS: Properties = {
    "spec_verify_ct": COUNT,
    "spec_draft_token_num": COUNT,
    "spec_accept_token_num": COUNT,
    "spec_accept_rate": number("Accepted by guessed tokens.", 0, 1),
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
}

RID_AND_INDEX: Properties = {"rid": string(), "index": whole("Which of the n samples.", 0)}
