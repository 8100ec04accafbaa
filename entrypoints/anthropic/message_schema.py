"""Fields and answers of ``/v1/messages``, as ``/openapi.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..description.json_schema import (
    Properties,
    Schema,
    answered,
    either,
    enum,
    flag,
    list_of,
    open_object,
    opened,
    string,
    taken,
    whole,
)
from ..description.operation import COUNT
from ..fields.output_details import CACHED_TOKENS, STAGE_DETAILS
from ..fields.sampling_schema import SAMPLING, with_model_defaults
from ..fields.shared_schema import RID, SHARED_OF_CHATS, STREAM, picked
from .conversation import ROLES

EFFORTS = ("low", "medium", "high", "xhigh", "max")
TOOL_NAME = r"[\w-]{1,128}"

MESSAGE_SAMPLING = (
    "temperature", "top_p", "top_k",
    # Not Anthropic's; named as in SGLang and vLLM.
    "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip

TOOL_UNENFORCED: dict[str, tuple[tuple, str]] = {
    # Field -> the values that ask for nothing, and why any other has no effect.
    "strict": ((False,), "arguments are not held to their schema"),
    "defer_loading": ((False,), "every tool is offered from the start"),
    "allowed_callers": ((["direct"], []), "every tool is offered to the model itself"),
    "input_examples": (([],), "the model is not shown them; put them into the description"),
}
TOOL_WITHOUT_EFFECT = ("cache_control", "eager_input_streaming")

_BLOCK: Schema = {
    "title": "Block",
    "type": "object",
    "properties": {"type": enum("text", "thinking", "redacted_thinking", "tool_use", "tool_result")},
    "required": ["type"],
    "description": "user: text and tool_result. assistant: text, thinking, redacted_thinking and tool_use.",
}

_TEXT_BLOCK: Schema = {
    "type": "object",
    "properties": {"type": enum("text"), "text": string()},
    "required": ["type", "text"],
}

_MESSAGE = opened(
    taken(
        {"role": enum(*ROLES), "content": either(string(), list_of(_BLOCK))},
        title="Message",
        required=("role", "content"),
    )
)

_TOOL = taken(
    {
        "type": enum("custom"),
        "name": string("", least=1, most=128),
        "description": string(),
        "input_schema": open_object("A JSON schema."),
    },
    title="MessageTool",
    required=("name", "input_schema"),
    without_effect=(*TOOL_UNENFORCED, *TOOL_WITHOUT_EFFECT),
)

_SERVER_TOOL: Schema = {
    "type": "object",
    "properties": {"type": string("A tool that Anthropic defines, such as web_search_20250305; it is passed over.")},
    "required": ["type"],
}

_CONTEXT_MANAGEMENT = taken(
    {
        "edits": list_of(
            {"type": "object", "properties": {"type": string()}, "required": ["type"]},
            "clear_tool_uses_20250919 (trigger, keep, clear_at_least, exclude_tools, clear_tool_inputs) and "
            "clear_thinking_20251015 (keep).",
        )
    },
    "Cleared of the conversation before the model reads it.",
)

_ONE_ONLY = {"disable_parallel_tool_use": flag("One call at most.", default=False)}

_TOOL_CHOICE = either(
    taken({"type": enum("auto", "any"), **_ONE_ONLY}, required=("type",)),
    taken({"type": enum("tool"), "name": string(), **_ONE_ONLY}, required=("type", "name")),
    taken({"type": enum("none")}, required=("type",)),
    about="Whether the model may use a tool, must, or must use a certain one.",
)

_THINKING = either(
    taken(
        {
            "type": enum("enabled"),
            "budget_tokens": whole("Binds nothing; the answer's baton.unenforced says so.", 1),
        },
        required=("type",),
        without_effect=("display",),
    ),
    taken({"type": enum("adaptive", "disabled")}, required=("type",), without_effect=("display",)),
    about="Whether the model thinks first, where its template can be told.",
)

PROPERTIES: Properties = {
    "model": string("The served model's name; any, unless --served-model-name is set without --serve-any-model-name."),
    "messages": list_of(_MESSAGE, "The chat so far.", least=1),
    "max_tokens": whole("Tokens to generate at most.", 1),
    "system": either(string(), list_of(_TEXT_BLOCK), about="What the model is told first."),
    "stop_sequences": list_of(string(least=1), "The answer ends before any of these texts."),
    "stream": STREAM,
    "metadata": taken({"user_id": string("As user.", most=1024)}),
    "tools": list_of(either(_TOOL, _SERVER_TOOL), "Tools that the model may use, and the client runs."),
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": taken(
        {"effort": enum(*EFFORTS, about="A variable of the template."), "task_budget": open_object("Has no effect.")},
        unsupported={"format": ()},
    ),
    "context_management": _CONTEXT_MANAGEMENT,
    "rid": RID,
    "min_tokens": SAMPLING["min_new_tokens"],
    **with_model_defaults(picked(SAMPLING, MESSAGE_SAMPLING)),
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""
PROPERTIES["temperature"] = PROPERTIES["temperature"] | {"maximum": 1.0}

_EDITED = answered(
    {"applied_edits": list_of(open_object("type, cleared_input_tokens, and cleared_tool_uses or _thinking_turns."))}
)

_USAGE = answered(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    },
    title="MessageUsage",
)

ANSWER = answered(
    {
        "id": string("msg_, and the rid."),
        "type": enum("message"),
        "role": enum("assistant"),
        "model": string(),
        "content": list_of(open_object()),
        "stop_reason": enum("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
        "stop_sequence": {"type": ["string", "null"]},
        "usage": _USAGE,
        "baton": answered(
            {"rid": string()},
            title="MessageDetails",
            optional={
                **STAGE_DETAILS,
                "cached_tokens_details": CACHED_TOKENS["cached_tokens_details"],
                "unfinished_input": open_object("Call -> its arguments as far as they got.", values=string()),
                "unenforced": list_of(string(), "Fields that bind nothing."),
            },
        ),
    },
    title="MessageAnswer",
    optional={"context_management": _EDITED},
)

EVENT: Schema = {
    "title": "MessageEvent",
    "type": "object",
    "properties": {"type": string("message_start, and so on, as Anthropic has them.")},
    "required": ["type"],
}

NUM_TOKENS = answered(
    {"input_tokens": COUNT},
    title="NumTokens",
    optional={"context_management": answered({"original_input_tokens": COUNT})},
)

ERROR = answered(
    {
        "type": enum("error"),
        "error": answered(
            {
                "type": string(),
                "message": string("What was wrong, which value, and what to change."),
                "details": answered(
                    {"error_code": {"type": ["string", "null"]}, "param": {"type": ["string", "null"]}}
                ),
            }
        ),
    },
    title="MessageError",
)

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a question": {"model": "any", "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 8},
    "a stream": {
        "model": "any",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    },
}
