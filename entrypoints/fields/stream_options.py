"""Reads ``stream_options``, which OpenAI's clients send, and SGLang's to /generate too."""

from __future__ import annotations

from typing import Any

from ...scheduler.outcome import RequestRefused
from .ignored import Ignored
from .reading import refuse_unserved, shown, typed

_OFF: dict[str, tuple] = {"include_obfuscation": (False,)}


def include_usage(options: Any, stream: bool, ignored: Ignored | None = None) -> bool:
    """Does the last event of the stream say how many tokens there were? options: ``stream_options``, which ask for
    nothing without a stream: a whole answer has the counts. Raises RequestRefused."""
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    refuse_unserved(
        options, ("include_usage",), _OFF, ("continuous_usage_stats",), where="stream_options.", ignored=ignored
    )
    if options.get("continuous_usage_stats") and ignored is not None:
        ignored.add_field("stream_options.continuous_usage_stats", "the last event has the counts")
    include = options.get("include_usage")
    return typed(False if include is None else include, bool, "stream_options.include_usage") and stream
