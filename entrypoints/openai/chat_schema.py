"""Fields and answers of ``/v1/chat/completions``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chat.schema import DOCUMENTS, TEXT, TOOL_CHOICE, TOOLS
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
    opened,
    string,
    taken,
    whole,
)
from ..fields.output_details import RID_AND_INDEX, STAGE_DETAILS
from ..fields.sampling_schema import SAMPLING
from ..fields.shared_schema import IDS, MODEL, SHARED_OF_CHATS, STREAM, STREAM_OPTIONS
from .common_schema import (
    FINISH_REASONS,
    MATCHED_STOP,
    NULLABLE_TEXT,
    OF_THE_PROMPT,
    PROMPT_LOGPROBS,
    REQUEST_RID,
    SAMPLING_OF_ALL,
    TEMPLATE_VARIABLES,
    USAGE,
    VLLM,
)

MAX_TOP_LOGPROBS = 20

ROLES = ("system", "developer", "user", "assistant", "tool")

MESSAGE: Properties = {
    "role": enum(*ROLES, "function", about="function is an older name of tool."),
    "content": TEXT,
    "name": string(),
    "tool_calls": list_of(
        {
            "type": "object",
            "properties": {
                "id": nullable(string()),
                "function": {
                    "type": "object",
                    "properties": {"name": string(), "arguments": nullable(either(string(), open_object()))},
                    "required": ["name"],
                },
            },
            "required": ["function"],
        },
        "Of the assistant.",
    ),
    "tool_call_id": string("Of a tool: the call that it answers."),
    "reasoning_content": string("Of the assistant: what it thought."),
    "reasoning": string("Another name of reasoning_content."),
    "refusal": string("Of the assistant."),
}

_MAX_TOKENS: Schema = SAMPLING["max_new_tokens"] | {"default": None}

PROPERTIES: Properties = {
    "model": MODEL,
    "messages": list_of(opened(taken(MESSAGE, title="ChatMessage", required=("role",))), "The chat so far.", least=1),
    "max_tokens": _MAX_TOKENS,
    "max_completion_tokens": _MAX_TOKENS,
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": flag("More than one call in an answer.", default=True),
    "response_format": taken({"type": enum("text")}, required=("type",)),
    "logprobs": flag("Logprobs of the answer's tokens.", default=False),
    "top_logprobs": whole("Alternatives per token; needs logprobs.", 0, MAX_TOP_LOGPROBS, default=0),
    "reasoning_effort": string("How much the model is to think; a variable of the template."),
    "separate_reasoning": flag("Thoughts come as reasoning_content, not in the text.", default=True),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    "documents": DOCUMENTS,
    "add_generation_prompt": flag("The template opens the assistant's turn.", default=True),
    "continue_final_message": flag("Go on with the last message, which is the assistant's.", default=False),
    **SAMPLING_OF_ALL,
    **VLLM,
    **OF_THE_PROMPT,
    **REQUEST_RID,
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""

_TOKEN: Properties = {"token": NULLABLE_TEXT, "logprob": nullable(number()), "bytes": list_of(whole("", 0, 255))}

_LOGPROBS = answered(
    {
        "content": list_of(answered({**_TOKEN, "top_logprobs": list_of(answered(_TOKEN))})),
        "refusal": {"type": "null"},
    },
    title="ChatLogprobs",
)

_CALL = answered(
    {
        "id": string(),
        "type": enum("function"),
        "function": answered({"name": string(), "arguments": string("JSON, as far as the model wrote it well.")}),
    }
)

_CALL_DELTA = answered(
    {"index": whole("", 0), "function": answered({"arguments": string()}, optional={"name": string()})},
    optional={"id": string(), "type": enum("function")},
)

_END: Properties = {
    "finish_reason": enum("tool_calls", *FINISH_REASONS),
    "matched_stop": MATCHED_STOP,
    "baton": answered(RID_AND_INDEX, title="ChatDetails", optional=STAGE_DETAILS),
}

_CHOICE = answered(
    {
        "index": whole("", 0),
        "message": answered(
            {"role": enum("assistant"), "content": NULLABLE_TEXT, "refusal": {"type": "null"}},
            title="ChatAnswer",
            optional={"reasoning_content": string(), "tool_calls": list_of(_CALL)},
        ),
        "logprobs": nullable(_LOGPROBS),
        **_END,
    },
    title="ChatChoice",
    optional={"token_ids": IDS},
)

_DELTA = answered(
    {},
    title="ChatDelta",
    optional={
        "role": enum("assistant"),
        "content": string(),
        "reasoning_content": string(),
        "tool_calls": list_of(_CALL_DELTA),
    },
)

_CHUNK_CHOICE = answered(
    {
        "index": whole("", 0),
        "delta": _DELTA,
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": enum("tool_calls", *FINISH_REASONS, None),
    },
    optional={"matched_stop": MATCHED_STOP, "baton": _END["baton"], "token_ids": IDS},
)

_HEAD: Properties = {"id": string("chatcmpl-, and the rid."), "created": whole("Unix time.", 0), "model": string()}

ANSWER = answered(
    {"object": enum("chat.completion"), **_HEAD, "choices": list_of(_CHOICE), "usage": USAGE},
    title="ChatCompletion",
    optional={"prompt_token_ids": IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)
CHUNK = answered(
    {"object": enum("chat.completion.chunk"), **_HEAD, "choices": list_of(_CHUNK_CHOICE)},
    title="ChatCompletionChunk",
    optional={"usage": nullable(USAGE), "prompt_token_ids": IDS},
)

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a question": {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 8},
    "two answers, with logprobs": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 4,
    },
    "a stream": {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
    },
    "a tool": {
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [_TOOL],
        "max_tokens": 16,
    },
}
