"""Prompts from flat keywords."""

from __future__ import annotations

from typing import Any

from baton.runtime.prompt import Prompt
from baton.scheduler.request_spec import LogprobOptions, RequestSpec
from baton.scheduler.sampling_params import SamplingParams

_OF_THE_PROMPT = ("group", "text", "input_ids", "suffix_ids", "return_text_in_logprobs", "truncate_to")


def make_prompt(rid: str, sampling: SamplingParams | None = None, **fields: Any) -> Prompt:
    """return_logprob, logprob_start_len, top_logprobs_num: as in the native API. All else: fields of Prompt or
    RequestSpec."""
    wanted = fields.pop("return_logprob", False)
    start, top = fields.pop("logprob_start_len", -1), fields.pop("top_logprobs_num", 0)
    own = {name: fields.pop(name) for name in _OF_THE_PROMPT if name in fields}
    logprobs = LogprobOptions(start, top) if wanted else None
    return Prompt(spec=RequestSpec(rid=rid, sampling=sampling or SamplingParams(), logprobs=logprobs, **fields), **own)
