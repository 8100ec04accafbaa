"""Tools and texts of chats in OpenAI's shape, as ``/openapi.json`` describes them."""

from __future__ import annotations

from ..description.json_schema import Schema, either, enum, list_of, nullable, open_object, string
from .messages import TEXT_PARTS
from .tools import MAX_TOOL_NAME

_PART: Schema = {
    "type": "object",
    "properties": {"type": enum(*TEXT_PARTS), "text": string(), "refusal": string()},
    "required": ["type"],
}

TEXT = either(string(), list_of(either(_PART, string())), about="A text, or parts of it; this server takes text only.")

FUNCTION_NAME = string("", least=1, most=MAX_TOOL_NAME)

_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": FUNCTION_NAME,
        "description": nullable(string()),
        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
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
    about="Whether the model may call a function, must, or must call a certain one.",
)

DOCUMENTS = list_of(open_object(), "For templates that take documents.")
