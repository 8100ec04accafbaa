"""OpenAI's count of a call's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...runtime.answer import Output
from ...scheduler.outcome import FoundTokens
from ..fields.output_details import cached_tokens


def usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """outputs: the latest update of each. A prompt counts once, however many outputs it has."""
    outputs = list(outputs)
    firsts = [output for output in outputs if output.sample == 0]
    prompt = sum(output.prompt_tokens for output in firsts)
    completion = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cached_tokens(sum((output.found for output in firsts), FoundTokens())),
    }
