"""Reads ``stream_options``, which OpenAI's clients send, and SGLang's to /generate too."""

from __future__ import annotations

from typing import Any

from ...scheduler.outcome import RequestRefused
from .reading import refuse_unserved, shown, typed


def include_usage(options: Any, stream: bool) -> bool:
    """Does the last event of the stream say how many tokens there were? options: ``stream_options``. Raises
    RequestRefused."""
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    if not stream:
        raise RequestRefused("stream_options is set without stream; add stream: true", param="stream_options")
    refuse_unserved(options, ("include_usage",), {}, (), where="stream_options.")
    include = options.get("include_usage")
    return typed(False if include is None else include, bool, "stream_options.include_usage")
