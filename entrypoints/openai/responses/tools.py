"""Tools of a response: how each kind is offered to the model as a function, and how a call of it comes back.

    in ``tools``                                     offered as         a call is
    {"type": "function", "name": "f"}                f                  function_call: name f
    {"type": "namespace", "name": "n", "tools": […]} n__f, for each     function_call: namespace n, name f
    {"type": "custom", "name": "c"}                  c, with ``input``  custom_tool_call: name c, input

Templates and parsers know functions with a name and nothing else. Tools of any other kind would be run by the server;
see `chat.tools.read_tools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ....scheduler.outcome import RequestRefused
from ...chat.tools import FUNCTION_NAME, Choice, read_tools, unserved_tool
from ...description.json_schema import Properties, Schema, either, enum, flag, list_of, open_object, string, taken
from ...fields.ignored import Ignored
from ...fields.reading import refuse_unserved, shown, typed

TOOL_OFF: dict[str, tuple] = {"async": (False,)}
TOOL_WITHOUT_EFFECT = ("allowed_callers", "defer_loading", "output_schema")
"""Every tool is offered from the start, to be called by the model itself."""

_ONE_TOOL: Properties = {"name": FUNCTION_NAME, "description": {}}
_FUNCTION = taken(
    {
        "type": enum("function"),
        **_ONE_TOOL,
        "parameters": open_object("A JSON schema."),
        "strict": flag("The arguments fulfil the schema.", default=False),
    },
    title="ResponseFunction",
    required=("type", "name"),
    unsupported=TOOL_OFF,
    without_effect=TOOL_WITHOUT_EFFECT,
)
_CUSTOM = taken(
    {"type": enum("custom"), **_ONE_TOOL, "format": open_object("text, or a grammar that the description quotes.")},
    "A tool that takes text.",
    title="ResponseCustomTool",
    required=("type", "name"),
    unsupported=TOOL_OFF,
    without_effect=(*TOOL_WITHOUT_EFFECT, "strict"),
)
_NAMESPACE = taken(
    {"type": enum("namespace"), "name": string(), "description": {}, "tools": list_of(either(_FUNCTION, _CUSTOM))},
    "Tools in a namespace; their calls name it.",
    title="ResponseNamespace",
    required=("type", "name", "tools"),
    without_effect=("strict",),
)
_HOSTED: Schema = {
    "type": "object",
    "properties": {"type": string("A tool that a server runs, such as web_search; it is passed over.")},
    "required": ["type"],
}
TOOL = either(_FUNCTION, _CUSTOM, _NAMESPACE, _HOSTED)

_TAKES = "function, namespace and custom tools"

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The tool that a function was made of."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def call(self, call_id: str) -> dict[str, Any]:
        """Fields of an item that calls it; the type and the arguments are the caller's."""
        place = {} if self.namespace is None else {"namespace": self.namespace}
        return {"call_id": call_id, **place, "name": self.name}


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """tools: as chats take them. origins: name of a function -> its tool. shown: as the response repeats them."""

    tools: list[dict]
    choice: Choice
    origins: Mapping[str, ToolOrigin]
    shown: list[dict]

    def origin(self, name: str) -> ToolOrigin:
        """A model may call what it was not offered."""
        return self.origins.get(name) or ToolOrigin("function", name)


def qualified(namespace: str | None, name: str) -> str:
    """The name that a tool of this namespace is offered under. Some namespaces end in the separator already."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> dict[str, str]:
    """The arguments of the function for a custom tool that is called with this input."""
    return {"input": text}


def custom_input(arguments: str) -> str:
    """The other way round. Arguments that are no such object are the input themselves."""
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = read.get("input") if isinstance(read, dict) else None
    return text if isinstance(text, str) else arguments


def read_response_tools(fields: dict[str, Any], ignored: Ignored) -> ResponseTools:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. Tools are flat: their name stands beside their type.
    ignored: gets what has no effect. Raises RequestRefused."""
    reader = _Reader(ignored)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        choice = _choice(choice, fields.get("tools"))
    try:
        parallel = fields.get("parallel_tool_calls")
        tools, chosen = read_tools(fields.get("tools"), choice, parallel, ignored, reader.read_tool)
    except RequestRefused as refused:
        message, param = (text.replace(".function.", ".") for text in (refused.message, refused.param or ""))
        raise RequestRefused(message, code=refused.code, param=param) from None
    return ResponseTools(tools, chosen, reader.origins, reader.shown)


def _choice(given: dict[str, Any], tools: Any) -> dict[str, Any]:
    """In the shape of chats."""
    kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
    if kind not in ("function", "custom"):
        for number, tool in enumerate(tools if isinstance(tools, list) else []):
            if isinstance(tool, dict) and tool.get("type") == kind:
                raise unserved_tool(kind, f"tools[{number}]", _TAKES)
        raise RequestRefused(
            f"tool_choice of type {shown(kind)} is not supported; it takes none, auto, required or "
            '{"type": "function", "name": "..."}',
            code="unsupported_field",
            param="tool_choice",
        )
    if isinstance(name, str) and isinstance(namespace, str):
        name = qualified(namespace, name)
    return {"type": "function", "function": {"name": name}}


class _Reader:
    """Reads the tools of one request."""

    def __init__(self, ignored: Ignored) -> None:
        self.origins: dict[str, ToolOrigin] = {}
        self.shown: list[dict] = []
        self._ignored = ignored

    def read_tool(self, tool: Any, where: str) -> list[dict]:
        """Functions as chats take them. Raises RequestRefused."""
        if not isinstance(tool, dict):
            raise RequestRefused(f"{where} is {shown(tool)}; it takes an object with a type", param=where)
        kind = tool.get("type")
        if kind == "namespace":
            functions, described = self._namespace(tool, where)
        elif kind in ("function", "custom"):
            function, each = self._single(tool, where, None)
            functions, described = [function], each
        else:
            raise unserved_tool(kind, where, _TAKES)
        self.shown.append(described)
        return functions

    def _namespace(self, tool: dict[str, Any], where: str) -> tuple[list[dict], dict]:
        refuse_unserved(
            tool,
            ("type", "name", "description", "tools"),
            without_effect=("strict",),
            where=f"{where}.",
            ignored=self._ignored,
        )
        name, tools = typed(tool.get("name"), str, f"{where}.name"), tool.get("tools")
        if not isinstance(tools, list):
            raise RequestRefused(f"{where}.tools is {shown(tools)}; it takes a list", param=f"{where}.tools")
        functions: list[dict] = []
        listed: list[dict] = []
        for number, each in enumerate(tools):
            place = f"{where}.tools[{number}]"
            if not isinstance(each, dict):
                raise RequestRefused(f"{place} is {shown(each)}; it takes an object with a type", param=place)
            if each.get("type") not in ("function", "custom"):
                self._ignored.add_field(place, f"this server cannot run {shown(each.get('type'))}")
                continue
            function, described = self._single(each, place, name)
            functions.append(function)
            listed.append(described)
        described = {"type": "namespace", "name": name, "description": tool.get("description"), "tools": listed}
        return functions, described

    def _single(self, tool: dict[str, Any], where: str, namespace: str | None) -> tuple[dict, dict]:
        """A function, or a custom tool: (as chats take it, as the response repeats it)."""
        kind = tool["type"]
        served = ("type", "name", "description", "parameters" if kind == "function" else "format")
        refuse_unserved(
            tool, (*served, "strict"), TOOL_OFF, TOOL_WITHOUT_EFFECT, where=f"{where}.", ignored=self._ignored
        )
        strict = tool.get("strict") is not None and typed(tool["strict"], bool, f"{where}.strict")
        if tool.get("defer_loading"):
            self._ignored.add_field(f"{where}.defer_loading", "every tool is offered from the start")
        name = tool.get("name")
        offered = qualified(namespace, name) if isinstance(name, str) else name
        if isinstance(offered, str):
            self.origins[offered] = ToolOrigin(kind, str(name), namespace)
        function = {"name": offered, "description": tool.get("description"), "parameters": tool.get("parameters")}
        if strict:
            function["strict"] = True
        shown_tool = {name: tool[name] for name in served if tool.get(name) is not None}
        if kind == "custom":
            function |= {"description": self._about(tool, where), "parameters": _INPUT}
        else:
            shown_tool["strict"] = strict
        return {"type": "function", "function": function}, shown_tool

    def _about(self, tool: dict[str, Any], where: str) -> Any:
        """The description of a custom tool. It quotes the grammar of the input, which is not enforced."""
        about, form = tool.get("description"), tool.get("format")
        if form is None or form == {"type": "text"}:
            return about
        where = f"{where}.format"
        if not isinstance(form, dict) or form.get("type") != "grammar":
            raise RequestRefused(f"{where} is {shown(form)}; it takes text or a grammar", param=where)
        refuse_unserved(form, ("type", "syntax", "definition"), where=f"{where}.", ignored=self._ignored)
        syntax, definition = (typed(form.get(name), str, f"{where}.{name}") for name in ("syntax", "definition"))
        self._ignored.add_field(where, "the description quotes the grammar, which is not enforced")
        if not isinstance(about, str | None):
            return about
        return f"{about or ''}\n\nThe input has the form of this {syntax} grammar:\n{definition}".strip()
