"""Fields and answers of ``/v1/completions``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...scheduler.sampling_params import MAX_SEQUENCES
from ..description.json_schema import (
    Properties,
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    open_object,
    string,
    whole,
)
from ..fields.output_details import BEAM_SCORES, RID_AND_INDEX, STAGE_DETAILS
from ..fields.sampling_schema import SAMPLING
from ..fields.shared_schema import IDS, MODEL, SHARED, STREAM, STREAM_OPTIONS, picked
from .common_schema import (
    FINISH_REASONS,
    MATCHED_STOP,
    OF_THE_PROMPT,
    PROMPT_LOGPROBS,
    REQUEST_RID,
    SAMPLING_OF_ALL,
    USAGE,
    VLLM,
)

DEFAULT_MAX_TOKENS = 16

PROPERTIES: Properties = {
    "model": MODEL,
    "prompt": either(string(), IDS, list_of(string()), list_of(IDS), about="A text, token ids, or a list of either."),
    "max_tokens": SAMPLING["max_new_tokens"] | {"default": DEFAULT_MAX_TOKENS},
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "logprobs": whole("Logprobs of each token, and so many alternatives, up to --max-logprobs.", 0),
    "echo": flag("The text begins with the prompt.", default=False),
    "best_of": whole("Equal to n; of a beam search, its width.", 1, MAX_SEQUENCES),
    "use_beam_search": flag("Search for the n likeliest texts.", default=False),
    **SAMPLING_OF_ALL,
    **picked(SAMPLING, ("beam_width", "length_penalty", "early_stopping", "item_trie")),
    **VLLM,
    **OF_THE_PROMPT,
    **REQUEST_RID,
    **SHARED,
}
"""Every field that is served; the reader has their names from here."""

_LOGPROBS = answered(
    {
        "tokens": list_of(nullable(string())),
        "token_logprobs": list_of(nullable(number())),
        "top_logprobs": list_of(nullable(open_object(values=nullable(number())))),
        "text_offset": list_of(whole("", 0)),
    },
    title="CompletionLogprobs",
)

_CHOICE = answered(
    {
        "index": whole("", 0),
        "text": string(),
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": enum(*FINISH_REASONS, None),
    },
    title="CompletionChoice",
    optional={
        "matched_stop": MATCHED_STOP,
        "token_ids": IDS,
        "prompt_token_ids": IDS,
        "prompt_logprobs": PROMPT_LOGPROBS,
        "baton": answered(RID_AND_INDEX, title="CompletionDetails", optional={**STAGE_DETAILS, **BEAM_SCORES}),
    },
)

_HEAD: Properties = {
    "id": string("cmpl-, and the rid."),
    "object": enum("text_completion"),
    "created": whole("Unix time.", 0),
    "model": string(),
    "choices": list_of(_CHOICE),
}

ANSWER = answered({**_HEAD, "usage": USAGE}, title="Completion")
CHUNK = answered(_HEAD, title="CompletionChunk", optional={"usage": nullable(USAGE)})

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "its own logprobs": {"prompt": "One two", "max_tokens": 0, "echo": True, "logprobs": 2},
    "a batch, kept": {"prompt": ["One", "Two"], "max_tokens": 4, "n": 2, "retain_ttl": 10},
    "a beam search": {"prompt": "One", "max_tokens": 4, "n": 3, "use_beam_search": True, "temperature": 0},
    "a stream": {"prompt": "One", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
}
