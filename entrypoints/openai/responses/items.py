"""Reads the ``input`` of a response: items -> the messages that a template takes.

What the assistant did stands in several items, which are one message:

    reasoning, message, function_call, function_call     {"role": "assistant", "reasoning_content", "content",
                                                          "tool_calls": [..]}
    function_call_output                                 {"role": "tool", "tool_call_id", "content"}
"""

from __future__ import annotations

from typing import Any

from ....scheduler.outcome import RequestRefused
from ...chat.messages import Arguments, Message, join_parts, read_arguments
from ...fields.reading import one_of, refuse_unserved, shown, typed

ROLES = ("user", "system", "developer", "assistant")

_SERVED: dict[str, tuple] = {
    # Kind -> its fields. What only says how an item came to be (id, status, phase) has no effect.
    "message": ("type", "role", "content"),
    "reasoning": ("type", "summary", "content"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
}
_OFF: dict[str, dict[str, tuple]] = {
    "message": {},
    "reasoning": {},
    "function_call": {"namespace": (), "caller": (), "async": (False,)},
    "function_call_output": {"namespace": (), "caller": ()},
}
_WITHOUT_EFFECT: dict[str, tuple] = {
    "message": ("id", "status", "phase"),
    "reasoning": ("id", "status", "encrypted_content"),
    "function_call": ("id", "status"),
    "function_call_output": ("id", "status", "name"),
}


def read_input(given: Any, rid: str) -> tuple[list[Message], list[dict]]:
    """(messages, the items as they are listed later, each with an id). ``rid``: of the response. Raises
    RequestRefused."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestRefused("input takes a string, or a list with at least one item", param="input")
    messages, listed = _Messages(), []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        kind = _kind(item, where)
        refuse_unserved(item, _SERVED[kind], _OFF[kind], _WITHOUT_EFFECT[kind], where=f"{where}.")
        listed.append({"id": f"{_PREFIXES[kind]}_{rid}_in{number}", **_READ[kind](messages, item, where)})
        if isinstance(item.get("id"), str):
            listed[-1]["id"] = item["id"]
    return messages.read, listed


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates take it."""
    return _call_of(call_id, name, read_arguments(arguments))


def _call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def _kind(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise RequestRefused(f"{where} is {shown(item)}; it takes an object with a type", param=where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if isinstance(kind, str) and kind in _SERVED:
        return kind
    if kind == "item_reference":
        raise RequestRefused(
            f"{where} is an item_reference, which is not supported; send the item itself, or go on from its response "
            "with previous_response_id",
            code="unsupported_item",
            param=where,
        )
    raise RequestRefused(
        f"{where} is of type {shown(kind)}, which is not supported; this server takes {', '.join(_SERVED)}",
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

    def add(self, message: Message) -> None:
        self._answer = None
        self.read.append(message)

    def think(self, text: str) -> None:
        answer = self._growing(begin=self._has_spoken)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def say(self, text: str) -> None:
        self._growing(begin=self._has_spoken)["content"] = text

    def call(self, call: dict[str, Any]) -> None:
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
        messages.say(text)
        parts = [{"type": "output_text", "text": text, "annotations": []}]
    else:
        messages.add({"role": role, "content": text})
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
        messages.think("\n".join(texts))
    listed = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "summary": [], "content": listed, "status": "completed"}


def _function_call(messages: _Messages, item: dict, where: str) -> dict:
    read = {name: typed(item.get(name), str, f"{where}.{name}") for name in ("call_id", "name", "arguments")}
    arguments = messages.arguments.read(read["arguments"], f"{where}.arguments")
    messages.call(_call_of(read["call_id"], read["name"], arguments))
    return {"type": "function_call", **read, "status": "completed"}


def _function_call_output(messages: _Messages, item: dict, where: str) -> dict:
    call_id = typed(item.get("call_id"), str, f"{where}.call_id")
    output = _text(item.get("output"), f"{where}.output")
    messages.add({"role": "tool", "tool_call_id": call_id, "content": output})
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}


_READ = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}


def _text(given: Any, where: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {shown(given)}; it takes a string or a list of parts", param=where)
    return join_parts(given, where)
