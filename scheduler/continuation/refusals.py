"""Why a request cannot continue another one, in words for its client."""

from __future__ import annotations

from ..outcome import FinishReason, RequestRefused
from ..request_spec import ContinuationSpec


def unknown_parent(rid: str) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {rid!r}: no such request, or it belongs to another cache_salt; check both",
        code="parent_not_found",
        param="continuation_of",
    )


def parent_of_other_adapter(rid: str) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {rid!r}: that request was computed with another adapter, or with none, so its KV cannot be "
        "continued; name the same lora_path, or send the full prompt as text or input_ids too",
        code="adapter_mismatch",
        param="continuation_of",
    )


def failed_parent(rid: str, reason: FinishReason | str | None) -> RequestRefused:
    """``reason``: how the parent ended. If its own parent had failed, that message is not repeated."""
    if not isinstance(reason, str):
        text = reason.message if reason is not None else None
        reason = "its own parent failed" if text is None or text.startswith("continuation_of") else text
    return RequestRefused(
        f"continuation_of {rid!r}: that request did not finish ({reason}); run it again first",
        code="parent_failed",
        param="continuation_of",
    )


def parked_parent(rid: str) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {rid!r}: that request waits for its own parent and has no tokens yet; "
        "use continuation_at: finish",
        code="parent_not_started",
        param="continuation_at",
    )


def undecided_search(spec: ContinuationSpec) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {spec.parent_rid!r}: that beam search has not decided on its sequences; use continuation_at: "
        "finish",
        code="parent_undecided",
        param="continuation_at",
    )


def search_with_stop_strings(spec: ContinuationSpec) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {spec.parent_rid!r}: what follows a beam search with stop strings is known at its end only; "
        "send this request after it",
        code="parent_undecided",
        param="continuation_of",
    )


def fewer_results(spec: ContinuationSpec, found: int) -> RequestRefused:
    return RequestRefused(
        f"continuation_index is {spec.index}, but the beam search {spec.parent_rid!r} found {found} sequences only",
        code="parent_failed",
        param="continuation_index",
    )


def unknown_index(spec: ContinuationSpec) -> RequestRefused:
    return RequestRefused(
        f"continuation_index is {spec.index}, but request {spec.parent_rid!r} has no such sample; use 0 to n - 1",
        code="invalid_request",
        param="continuation_index",
    )


def forgotten_parent(rid: str) -> RequestRefused:
    return RequestRefused(
        f"continuation_of {rid!r}: that request is no longer on record; send its full prompt as text or "
        "input_ids too, or raise --max-finished-requests and --max-finished-tokens",
        code="parent_forgotten",
        param="continuation_of",
    )
