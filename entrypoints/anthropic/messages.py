"""Reads the fields of ``POST /v1/messages`` and of ``/v1/messages/count_tokens``. No HTTP, no model, no template.

The shared readers check sampling and everything that completions have too; their refusals are translated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...scheduler.outcome import RequestRefused
from ..chat.call import ChatCall
from ..chat.chats import Chats
from ..chat.tools import Choice, read_tools, unserved_tool
from ..description.json_schema import (
    Properties,
    Schema,
    either,
    enum,
    flag,
    list_of,
    open_object,
    opened,
    picked,
    string,
    taken,
    whole,
)
from ..fields.conversation_names import NO_NAMES, ConversationNames
from ..fields.field_names import FieldNames
from ..fields.foreign_fields import foreign_properties, settle_fields
from ..fields.grammars import TEXT_FORMAT, read_response_format
from ..fields.ignored import Ignored
from ..fields.prompts import SHARED_OF_CHATS, LogprobFields, PromptTokens, read_prompts
from ..fields.reading import MODEL, RID, STREAM, one_of, refuse_unserved, shown, typed
from ..fields.sampling import NO_DEFAULTS, SAMPLING, with_defaults, with_model_defaults
from .context_management import ContextEdits, edited_call, read_context_management
from .conversation import ROLES, read_conversation
from .diagnostics import DIAGNOSTICS, MESSAGE_PREFIX, Diagnostics, read_diagnostics
from .errors import overflow_words

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
        "strict": flag("The input fulfils the schema.", default=False),
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
    "Parts to clear from the conversation before the model reads it.",
)

_ONE_ONLY = {"disable_parallel_tool_use": flag("One call at most.", default=False)}

_TOOL_CHOICE = either(
    taken({"type": enum("auto", "any"), **_ONE_ONLY}, required=("type",)),
    taken({"type": enum("tool"), "name": string(), **_ONE_ONLY}, required=("type", "name")),
    taken({"type": enum("none")}, required=("type",)),
    about="Whether the model may use a tool, must use one, or must use a certain one.",
)

_THINKING = either(
    taken(
        {
            "type": enum("enabled"),
            "budget_tokens": whole("Not enforced; see baton.unenforced in the answer.", 1),
        },
        required=("type",),
        without_effect=("display",),
    ),
    taken({"type": enum("adaptive", "disabled")}, required=("type",), without_effect=("display",)),
    about="Whether the model thinks before it answers; needs a chat template with a switch for it.",
)

PROPERTIES: Properties = {
    "model": MODEL,
    "messages": list_of(_MESSAGE, "The chat so far.", least=1),
    "max_tokens": whole("Tokens to generate at most.", 1),
    "system": either(string(), list_of(_TEXT_BLOCK), about="The system prompt."),
    "stop_sequences": list_of(string(least=1), "The answer ends before any of these texts."),
    "stream": STREAM,
    "metadata": taken({"user_id": string("Same as user.", most=1024)}),
    "tools": list_of(either(_TOOL, _SERVER_TOOL), "Tools that the model may use, and the client runs."),
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": taken(
        {
            "effort": enum(*EFFORTS, about="A variable of the template."),
            "task_budget": open_object("Has no effect."),
            "format": TEXT_FORMAT,
        },
    ),
    "context_management": _CONTEXT_MANAGEMENT,
    "diagnostics": DIAGNOSTICS,
    "rid": RID,
    "min_tokens": SAMPLING["min_new_tokens"],
    **with_model_defaults(picked(SAMPLING, MESSAGE_SAMPLING)),
    **SHARED_OF_CHATS,
}
"""Every field that is served; the reader has their names from here."""
PROPERTIES["temperature"] = PROPERTIES["temperature"] | {"maximum": 1.0}

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

MESSAGE_NAMES = FieldNames(
    prompt="messages", overflow_words=overflow_words, renamed=_RENAMED, params={"stop": "stop_sequences"}
)

BODY = taken(
    {**PROPERTIES, **foreign_properties("messages")},
    title="MessageBody",
    required=("model", "messages", "max_tokens"),
)
COUNT_BODY = BODY | {"title": "CountBody", "required": ["model", "messages"]}

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

_TOOL_NAME = re.compile(TOOL_NAME, re.ASCII)


@dataclass(slots=True, frozen=True)
class MessagesRequest:
    """A parsed request. ``thinking``: enabled, adaptive or disabled, or None where the request does not say.
    ``unenforced``: required fields that have no effect; the answer names them. edits: the requested edits of the
    conversation, and applied_edits those made; both None where the request has none. diagnostics: as asked for, and
    diagnosis the answer to it."""

    call: ChatCall
    model: str
    thinking: str | None
    unenforced: tuple[str, ...] = ()
    edits: ContextEdits | None = None
    applied_edits: list[dict[str, Any]] | None = None
    diagnostics: Diagnostics | None = None
    diagnosis: dict[str, Any] | None = None

    @property
    def message_id(self) -> str:
        return MESSAGE_PREFIX + self.call.rid


def parse_messages(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    counts_only: bool = False,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> MessagesRequest:
    """Fields of the request body -> a call. ``rid`` is used if the body has none. counts_only: nothing is generated,
    and max_tokens may be missing. defaults: the model's sampling parameters. names: those of the conversation.
    ignored: gets what has no effect. Raises RequestRefused."""
    ignored = ignored or Ignored()
    fields = settle_fields(fields, "messages", PROPERTIES, ignored)
    fields = {name: value for name, value in fields.items() if value is not None}
    model = typed(_needed(fields, "model", "a string"), str, "model")
    most = 1 if counts_only and "max_tokens" not in fields else _needed(fields, "max_tokens", "a whole number")
    if typed(most, int, "max_tokens") < 1:
        raise RequestRefused(f"max_tokens is {most}; use 1 or more", param="max_tokens")
    tools, choice = _tools(fields, ignored)
    thinking, budget = _thinking(fields.get("thinking"), ignored)
    variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking != "disabled"}
    variables |= _effort(fields.get("output_config"), ignored)
    conversation = read_conversation(
        _needed(fields, "messages", "a list"),
        fields.get("system"),
        tools=None if choice.kind == "none" or not tools else tools,
        variables=variables,
    )
    fields |= _user(fields, ignored)
    with MESSAGE_NAMES.translated():
        alone = PromptTokens(1, is_batch=False)
        sampling = with_defaults(_sampling(fields), defaults)
        rid = fields.get("rid", rid)
        batch = read_prompts(fields, alone, sampling, [LogprobFields()], rid=rid, names=names, ignored=ignored)
    call = ChatCall(
        prompt=batch.prompts[0],
        stream=batch.stream,
        conversation=conversation,
        tools=tools,
        choice=choice,
        shared_name=names.shared,
    )
    return MessagesRequest(
        call,
        model,
        thinking,
        () if budget is None else ("thinking.budget_tokens",),
        read_context_management(fields.get("context_management"), ignored),
        diagnostics=read_diagnostics(fields.get("diagnostics"), ignored),
    )


async def edited(asked: MessagesRequest, chats: Chats, *, may_overflow: bool = False) -> MessagesRequest:
    """The request with its conversation edited as it asks for. may_overflow: as in `Chats.render`. Raises
    RequestRefused."""
    if asked.edits is None:
        return asked
    call, applied = await edited_call(asked.call, asked.edits, chats, may_overflow=may_overflow)
    return dataclasses.replace(asked, call=call, applied_edits=applied)


def check_thinking(asked: MessagesRequest, template: str, ignored: Ignored, *, thoughts_are_known: bool) -> None:
    """Note a setting of ``thinking`` that has no effect on this model. template: the source of its chat template.
    thoughts_are_known: the server can separate its thoughts."""
    if "enable_thinking" in template:
        return
    if asked.thinking == "enabled" and not thoughts_are_known:
        ignored.add_field("thinking", "the model does not think, as far as the server knows (--reasoning-parser)")
    if asked.thinking == "disabled" and thoughts_are_known:
        ignored.add_field("thinking", "the chat template has no switch for it (enable_thinking)")


def _needed(fields: dict[str, Any], name: str, kind: str) -> Any:
    if name not in fields:
        raise RequestRefused(f"{name} is missing; it takes {kind}", param=name)
    return fields[name]


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters in SGLang's names."""
    if not 0.0 <= typed(fields.get("temperature", 1.0), float, "temperature") <= 1.0:
        raise RequestRefused(f"temperature is {shown(fields['temperature'])}; use 0 to 1", param="temperature")
    stops = fields.get("stop_sequences", [])
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestRefused(f"stop_sequences is {shown(stops)}; it takes a list of strings", param="stop_sequences")
    sampling = {name: fields[name] for name in MESSAGE_SAMPLING if name in fields}
    config = fields.get("output_config")
    if isinstance(config, dict) and config.get("format") is not None:
        sampling |= read_response_format(config["format"], "output_config.format")
    sampling |= {name: fields[theirs] for name, theirs in _RENAMED.items() if theirs in fields}
    return sampling | {"stop": stops}


def _user(fields: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    """The user, which Anthropic calls metadata.user_id."""
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise RequestRefused(f"metadata is {shown(metadata)}; it takes an object", param="metadata")
    refuse_unserved(metadata, ("user_id",), where="metadata.", ignored=ignored)
    user = metadata.get("user_id")
    if user is None:
        return {}
    if fields.get("user", user) != user:
        raise RequestRefused("user and metadata.user_id differ; they mean the same", param="metadata.user_id")
    return {"user": typed(user, str, "metadata.user_id")}


def _thinking(given: Any, ignored: Ignored) -> tuple[str | None, int | None]:
    """(type, budget)."""
    if given is None:
        return None, None
    if not isinstance(given, dict):
        raise RequestRefused(f"thinking is {shown(given)}; it takes an object with a type", param="thinking")
    kind = one_of(given.get("type"), ("enabled", "adaptive", "disabled"), "thinking.type")
    served = ("type", "budget_tokens") if kind == "enabled" else ("type",)
    refuse_unserved(given, (*served, "display"), where="thinking.", ignored=ignored)
    if given.get("display") not in (None, "summarized"):
        ignored.add_field("thinking.display", "thoughts come as they are")
    budget = given.get("budget_tokens")
    if budget is not None and typed(budget, int, "thinking.budget_tokens") < 1:
        raise RequestRefused(f"thinking.budget_tokens is {budget}; use 1 or more", param="thinking.budget_tokens")
    return kind, budget


def _effort(given: Any, ignored: Ignored) -> dict[str, Any]:
    """The template's variable for how much the model should think."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestRefused(f"output_config is {shown(given)}; it takes an object", param="output_config")
    refuse_unserved(given, ("effort", "task_budget", "format"), where="output_config.", ignored=ignored)
    if given.get("task_budget") is not None:
        ignored.add_field("output_config.task_budget", "the model is not told of it")
    effort = given.get("effort")
    return {} if effort is None else {"reasoning_effort": one_of(effort, EFFORTS, "output_config.effort")}


# -- tools -------------------------------------------------------------------------------------------------------------


def _tools(fields: dict[str, Any], ignored: Ignored) -> tuple[list[dict], Choice]:
    tools, choice = fields.get("tools"), fields.get("tool_choice")

    def read(choice: Any, parallel: bool | None) -> tuple[list[dict], Choice]:
        return read_tools(tools, choice, parallel, ignored, lambda tool, where: [_tool(tool, where, ignored)])

    if choice is None:
        return read(None, None)
    if not isinstance(choice, dict):
        raise RequestRefused(f"tool_choice is {shown(choice)}; it takes an object with a type", param="tool_choice")
    kind = one_of(choice.get("type"), ("auto", "any", "tool", "none"), "tool_choice.type")
    named = {"tool": ("name",)}.get(kind, ())
    served = ("type", *named, *(() if kind == "none" else ("disable_parallel_tool_use",)))
    refuse_unserved(choice, served, where="tool_choice.", ignored=ignored)
    if kind in ("any", "tool") and not tools:
        raise RequestRefused(f"tool_choice.type is {kind} and there are no tools", param="tool_choice")
    one_only = choice.get("disable_parallel_tool_use")
    parallel = not typed(False if one_only is None else one_only, bool, "tool_choice.disable_parallel_tool_use")
    if kind == "tool":
        name = typed(choice.get("name"), str, "tool_choice.name")
        return read({"type": "function", "function": {"name": name}}, parallel)
    return read({"any": "required"}.get(kind, kind), parallel)


def _tool(given: Any, where: str, ignored: Ignored) -> dict:
    """In OpenAI's shape, which templates expect."""
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} takes an object with name, description and input_schema", param=where)
    if given.get("type") not in (None, "custom"):
        raise unserved_tool(given["type"], where, "tools that you define (name, description and input_schema)")
    served = ("type", "name", "description", "input_schema", "strict", *TOOL_UNENFORCED)
    refuse_unserved(given, served, {}, TOOL_WITHOUT_EFFECT, where=f"{where}.", ignored=ignored)
    for name, (off, why) in TOOL_UNENFORCED.items():
        if given.get(name) not in (None, *off):
            ignored.add_field(f"{where}.{name}", why)
    name, schema = given.get("name"), given.get("input_schema")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise RequestRefused(
            f"{where}.name is {shown(name)}; it takes up to 128 letters, digits and _ -", param=f"{where}.name"
        )
    if not isinstance(schema, dict):
        raise RequestRefused(
            f"{where}.input_schema is {shown(schema)}; it takes a JSON schema", param=f"{where}.input_schema"
        )
    function: dict[str, Any] = {"name": name}
    if given.get("strict") is not None and typed(given["strict"], bool, f"{where}.strict"):
        function["strict"] = True
    if given.get("description") is not None:
        function["description"] = typed(given["description"], str, f"{where}.description")
    return {"type": "function", "function": function | {"parameters": schema}}
