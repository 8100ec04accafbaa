"""Chooses the template of a chat: the model's own, its `tool_use`, or a bundled one where a chat brings tools and the
model's own has no place for them.

As in transformers, of several named templates `tool_use` is for chats that bring tools and `default` for all others.
A trial decides if a template has a place for tools: it is rendered with a tool.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ...runtime.text.tokenizer import Tokenizer

_MARK = "BatonAsks7Q"
_TOOL_NAME = "baton_probe_tool"
"""Only letters, digits and _: templates escape other characters."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}

_USER = {"role": "user", "content": _MARK}
_CHATS: tuple[list[dict], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
)
"""Some templates write tools into the system's message only, and some refuse a system."""

_FOLDER = Path(__file__).parent / "bundled_templates"


@dataclass(frozen=True, slots=True)
class _Bundled:
    """file: of the template. begin, end: marks around a message that the model must know as tokens. turn: how its own
    template writes a user's message."""

    file: str
    begin: str
    end: str
    turn: str


_BUNDLED = (
    _Bundled("chatml_tools.jinja", "<|im_start|>", "<|im_end|>", f"<|im_start|>user\n{_MARK}<|im_end|>"),
    _Bundled(
        "llama3_tools.jinja",
        "<|start_header_id|>",
        "<|eot_id|>",
        f"<|start_header_id|>user<|end_header_id|>\n\n{_MARK}<|eot_id|>",
    ),
)


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """plain: for chats without tools; None if there is no template. with_tools: for chats with tools; None if no
    template has a place for them. bundled: the file of with_tools if it is a bundled one, else empty."""

    plain: ChatTemplate | None
    with_tools: ChatTemplate | None
    bundled: str = ""


def choose_templates(tokenizer: Tokenizer, given: ChatTemplate | None = None) -> ChatTemplates:
    """The model's templates; ``given``: the operator's, in place of them."""
    if given is None and (tool_use := tokenizer.chat_templates.get("tool_use")) is not None:
        return ChatTemplates(tokenizer.chat_template, tool_use)
    plain = given or tokenizer.chat_template
    if plain is None or has_place_for_tools(plain):
        return ChatTemplates(plain, plain)
    if (bundled := _that_fits(plain, tokenizer)) is None:
        return ChatTemplates(plain, None)
    source = (_FOLDER / bundled.file).read_text(encoding="utf-8")
    begin = {"text_begin": _rendered(plain, _CHATS[1]).partition(bundled.begin)[0]}
    return ChatTemplates(plain, ChatTemplate(source, tokenizer.special_tokens | begin), bundled.file)


def has_place_for_tools(template: ChatTemplate) -> bool:
    """Does the model learn of a tool that is given to its template?"""
    return any(_TOOL_NAME in _rendered(template, chat, [_TOOL]) for chat in _CHATS)


def _that_fits(template: ChatTemplate, tokenizer: Tokenizer) -> _Bundled | None:
    """The bundled template that writes messages as this one does."""
    text = _rendered(template, _CHATS[0])
    for bundled in _BUNDLED:
        known = all(tokenizer.token_to_id(mark) is not None for mark in (bundled.begin, bundled.end))
        if known and bundled.turn in text:
            return bundled
    return None


def _rendered(template: ChatTemplate, messages: list[dict], tools: list[dict] | None = None) -> str:
    """Empty where the template refuses them."""
    try:
        return template.render(messages, tools=tools)
    except ChatTemplateError:
        return ""
