"""Reads the ``input`` of a response: items -> the messages that a template takes.

What the assistant did stands in several items, which are one message:

    reasoning, message, function_call, function_call     {"role": "assistant", "reasoning_content", "content",
                                                          "tool_calls": [..]}
    function_call_output                                 {"role": "tool", "tool_call_id", "content"}

A custom tool is a function with one argument, ``input``; a function of a namespace has its name in front (`tools`).
"""

from __future__ import annotations

from typing import Any

from ....scheduler.outcome import RequestRefused
from ...chat.messages import Arguments, Message, join_parts, read_arguments
from ...description.json_schema import Schema, enum
from ...fields.ignored import Ignored
from ...fields.reading import one_of, shown, typed
from .tools import custom_arguments, qualified

ROLES = ("user", "system", "developer", "assistant")

KINDS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip
"""Types of items. Keys that are not read are passed over: most say how an item came to be (id, status, phase)."""

HOSTED_CALLS = (
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools",
    "mcp_approval_request",
)  # fmt: skip
"""Items about calls that another server ran. They are left out of the prompt."""

ITEM: Schema = {
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


def read_input(given: Any, rid: str, ignored: Ignored | None = None) -> tuple[list[Message], list[dict]]:
    """(messages, the items as they are listed later, each with an id). ``rid``: of the response. ignored: gets what is
    passed over. Raises RequestRefused."""
    ignored = ignored or Ignored()
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestRefused("input takes a string, or a list with at least one item", param="input")
    messages, listed = _Messages(), []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if isinstance(item, dict) and item.get("type") in HOSTED_CALLS:
            ignored.add_field(where, f"the model is not shown a {item['type']}")
            continue
        kind = _kind(item, where)
        listed.append({"id": f"{_PREFIXES[kind]}_{rid}_in{number}", **_READ[kind](messages, item, where)})
        if isinstance(item.get("id"), str):
            listed[-1]["id"] = item["id"]
    if not messages.read:
        raise RequestRefused("input has no item that the model can read; add a message", param="input")
    return messages.read, listed


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates take it."""
    return _call_of(call_id, name, read_arguments(arguments))


def custom_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    """A call of a custom tool, likewise."""
    return _call_of(call_id, name, custom_arguments(text))


def _call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def _kind(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise RequestRefused(f"{where} is {shown(item)}; it takes an object with a type", param=where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if isinstance(kind, str) and kind in KINDS:
        return kind
    if kind == "item_reference":
        raise RequestRefused(
            f"{where} is an item_reference, which is not supported; send the item itself, or continue its response "
            "with previous_response_id",
            code="unsupported_item",
            param=where,
        )
    raise RequestRefused(
        f"{where} is of type {shown(kind)}, which is not supported; this server takes {', '.join(KINDS)}",
        code="unsupported_item",
        param=where,
    )


class _Messages:
    """Puts messages together, item by item."""

    def __init__(self) -> None:
        self.read: list[Message] = []
        self.arguments = Arguments()
        self._answer: Message | None = None
        """The assistant's message that is still growing."""

    def add_message(self, message: Message) -> None:
        self._answer = None
        self.read.append(message)

    def add_thought(self, text: str) -> None:
        answer = self._growing(begin=self._has_spoken)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def add_text(self, text: str) -> None:
        self._growing(begin=self._has_spoken)["content"] = text

    def add_call(self, call: dict[str, Any]) -> None:
        self._growing(begin=False).setdefault("tool_calls", []).append(call)

    @property
    def _has_spoken(self) -> bool:
        return self._answer is not None and bool(self._answer["content"] or self._answer.get("tool_calls"))

    def _growing(self, *, begin: bool) -> Message:
        """The assistant's message; ``begin``: a new one."""
        if self._answer is None or begin:
            self._answer = {"role": "assistant", "content": ""}
            self.read.append(self._answer)
        return self._answer


# -- each kind: adds to the messages, and returns the item as it is listed, without its id ---------------------------


def _message(messages: _Messages, item: dict, where: str) -> dict:
    role = one_of(item.get("role"), ROLES, f"{where}.role")
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        messages.add_text(text)
        parts = [{"type": "output_text", "text": text, "annotations": []}]
    else:
        messages.add_message({"role": role, "content": text})
        parts = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": role, "status": "completed", "content": parts}


def _reasoning(messages: _Messages, item: dict, where: str) -> dict:
    """The thoughts are its content. A summary, which others may have written, stands in where there is none."""
    content = item.get("content") or item.get("summary") or []
    texts: list[str] = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestRefused(
                f'{where}.content[{number}] takes {{"type": "reasoning_text", "text": "..."}}', param=f"{where}.content"
            )
        texts.append(text)
    if texts:
        messages.add_thought("\n".join(texts))
    listed = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [], "content": listed, "status": "completed"}


def _function_call(messages: _Messages, item: dict, where: str) -> dict:
    place = _namespace(item, where)
    read = _strings(item, ("call_id", "name", "arguments"), where)
    arguments = messages.arguments.read_arguments(read["arguments"], f"{where}.arguments")
    messages.add_call(_call_of(read["call_id"], qualified(place.get("namespace"), read["name"]), arguments))
    return {"type": "function_call", **read, **place, "status": "completed"}


def _custom_tool_call(messages: _Messages, item: dict, where: str) -> dict:
    place = _namespace(item, where)
    read = _strings(item, ("call_id", "name", "input"), where)
    name = qualified(place.get("namespace"), read["name"])
    messages.add_call(custom_call(read["call_id"], name, read["input"]))
    return {"type": "custom_tool_call", **read, **place, "status": "completed"}


def _strings(item: dict, names: tuple[str, ...], where: str) -> dict[str, str]:
    return {name: typed(item.get(name), str, f"{where}.{name}") for name in names}


def _namespace(item: dict, where: str) -> dict[str, str]:
    given = item.get("namespace")
    return {} if given is None else {"namespace": typed(given, str, f"{where}.namespace")}


def _output(messages: _Messages, item: dict, where: str) -> dict:
    """The output of a function, or of a custom tool."""
    call_id = typed(item.get("call_id"), str, f"{where}.call_id")
    output = _text(item.get("output"), f"{where}.output")
    messages.add_message({"role": "tool", "tool_call_id": call_id, "content": output})
    return {"type": item["type"], "call_id": call_id, "output": output, "status": "completed"}


_READ = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _output,
}


def _text(given: Any, where: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {shown(given)}; it takes a string or a list of parts", param=where)
    return join_parts(given, where)
