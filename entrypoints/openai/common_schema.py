"""Fields and answers that several of OpenAI's endpoints share, as ``/openapi.json`` describes them."""

from __future__ import annotations

from ..description.json_schema import (
    Properties,
    Schema,
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
from ..description.operation import COUNT
from ..fields.output_details import CACHED_TOKENS
from ..fields.sampling_schema import SAMPLING, with_model_defaults
from ..fields.shared_schema import RID, TOKEN_ID, picked
from .common import MAX_TEMPERATURE, OPENAI_SAMPLING, OTHER_SAMPLING

SAMPLING_OF_ALL: Properties = with_model_defaults(picked(SAMPLING, (*OPENAI_SAMPLING, *OTHER_SAMPLING)))
SAMPLING_OF_ALL["temperature"] = SAMPLING_OF_ALL["temperature"] | {"maximum": MAX_TEMPERATURE}

VLLM: Properties = {
    "include_stop_str_in_output": SAMPLING["no_stop_trim"] | {"description": "vLLM's name of no_stop_trim."}
}

OF_THE_PROMPT: Properties = {
    "return_token_ids": flag("The ids of prompt and output beside the text.", default=False),
    "truncate_prompt_tokens": either(
        whole("", 1), enum(-1), about="Use the last so many tokens of the prompt; -1: as many as leave room to answer."
    ),
    "prompt_logprobs": whole("Logprobs of the prompt's tokens, and so many alternatives, up to --max-logprobs.", 0),
}
"""Fields of vLLM's about the tokens of a prompt."""

PROMPT_LOGPROBS = list_of(
    nullable(
        open_object(
            "By token id: the prompt's own token, and the likeliest at its place.",
            values=answered({"logprob": number(), "rank": whole("", 1), "decoded_token": string()}),
        )
    ),
    "null for the first token.",
)

REQUEST_RID: Properties = {"rid": RID, "request_id": RID | {"description": "vLLM's name of rid."}}

TEMPLATE_VARIABLES: Schema = open_object("Variables of the chat template.")

FINISH_REASONS = ("stop", "length", "abort")

MATCHED_STOP = either(string(), TOKEN_ID, {"type": "null"}, about="The stop that ended it.")

USAGE = answered(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": answered(CACHED_TOKENS),
    },
    title="Usage",
)

NULLABLE_TEXT = nullable(string())
