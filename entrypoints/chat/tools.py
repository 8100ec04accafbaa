"""Tools that a chat offers, and which of them the model must call. In OpenAI's shape, which templates expect."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from ...scheduler.outcome import RequestRefused
from ..fields.reading import shown, typed
from ..tool_parsers.pieces import ToolSpec

MAX_TOOL_NAME = 128
"""Characters."""

_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_TOOL_NAME}}}")


@dataclass(frozen=True, slots=True)
class Choice:
    """auto: the model decides. any: it must call one. named: it must call ``name``. none: it is not told of them."""

    kind: Literal["none", "auto", "any", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    """False: only its first call is answered with."""


def read_tools(tools: Any, choice: Any, parallel: Any) -> tuple[list[dict], Choice]:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request; None where they are missing.
    Raises RequestRefused."""
    if tools is not None and not isinstance(tools, list):
        raise RequestRefused(f"tools is {shown(tools)}; it takes a list", param="tools")
    read = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or [])]
    names = [tool["function"]["name"] for tool in read]
    if len(set(names)) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise RequestRefused(f"tools holds {twice!r} twice; each needs a name of its own", param="tools")
    parallel = typed(True if parallel is None else parallel, bool, "parallel_tool_calls")
    return read, _choice(choice, names, parallel)


def specs_of(tools: list[dict]) -> list[ToolSpec]:
    return [ToolSpec(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in tools]


def _tool(tool: Any, where: str) -> dict:
    if isinstance(tool, dict) and tool.get("type", "function") != "function":
        raise RequestRefused(
            f"{where} is of type {shown(tool['type'])}; this server knows functions only, which the client runs",
            code="unsupported_tool",
            param=where,
        )
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
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestRefused(f"{where}.function.parameters takes a JSON schema", param=where)
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(given: Any, names: list[str], parallel: bool) -> Choice:
    if given is None:
        return Choice("auto" if names else "none", parallel=parallel)
    if isinstance(given, dict):
        function = given.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if given.get("type", "function") != "function" or not isinstance(name, str):
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
