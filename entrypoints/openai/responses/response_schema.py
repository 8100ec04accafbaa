"""Fields and answers of ``/v1/responses``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...chat.schema import FUNCTION_NAME
from ...description.json_schema import (
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
    taken,
    whole,
)
from ...description.operation import COUNT
from ...fields.output_details import CACHED_TOKENS, STAGE_DETAILS
from ...fields.sampling_schema import SAMPLING
from ...fields.shared_schema import MODEL, SHARED_OF_CHATS, STREAM, picked
from ..common import OPENAI_SAMPLING, OTHER_SAMPLING
from ..common_schema import NULLABLE_TEXT, REQUEST_RID, SAMPLING_OF_ALL, TEMPLATE_VARIABLES

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Only the first adds anything: thoughts come as they are, and the others belong to tools that are refused."""

MAX_TOP_LOGPROBS = 20
MAX_METADATA = (16, 64, 512)
"""Keys, and characters of a key and of a value; OpenAI's limits."""

TOOL_OFF: dict[str, tuple] = {"async": (False,)}
TOOL_WITHOUT_EFFECT = ("allowed_callers", "defer_loading", "output_schema")
"""Every tool is offered from the start, to be called by the model itself."""

HOSTED_CALLS = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools",
    "mcp_approval_request",
)  # fmt: skip
"""Items that tell of what another server did. The model is not shown them."""

_ITEM: Schema = {
    "title": "InputItem",
    "type": "object",
    "properties": {
        "type": enum(
            "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
            "custom_tool_call_output", *HOSTED_CALLS, None, about="message, where it has a role."
        )
    },
    "description": "message: role, content. reasoning: content. function_call: call_id, name, arguments; namespace, "
    "where its tool has one. function_call_output: call_id, output. custom_tool_call: call_id, name, input; its output "
    "is like a function's. Items of an answer are taken as they are; those of tools that a server ran are passed over.",
}  # fmt: skip

_ONE_TOOL: Properties = {"name": FUNCTION_NAME, "description": {}}
_FUNCTION = taken(
    {"type": enum("function"), **_ONE_TOOL, "parameters": open_object("A JSON schema.")},
    title="ResponseFunction",
    required=("type", "name"),
    unsupported=TOOL_OFF,
    without_effect=(*TOOL_WITHOUT_EFFECT, "strict"),
)
_CUSTOM = taken(
    {"type": enum("custom"), **_ONE_TOOL, "format": open_object("text, or a grammar that the model is told of.")},
    "A tool that takes text.",
    title="ResponseCustomTool",
    required=("type", "name"),
    unsupported=TOOL_OFF,
    without_effect=(*TOOL_WITHOUT_EFFECT, "strict"),
)
_NAMESPACE = taken(
    {"type": enum("namespace"), "name": string(), "description": {}, "tools": list_of(either(_FUNCTION, _CUSTOM))},
    "Tools whose calls have the namespace beside their name.",
    title="ResponseNamespace",
    required=("type", "name", "tools"),
    without_effect=("strict",),
)
_HOSTED: Schema = {
    "type": "object",
    "properties": {"type": string("A tool that a server runs, such as web_search; it is passed over.")},
    "required": ["type"],
}
_TOOL = either(_FUNCTION, _CUSTOM, _NAMESPACE, _HOSTED)

_KEYS, _KEY_CHARS, _VALUE_CHARS = MAX_METADATA

PROPERTIES: Properties = {
    "model": MODEL,
    "input": either(string(), list_of(_ITEM, least=1), about="What comes next: a text, or items."),
    "instructions": string("A system message for this response alone."),
    "previous_response_id": string("Go on from this one: its conversation comes first, and its KV is used again."),
    "store": flag("It can be read, and gone on from, later; its KV is kept for --response-ttl.", default=True),
    "background": flag("Answer at once; read the response by its id.", default=False),
    "metadata": open_object("Comes back with the response.", values=string("", most=_VALUE_CHARS), most=_KEYS)
    | {"propertyNames": {"maxLength": _KEY_CHARS}},
    "max_output_tokens": SAMPLING["max_new_tokens"] | {"minimum": 1, "default": None},
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": taken({}, "With stream: true only.", unsupported={"include_obfuscation": (False,)}),
    "tools": list_of(_TOOL, "Tools that the model may call, and the client runs."),
    "tool_choice": either(
        enum("none", "auto", "required"),
        {
            "type": "object",
            "properties": {"type": enum("function", "custom"), "name": string(), "namespace": string()},
            "required": ["type", "name"],
        },
        about="Whether the model may call a function, must, or must call a certain one.",
    ),
    "parallel_tool_calls": flag("More than one call in an answer.", default=True),
    "reasoning": taken(
        {"effort": string("How much the model is to think; a variable of the template.")},
        without_effect=("summary", "generate_summary"),
    ),
    "text": taken({"format": taken({"type": enum("text")}, required=("type",))}, without_effect=("verbosity",)),
    "include": list_of(enum(*INCLUDABLE), f"{LOGPROBS} adds logprobs; the others add nothing."),
    "top_logprobs": whole("Alternatives per token.", 0, MAX_TOP_LOGPROBS, default=0),
    "separate_reasoning": flag("Thoughts are items of their own, not part of the text.", default=True),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    **picked(SAMPLING_OF_ALL, tuple(name for name in (*OPENAI_SAMPLING, *OTHER_SAMPLING) if name != "n")),
    **REQUEST_RID,
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""

_USAGE = answered(
    {
        "input_tokens": COUNT,
        "input_tokens_details": answered({**CACHED_TOKENS, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": answered({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    },
    title="ResponseUsage",
)

_OUTPUT: Schema = {
    "title": "OutputItem",
    "type": "object",
    "properties": {
        "id": string(),
        "type": enum("message", "reasoning", "function_call", "custom_tool_call"),
        "status": string(),
    },
    "required": ["id", "type", "status"],
    "description": "message: role, content. reasoning: content. function_call: call_id, name, arguments; namespace, "
    "where its tool has one. custom_tool_call: call_id, name, input.",
}

ANSWER = answered(
    {
        "id": string("resp_, and the rid."),
        "object": enum("response"),
        "created_at": whole("Unix time.", 0),
        "completed_at": nullable(whole("Unix time.", 0)),
        "model": string(),
        "status": enum("queued", "in_progress", "completed", "incomplete", "cancelled", "failed"),
        "background": flag(),
        "error": nullable(answered({"code": string(), "message": string()})),
        "incomplete_details": nullable(answered({"reason": enum("max_output_tokens")})),
        "output": list_of(_OUTPUT),
        "usage": nullable(_USAGE),
        "instructions": NULLABLE_TEXT,
        "max_output_tokens": nullable(COUNT),
        "max_tool_calls": {"type": "null"},
        "metadata": open_object(
            "With baton_path, baton_inherited_tokens and baton_recomputed_tokens.", values=string()
        ),
        "parallel_tool_calls": flag(),
        "previous_response_id": NULLABLE_TEXT,
        "prompt_cache_key": {},
        "reasoning": answered({"effort": NULLABLE_TEXT, "summary": {"type": "null"}}),
        "safety_identifier": {},
        "store": flag(),
        "temperature": number(),
        "text": answered({"format": answered({"type": enum("text")})}),
        "tool_choice": {},
        "tools": list_of(open_object()),
        "top_logprobs": COUNT,
        "top_p": number(),
        "truncation": enum("disabled"),
        "user": NULLABLE_TEXT,
    },
    title="Response",
    optional={"baton": answered({"rid": string()}, title="ResponseDetails", optional=STAGE_DETAILS)},
)

EVENT: Schema = {
    "title": "ResponseEvent",
    "type": "object",
    "properties": {"type": string("response.created, and so on, as OpenAI has them."), "sequence_number": COUNT},
    "required": ["type", "sequence_number"],
}

ITEMS = answered(
    {
        "object": enum("list"),
        "data": list_of(open_object()),
        "first_id": NULLABLE_TEXT,
        "last_id": NULLABLE_TEXT,
        "has_more": flag(),
    },
    title="InputItems",
)

DELETED = answered({"id": string(), "object": enum("response"), "deleted": enum(True)}, title="DeletedResponse")

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a question": {"input": "How are you?", "max_output_tokens": 8},
    "a turn of an agent": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "What is the weather in Rome?"},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"town": "Rome"}'},
            {"type": "function_call_output", "call_id": "1", "output": "Sunny"},
        ],
        "max_output_tokens": 8,
    },
    "in the background": {"input": "How are you?", "background": True, "max_output_tokens": 8},
    "a stream": {"input": "How are you?", "stream": True, "max_output_tokens": 8},
}
