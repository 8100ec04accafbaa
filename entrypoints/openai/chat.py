"""Reads the fields of ``POST /v1/chat/completions``. No HTTP, no model, no template.

The shared readers check sampling and everything that completions have too; their refusals are translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...scheduler.outcome import RequestRefused
from ..chat.call import ChatCall
from ..chat.messages import DOCUMENTS, TEXT, Arguments, Conversation, Message, join_parts, split_thoughts
from ..chat.tools import TOOL_CHOICE, TOOLS, Choice, read_tools
from ..description.json_schema import (
    Properties,
    Schema,
    either,
    enum,
    flag,
    list_of,
    nullable,
    open_object,
    opened,
    string,
    taken,
    whole,
)
from ..fields.conversation_names import NO_NAMES, ConversationNames
from ..fields.field_names import FieldNames
from ..fields.foreign_fields import foreign_properties, settle_fields
from ..fields.grammars import RESPONSE_FORMAT, read_response_format
from ..fields.ignored import Ignored
from ..fields.prompts import SHARED_OF_CHATS, LogprobFields, PromptTokens, read_prompts
from ..fields.reading import MODEL, STREAM, STREAM_OPTIONS, include_usage, one_of, shown, typed
from ..fields.sampling import NO_DEFAULTS, SAMPLING, with_defaults
from .common import (
    OF_THE_PROMPT,
    OPENAI_SAMPLING,
    OTHER_SAMPLING,
    REQUEST_RID,
    SAMPLING_OF_ALL,
    TEMPLATE_VARIABLES,
    VLLM,
    check_temperature,
    overflow_words,
    read_prompt_logprobs,
    read_request_rid,
    read_truncation,
    template_variables,
    wants_token_ids,
    with_vllm_names,
)

MAX_TOP_LOGPROBS = 20

ROLES = ("system", "developer", "user", "assistant", "tool")

_CALL_OF_ANSWER: Schema = {
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
}


def _message_schema(title: str, roles: Schema, **more: Schema) -> Schema:
    """more: the fields that messages of these roles have beside a content and a name."""
    properties: Properties = {"role": roles, "content": TEXT, "name": string(), **more}
    return opened(taken(properties, title=title, required=("role",)))


MESSAGE: Schema = either(
    _message_schema("ChatMessage", enum("system", "developer", "user")),
    _message_schema(
        "AssistantMessage",
        enum("assistant"),
        tool_calls=list_of(_CALL_OF_ANSWER),
        reasoning_content=string("The thoughts."),
        reasoning=string("Another name of reasoning_content."),
        refusal=string("The content, if there is no other."),
    ),
    _message_schema(
        "ToolMessage",
        enum("tool", "function", about="function is an older name of tool."),
        tool_call_id=string("The call that it answers."),
    ),
)

_MAX_TOKENS: Schema = SAMPLING["max_new_tokens"] | {"default": None}

PROPERTIES: Properties = {
    "model": MODEL,
    "messages": list_of(MESSAGE, "The chat so far.", least=1),
    "max_tokens": _MAX_TOKENS,
    "max_completion_tokens": _MAX_TOKENS,
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": flag("More than one call in an answer.", default=True),
    "response_format": RESPONSE_FORMAT,
    "logprobs": flag("Logprobs of the answer's tokens.", default=False),
    "top_logprobs": whole("Alternatives per token; needs logprobs.", 0, MAX_TOP_LOGPROBS, default=0),
    "reasoning_effort": string("The effort of reasoning; a variable of the template."),
    "separate_reasoning": flag("Thoughts come as reasoning_content, not in the text.", default=True),
    "chat_template_kwargs": TEMPLATE_VARIABLES,
    "documents": DOCUMENTS,
    "add_generation_prompt": flag("The template opens the assistant's turn.", default=True),
    "continue_final_message": flag("Continue the last message, which is the assistant's.", default=False),
    **SAMPLING_OF_ALL,
    **VLLM,
    **OF_THE_PROMPT,
    **REQUEST_RID,
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

CHAT_NAMES = FieldNames(
    prompt="messages",
    overflow_words=overflow_words("messages"),
    renamed=_RENAMED | {"top_logprobs_num": "top_logprobs"},
)

BODY = taken({**PROPERTIES, **foreign_properties("chat")}, title="ChatBody", required=("messages",))

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


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """A parsed request. ``logprobs``: alternatives per token, or None for no logprobs at all; prompt_logprobs: the
    same for the prompt. token_ids: are the ids of prompt and output wanted?"""

    call: ChatCall
    model: str | None
    logprobs: int | None
    include_usage: bool
    token_ids: bool
    prompt_logprobs: int | None

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.call.rid}"


def parse_chat(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> ChatRequest:
    """Fields of the request body -> a call. ``rid`` is used if the body has none; defaults: the model's sampling
    parameters. names: those of the conversation. ignored: gets what has no
    effect. Raises RequestRefused."""
    ignored = ignored or Ignored()
    fields = settle_fields(fields, "chat", PROPERTIES, ignored)
    fields = with_vllm_names({name: value for name, value in fields.items() if value is not None})
    stream = typed(fields.get("stream", False), bool, "stream")
    usage = include_usage(fields.get("stream_options"), stream, ignored)
    logprobs = _logprobs(fields)
    prompt_logprobs = read_prompt_logprobs(fields)
    token_ids = wants_token_ids(fields)
    tools, choice = read_tools(
        fields.get("tools"), fields.get("tool_choice"), fields.get("parallel_tool_calls"), ignored
    )
    conversation = _conversation(fields, tools, choice, ignored)
    given_rid = read_request_rid(fields)
    with CHAT_NAMES.translated():
        asked = LogprobFields(
            wanted=logprobs is not None or prompt_logprobs is not None,
            start_len=-1 if prompt_logprobs is None else 0,
            top=logprobs or 0,
            with_text=True,
            prompt_top=prompt_logprobs,
        )
        alone = PromptTokens(1, is_batch=False)
        batch = read_prompts(
            fields,
            alone,
            with_defaults(_sampling(fields), defaults),
            [asked],
            rid=rid if given_rid is None else given_rid,
            returns_prompt=token_ids,
            truncate_to=read_truncation(fields),
            clamps_output=not {"max_tokens", "max_completion_tokens"} & fields.keys(),
            names=names,
            ignored=ignored,
        )
    call = ChatCall(
        prompt=batch.prompts[0],
        stream=stream,
        conversation=conversation,
        tools=tools,
        choice=choice,
        separate_reasoning=typed(fields.get("separate_reasoning", True), bool, "separate_reasoning"),
        shared_name=names.shared,
    )
    return ChatRequest(
        call=call,
        model=fields.get("model"),
        logprobs=logprobs,
        include_usage=usage,
        token_ids=token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters in SGLang's names. Without a limit an answer may fill the context."""
    check_temperature(fields)
    sampling: dict[str, Any] = {"max_new_tokens": None}
    sampling |= {name: fields[name] for name in (*OPENAI_SAMPLING, *OTHER_SAMPLING) if name in fields}
    sampling |= {name: fields[theirs] for name, theirs in _RENAMED.items() if theirs in fields}
    if "response_format" in fields:
        sampling |= read_response_format(fields["response_format"])
    if "max_completion_tokens" in fields:
        if fields.get("max_tokens", fields["max_completion_tokens"]) != fields["max_completion_tokens"]:
            raise RequestRefused(
                "max_tokens and max_completion_tokens differ; they mean the same, leave one of them out",
                param="max_tokens",
            )
        sampling["max_new_tokens"] = fields["max_completion_tokens"]
    return sampling


def _logprobs(fields: dict[str, Any]) -> int | None:
    wanted = typed(fields.get("logprobs", False), bool, "logprobs")
    top = typed(fields.get("top_logprobs", 0), int, "top_logprobs")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestRefused(f"top_logprobs is {top}; use 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if top and not wanted:
        raise RequestRefused("top_logprobs is set without logprobs; add logprobs: true", param="top_logprobs")
    return top if wanted else None


# -- messages ----------------------------------------------------------------------------------------------------------


def _conversation(fields: dict[str, Any], tools: list[dict], choice: Choice, ignored: Ignored) -> Conversation:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestRefused("messages takes a list with at least one message", param="messages")
    arguments = Arguments()
    messages = [_message(message, f"messages[{number}]", arguments, ignored) for number, message in enumerate(given)]
    # DeepSeek's and Mistral's clients say so in the message.
    is_prefix = messages[-1]["role"] == "assistant" and given[-1].get("prefix") is True
    goes_on = typed(fields.get("continue_final_message", is_prefix), bool, "continue_final_message")
    answers = typed(fields.get("add_generation_prompt", not goes_on), bool, "add_generation_prompt")
    if goes_on and (answers or messages[-1]["role"] != "assistant"):
        raise RequestRefused(
            "continue_final_message continues the last message, which must be the assistant's, and excludes "
            "add_generation_prompt",
            param="continue_final_message",
        )
    effort = fields.get("reasoning_effort")
    if effort is not None:
        typed(effort, str, "reasoning_effort")
    documents = fields.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(d, dict) for d in documents)):
        raise RequestRefused("documents takes a list of objects", param="documents")
    return Conversation(
        messages=messages,
        tools=None if choice.kind == "none" or not tools else tools,
        documents=documents,
        variables=template_variables(fields, effort),
        goes_on=goes_on,
        add_generation_prompt=answers,
    )


def _message(given: Any, where: str, arguments: Arguments, ignored: Ignored) -> Message:
    """Keys that messages do not have, or have of another role, are passed over: clients send back what some server has
    answered. ignored: gets those with content that the model would need."""
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {shown(given)}; it takes an object with role and content", param=where)
    for name in ("images", "audio", "videos"):
        if given.get(name):
            ignored.add_field(f"{where}.{name}", "the model reads text only")
    role = given.get("role")
    role = one_of("tool" if role == "function" else role, ROLES, f"{where}.role")
    content, thoughts = given.get("content"), []
    if role == "assistant" and isinstance(content, list):
        thoughts, content = split_thoughts(content, f"{where}.content")
    message: Message = {"role": role, "content": _content(content, f"{where}.content")}
    if given.get("name") is not None:
        message["name"] = typed(given["name"], str, f"{where}.name")
    if role == "assistant":
        return _assistant(message, given, thoughts, where, arguments)
    if role == "tool":
        if (call_id := _text(given, "tool_call_id", where)) is not None:
            message["tool_call_id"] = call_id
        message["content"] = message["content"] or ""
    if message["content"] is None:
        raise RequestRefused(f"{where}.content is missing; it takes a string or a list of parts", param=where)
    return message


def _assistant(
    message: Message, given: dict[str, Any], thoughts: list[str], where: str, arguments: Arguments
) -> Message:
    """thoughts: those that stood among the parts of its content."""
    calls = given.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestRefused(f"{where}.tool_calls takes a list", param=f"{where}.tool_calls")
    if not calls and isinstance(given.get("function_call"), dict):  # as OpenAI had it before tool_calls
        calls = [{"function": given["function_call"]}]
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]", arguments) for i, call in enumerate(calls)]
    reasoning, other, refusal = (_text(given, name, where) for name in ("reasoning_content", "reasoning", "refusal"))
    if reasoning := reasoning or other or ("\n".join(thoughts) if thoughts else other):
        message["reasoning_content"] = reasoning
    if message["content"] is None:
        message["content"] = refusal or ""
        if not message["content"] and not calls and reasoning is None:
            raise RequestRefused(f"{where} has neither content nor tool_calls", param=where)
    return message


def _call(given: Any, where: str, arguments: Arguments) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(
            f'{where} takes {{"id", "type": "function", "function": {{"name", "arguments"}}}}', param=where
        )
    name, came = f"{where}.function.arguments", function.get("arguments")
    if not isinstance(came, str | dict | None):
        raise RequestRefused(f"{name} is {shown(came)}; it takes a string of JSON, or an object", param=name)
    return {
        "id": _text(given, "id", where),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": {} if came is None else arguments.read_arguments(came, name),
        },
    }


def _text(given: dict[str, Any], name: str, where: str) -> str | None:
    """A field that may be missing."""
    return None if given.get(name) is None else typed(given[name], str, f"{where}.{name}")


def _content(given: Any, where: str) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {shown(given)}; it takes a string or a list of parts", param=where)
    return join_parts(given, where)
