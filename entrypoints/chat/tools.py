"""Tools that a chat offers, and which of them the model must call. In OpenAI's shape, which templates expect."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import Schema, either, enum, flag, list_of, nullable, string
from ..fields.ignored import Ignored
from ..fields.reading import shown, typed
from ..tool_parsers.pieces import ToolSpec

MAX_TOOL_NAME = 128
"""Characters."""

FUNCTION_NAME = string("", least=1, most=MAX_TOOL_NAME)

_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": FUNCTION_NAME,
        "description": nullable(string()),
        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
        "strict": nullable(flag("The arguments fulfil the schema.", default=False)),
    },
    "required": ["name"],
}

TOOLS = list_of(
    {
        "title": "Tool",
        "type": "object",
        "properties": {"type": enum("function"), "function": _FUNCTION},
        "required": ["function"],
    },
    "Functions that the model may call, and the client runs.",
)

TOOL_CHOICE = either(
    enum("none", "auto", "required"),
    {
        "type": "object",
        "properties": {
            "type": enum("function"),
            "function": {"type": "object", "properties": {"name": string()}, "required": ["name"]},
        },
        "required": ["function"],
    },
    about="Whether the model may call a function, must call one, or must call a certain one.",
)

_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_TOOL_NAME}}}")


@dataclass(frozen=True, slots=True)
class Choice:
    """auto: the model decides. any: it must call one. named: it must call ``name``. none: it is not told of them."""

    kind: Literal["none", "auto", "any", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    """False: only its first call is answered with."""


def read_tools(
    tools: Any, choice: Any, parallel: Any, ignored: Ignored, read: Callable[[Any, str], list[dict]] | None = None
) -> tuple[list[dict], Choice]:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request; None where they are missing.

    read: a tool of the API, and its name in errors -> functions in OpenAI's shape; None where it has that shape.
    ignored: gets the tools that this server cannot run, as long as the request can do without them. Raises
    RequestRefused.
    """
    if tools is not None and not isinstance(tools, list):
        raise RequestRefused(f"tools is {shown(tools)}; it takes a list", param="tools")
    found: list[dict] = []
    unserved: dict[str, UnservedTool] = {}
    """By the tool's name, or its type where it has none."""
    for number, tool in enumerate(tools or []):
        where = f"tools[{number}]"
        try:
            found += [_tool(function, where, ignored) for function in ([tool] if read is None else read(tool, where))]
        except UnservedTool as refused:
            name = tool.get("name")
            unserved[name if isinstance(name, str) else tool["type"]] = refused
            ignored.add_field(where, refused.reason)
    if unserved and not found and choice != "none":
        raise next(iter(unserved.values()))
    if isinstance(choice, dict) and (refused := unserved.get(_name_of(choice) or "")) is not None:
        raise refused
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise RequestRefused(f"tools holds {twice!r} twice; each needs a name of its own", param="tools")
    parallel = typed(True if parallel is None else parallel, bool, "parallel_tool_calls")
    return found, _choice(choice, names, parallel)


def unserved_tool(kind: Any, where: str, takes: str) -> RequestRefused:
    """kind: the tool's ``type``. takes: the tools that there are, for the message."""
    if not isinstance(kind, str):
        return RequestRefused(f"{where}.type is {shown(kind)}; it takes a string", param=f"{where}.type")
    refused = UnservedTool(
        f"{where} is of type {shown(kind)}, which this server cannot run; it takes {takes}, which the client runs",
        code="unsupported_tool",
        param=where,
    )
    refused.reason = f"this server cannot run {kind[:MAX_TOOL_NAME]}"
    return refused


class UnservedTool(RequestRefused):
    """A tool that the server would have to run. reason: why it is passed over, in a few words."""

    reason = ""


def specs_of(tools: list[dict]) -> list[ToolSpec]:
    functions = [tool["function"] for tool in tools]
    return [ToolSpec(each["name"], each.get("parameters") or {}, each.get("strict") is True) for each in functions]


def _tool(tool: Any, where: str, ignored: Ignored) -> dict:
    if isinstance(tool, dict) and tool.get("type", "function") != "function":
        raise unserved_tool(tool["type"], where, "functions")
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise RequestRefused(
            f'{where} takes {{"type": "function", "function": {{"name", "description", "parameters"}}}}', param=where
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestRefused(
            f"{where}.function.name is {shown(name)}; it takes up to 128 letters, digits and _ - . : /", param=where
        )
    if function.get("description") is not None:
        typed(function["description"], str, f"{where}.function.description")
    if function.get("strict") is not None:
        typed(function["strict"], bool, f"{where}.function.strict")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestRefused(f"{where}.function.parameters takes a JSON schema", param=where)
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(given: Any, names: list[str], parallel: bool) -> Choice:
    if given is None:
        return Choice("auto" if names else "none", parallel=parallel)
    if isinstance(given, dict):
        name = _name_of(given)
        if given.get("type", "function") != "function" or name is None:
            raise RequestRefused(
                'tool_choice takes none, auto, required or {"type": "function", "function": {"name"}}',
                param="tool_choice",
            )
        if name not in names:
            raise RequestRefused(f"tool_choice names {shown(name)}, which tools does not hold", param="tool_choice")
        return Choice("named", name, parallel)
    if given not in ("none", "auto", "required"):
        raise RequestRefused(f"tool_choice is {shown(given)}; it takes none, auto or required", param="tool_choice")
    if given == "required" and not names:
        raise RequestRefused("tool_choice is required and there are no tools", param="tool_choice")
    if not names:
        return Choice("none", parallel=parallel)
    if given == "required":  # where there is one alone, its name need not be left to the model
        return Choice("any", parallel=parallel) if len(names) > 1 else Choice("named", names[0], parallel)
    return Choice(given, parallel=parallel)


def _name_of(choice: dict[str, Any]) -> str | None:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
