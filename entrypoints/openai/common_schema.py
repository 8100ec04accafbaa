"""What several of OpenAI's endpoints take and answer, as ``/openapi.json`` describes it."""

from __future__ import annotations

from ..description.json_schema import Properties, Schema, answered, either, nullable, open_object, string
from ..description.operation import COUNT
from ..fields.answer_schema import CACHED_TOKENS
from ..fields.sampling_schema import SAMPLING
from ..fields.shared_schema import RID, TOKEN_ID, picked
from .common import MAX_TEMPERATURE, OPENAI_SAMPLING, OTHER_SAMPLING

SAMPLING_OF_ALL: Properties = picked(SAMPLING, (*OPENAI_SAMPLING, *OTHER_SAMPLING))
SAMPLING_OF_ALL["temperature"] = SAMPLING["temperature"] | {"maximum": MAX_TEMPERATURE}

VLLM: Properties = {
    "include_stop_str_in_output": SAMPLING["no_stop_trim"] | {"description": "vLLM's name of no_stop_trim."}
}

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
