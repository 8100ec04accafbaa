"""Reads the fields of ``POST /v1/responses``. No HTTP, no model, no template, no earlier response.

The shared readers check sampling and everything that completions have too; their refusals are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....scheduler.outcome import RequestRefused
from ...chat.call import ChatCall
from ...chat.messages import Conversation, Message
from ...description.json_schema import (
    Properties,
    either,
    enum,
    flag,
    list_of,
    open_object,
    picked,
    string,
    taken,
    whole,
)
from ...fields.conversation_names import NO_NAMES, ConversationNames
from ...fields.field_names import FieldNames
from ...fields.foreign_fields import foreign_properties, settle_fields
from ...fields.grammars import TEXT_FORMAT, read_response_format
from ...fields.ignored import Ignored
from ...fields.prompts import SHARED_OF_CHATS, LogprobFields, PromptTokens, read_prompts
from ...fields.reading import MODEL, STORED_RESPONSE_PREFIX, STREAM, read_rid, refuse_unserved, shown, typed
from ...fields.sampling import NO_DEFAULTS, SAMPLING, with_defaults
from ..common import (
    OPENAI_SAMPLING,
    OTHER_SAMPLING,
    REQUEST_RID,
    SAMPLING_OF_ALL,
    TEMPLATE_VARIABLES,
    check_temperature,
    overflow_words,
    read_request_rid,
    template_variables,
)
from .items import ITEM, read_input
from .tools import TOOL, ResponseTools, read_response_tools

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

_KEYS, _KEY_CHARS, _VALUE_CHARS = MAX_METADATA

_SAMPLING = (*(name for name in OPENAI_SAMPLING if name != "n"), *OTHER_SAMPLING)

PROPERTIES: Properties = {
    "model": MODEL,
    "input": either(string(), list_of(ITEM, least=1), about="The new input: a text, or items."),
    "instructions": string("A system message for this response alone."),
    "previous_response_id": string("The response to continue: its conversation comes first, and its KV is reused."),
    "store": flag(
        "Store the response, to be read and continued by its id; its KV is kept for --response-ttl.", default=True
    ),
    "background": flag("Answer at once; read the response by its id.", default=False),
    "metadata": open_object("Comes back with the response.", values=string("", most=_VALUE_CHARS), most=_KEYS)
    | {"propertyNames": {"maxLength": _KEY_CHARS}},
    "max_output_tokens": SAMPLING["max_new_tokens"] | {"minimum": 1, "default": None},
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": taken({}, "With stream: true only.", unsupported={"include_obfuscation": (False,)}),
    "tools": list_of(TOOL, "Tools that the model may call, and the client runs."),
    "tool_choice": either(
        enum("none", "auto", "required"),
        {
            "type": "object",
            "properties": {"type": enum("function", "custom"), "name": string(), "namespace": string()},
            "required": ["type", "name"],
        },
        about="Whether the model may call a function, must call one, or must call a certain one.",
    ),
    "parallel_tool_calls": flag("More than one call in an answer.", default=True),
    "reasoning": taken(
        {"effort": string("The effort of reasoning; a variable of the template.")},
        without_effect=("summary", "generate_summary"),
    ),
    "text": taken({"format": TEXT_FORMAT}, without_effect=("verbosity",)),
    "include": list_of(enum(*INCLUDABLE), f"{LOGPROBS} adds logprobs; the others add nothing."),
    "top_logprobs": whole("Alternatives per token.", 0, MAX_TOP_LOGPROBS, default=0),
    "separate_reasoning": flag("Thoughts are items of their own, not part of the text.", default=True),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    **picked(SAMPLING_OF_ALL, _SAMPLING),
    **REQUEST_RID,
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""

_RENAMED = {"max_new_tokens": "max_output_tokens", "min_new_tokens": "min_tokens"}

RESPONSE_NAMES = FieldNames(
    prompt="input", overflow_words=overflow_words("input"), renamed=_RENAMED, params={"messages": "input"}
)

BODY = taken({**PROPERTIES, **foreign_properties("responses")}, title="ResponseBody", required=("input",))

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


@dataclass(slots=True, frozen=True, kw_only=True)
class ResponseRequest:
    """A parsed request. ``call``: its conversation is without what comes before, and without the instructions.

    previous: rid of the response that it continues. input_items: as they are listed later. input_bytes: about what
    they take. echo: the request's settings, as the response repeats them.
    """

    call: ChatCall
    offered: ResponseTools
    model: str | None
    instructions: str | None
    previous: str | None
    stream: bool
    store: bool
    background: bool
    input_items: list[dict]
    input_bytes: int
    metadata: dict[str, str]
    echo: dict[str, Any] = field(repr=False)

    @property
    def wants_logprobs(self) -> bool:
        return self.call.prompt.spec.logprobs is not None

    @property
    def messages_before(self) -> list[Message]:
        """The instructions, which precede the conversation and are not inherited."""
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]


def parse_response(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> ResponseRequest:
    """Fields of the request body -> a request. ``rid`` is used if the body has none; defaults: the model's sampling
    parameters. names: those of the conversation. ignored: gets what has no
    effect. Raises RequestRefused."""
    ignored = ignored or Ignored()
    # The response repeats labels.
    labels = {name: fields[name] for name in ("prompt_cache_key", "safety_identifier") if name in fields}
    fields = settle_fields(fields, "responses", PROPERTIES, ignored)
    fields = {name: value for name, value in fields.items() if value is not None}
    stream = _flag(fields, "stream", default=False)
    _check_stream_options(fields.get("stream_options"), ignored)
    _check_text(fields.get("text"), ignored)
    store = _flag(fields, "store", default=True)
    background = _flag(fields, "background", default=False)
    _check_background(background, store, stream)
    effort = _effort(fields.get("reasoning"), ignored)
    offered = read_response_tools(fields, ignored)
    given_rid = read_request_rid(fields)
    if (most := typed(fields.get("max_output_tokens", 1), int, "max_output_tokens")) < 1:
        raise RequestRefused(f"max_output_tokens is {most}; use 1 or more", param="max_output_tokens")
    with RESPONSE_NAMES.translated():
        (prompt,) = read_prompts(
            fields,
            PromptTokens(1, is_batch=False),
            with_defaults(_sampling(fields), defaults),
            [_logprobs(fields)],
            rid=rid if given_rid is None else given_rid,
            clamps_output="max_output_tokens" not in fields,
            names=names,
            ignored=ignored,
        ).prompts
    messages, items = read_input(fields.get("input"), prompt.rid, ignored)
    conversation = Conversation(
        messages=messages,
        tools=None if offered.choice.kind == "none" or not offered.tools else offered.tools,
        variables=template_variables(fields, effort),
    )
    call = ChatCall(
        prompt=prompt,
        stream=stream or background,
        conversation=conversation,
        tools=offered.tools,
        choice=offered.choice,
        separate_reasoning=_flag(fields, "separate_reasoning", default=True),
        shared_name=names.shared,
    )
    instructions = fields.get("instructions")
    return ResponseRequest(
        call=call,
        offered=offered,
        model=fields.get("model"),
        instructions=None if instructions is None else typed(instructions, str, "instructions"),
        previous=_previous(fields.get("previous_response_id")),
        stream=stream,
        store=store,
        background=background,
        input_items=items,
        input_bytes=len(msgspec.json.encode(items)),
        metadata=_metadata(fields.get("metadata", {})),
        echo=_echo(fields, call, effort, labels, offered),
    )


def _echo(
    fields: dict[str, Any], call: ChatCall, effort: str | None, labels: dict[str, Any], offered: ResponseTools
) -> dict[str, Any]:
    sampling = call.prompt.sampling
    return {
        "instructions": fields.get("instructions"),
        "max_output_tokens": sampling.max_new_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": call.choice.parallel,
        "previous_response_id": fields.get("previous_response_id"),
        "prompt_cache_key": labels.get("prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": labels.get("safety_identifier"),
        "store": fields.get("store", True),
        "temperature": sampling.temperature,
        "text": {"format": (fields.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": offered.shown,
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.get("user"),
    }


# -- single fields -----------------------------------------------------------------------------------------------------


def _flag(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    return typed(fields.get(name, default), bool, name)


def _previous(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.startswith(STORED_RESPONSE_PREFIX):
        raise RequestRefused(
            f"previous_response_id is {shown(given)}; it takes the id of a response ({STORED_RESPONSE_PREFIX}...)",
            param="previous_response_id",
        )
    return read_rid(given, "previous_response_id")


def _check_background(background: bool, store: bool, stream: bool) -> None:
    if background and not store:
        raise RequestRefused(
            "a response in the background is read by its id, so it must be stored; leave store out", param="store"
        )
    if background and stream:
        raise RequestRefused(
            "a response in the background cannot be streamed here; leave stream or background out",
            code="unsupported_field",
            param="background",
        )


def _check_stream_options(options: Any, ignored: Ignored) -> None:
    if options is None:
        return
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    # The last event of a response has the counts anyway.
    off: dict[str, tuple] = {"include_obfuscation": (False,)}
    refuse_unserved(options, ("include_usage",), off, where="stream_options.", ignored=ignored)


def _check_text(text: Any, ignored: Ignored) -> None:
    """verbosity is ignored."""
    if text is None:
        return
    if not isinstance(text, dict):
        raise RequestRefused(f"text is {shown(text)}; it takes an object", param="text")
    refuse_unserved(text, ("format",), without_effect=("verbosity",), where="text.", ignored=ignored)


def _effort(reasoning: Any, ignored: Ignored) -> str | None:
    """Summaries are never written, whether they are asked for or not: the thoughts come as they are."""
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        raise RequestRefused(f"reasoning is {shown(reasoning)}; it takes an object", param="reasoning")
    refuse_unserved(
        reasoning, ("effort",), without_effect=("summary", "generate_summary"), where="reasoning.", ignored=ignored
    )
    effort = reasoning.get("effort")
    return None if effort is None else typed(effort, str, "reasoning.effort")


def _metadata(given: Any) -> dict[str, str]:
    most, key_chars, value_chars = MAX_METADATA
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise RequestRefused("metadata takes an object whose values are strings", param="metadata")
    if len(given) > most or any(len(key) > key_chars or len(value) > value_chars for key, value in given.items()):
        raise RequestRefused(
            f"metadata takes up to {most} keys of {key_chars} characters, with values of {value_chars}",
            param="metadata",
        )
    return given


def _logprobs(fields: dict[str, Any]) -> LogprobFields:
    include = fields.get("include", [])
    if not isinstance(include, list) or not all(name in INCLUDABLE for name in include):
        raise RequestRefused(f"include takes a list of {', '.join(INCLUDABLE)}", param="include")
    top = typed(fields.get("top_logprobs", 0), int, "top_logprobs")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestRefused(f"top_logprobs is {top}; use 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if LOGPROBS in include:
        return LogprobFields(wanted=True, top=top, with_text=True)
    if top:
        raise RequestRefused(f'top_logprobs needs include: ["{LOGPROBS}"]; add that', param="top_logprobs")
    return LogprobFields()


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters in SGLang's names. Without a limit an answer may fill the context."""
    check_temperature(fields)
    sampling: dict[str, Any] = {"max_new_tokens": None}
    sampling |= {name: fields[name] for name in _SAMPLING if name in fields}
    if (form := (fields.get("text") or {}).get("format")) is not None:
        sampling |= read_response_format(form, "text.format")
    return sampling | {name: fields[theirs] for name, theirs in _RENAMED.items() if theirs in fields}
