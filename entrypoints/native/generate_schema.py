"""Fields and answers of ``/generate``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..description.json_schema import (
    Properties,
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    per_prompt,
    string,
    taken,
    whole,
)
from ..description.operation import COUNT
from ..fields.foreign_fields import foreign_properties
from ..fields.output_details import BEAM_SCORES, CACHED_TOKENS, DRAFT_COUNTS, STAGE_DETAILS
from ..fields.prompts import MAX_NAMED_TOKENS
from ..fields.sampling_schema import SAMPLING
from ..fields.shared_schema import IDS, RID, SHARED, STREAM, STREAM_OPTIONS, TOKEN_ID

SAMPLING_PARAMS = taken({**SAMPLING, **foreign_properties("sampling_params")}, title="SamplingParams")

_NAMED = list_of(TOKEN_ID, most=MAX_NAMED_TOKENS)

PROPERTIES: Properties = {
    "text": either(string(), list_of(string(), least=1), about="The prompt, or a batch of them; or give `input_ids`."),
    "input_ids": either(IDS, list_of(IDS, least=1), about="The prompt, or a batch of them, as token ids."),
    "sampling_params": either(
        SAMPLING_PARAMS, list_of(nullable(SAMPLING_PARAMS)), about="For all prompts, or one for each."
    ),
    "rid": either(RID, list_of(RID)),
    "stream": STREAM,
    "return_logprob": per_prompt(flag("Logprobs of the output's tokens.", default=False)),
    "logprob_start_len": per_prompt(
        whole("The first prompt position whose logprob is wanted; -1: none.", -1, default=-1)
    ),
    "top_logprobs_num": per_prompt(
        whole("Alternatives per position, up to --max-logprobs; needs return_logprob.", 0, default=0)
    ),
    "token_ids_logprob": either(
        _NAMED,
        list_of(nullable(_NAMED)),
        about="Ids whose logprobs are wanted at every position, for all prompts, or a list for each; needs "
        "return_logprob.",
    ),
    "return_text_in_logprobs": flag("Each token's text in the logprobs, instead of null.", default=False),
    "return_prompt_token_ids": flag("`prompt_token_ids` beside `output_ids`.", default=False),
    "stream_options": STREAM_OPTIONS,
    **SHARED,
}
"""Every field that is served; the reader has their names from here."""

_ROW = list_of({}, "[logprob or null, token id, text or null]", least=3, most=3)

_FINISH = either(
    answered({"type": enum("stop"), "matched": either(string(), TOKEN_ID, {"type": "null"})}),
    answered({"type": enum("length"), "length": COUNT}),
    answered({"type": enum("abort"), "message": string()}),
    {"type": "null"},
    about="null in the events before the last.",
)

_META_INFO = answered(
    {
        "id": string("The rid."),
        "finish_reason": _FINISH,
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        **CACHED_TOKENS,
    },
    title="MetaInfo",
    optional={
        "e2e_latency": number("Seconds, at the end.", 0),
        **BEAM_SCORES,
        **DRAFT_COUNTS,
        **STAGE_DETAILS,
        "input_token_logprobs": list_of(_ROW),
        "output_token_logprobs": list_of(_ROW),
        "input_top_logprobs": list_of(nullable(list_of(_ROW))),
        "output_top_logprobs": list_of(nullable(list_of(_ROW))),
        "input_token_ids_logprobs": list_of(nullable(list_of(_ROW))),
        "output_token_ids_logprobs": list_of(nullable(list_of(_ROW))),
    },
)

OUTPUT = answered(
    {"text": string(), "output_ids": IDS, "meta_info": _META_INFO},
    title="GenerateOutput",
    optional={"index": whole("In streams of several outputs: which one.", 0), "prompt_token_ids": IDS},
)

ANSWER = either(OUTPUT, list_of(OUTPUT), about="A list for a batch, and for n over 1.")

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a prompt": {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
    "a batch, with logprobs": {
        "text": ["One", "Two"],
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    },
    "a beam search": {"text": "One", "sampling_params": {"beam_width": 3, "n": 2, "max_new_tokens": 4}},
    "a first stage, kept": {"text": "One", "retain_ttl": 10, "sampling_params": {"max_new_tokens": 4}},
    "a stream": {"text": "One", "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 4}},
}
