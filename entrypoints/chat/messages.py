"""A conversation as its template takes it: plain dicts, in the shape that Hugging Face documents for templates.

    {"role": "user", "content": "…"}
    {"role": "assistant", "content": "…", "reasoning_content": "…", "tool_calls": [{"id", "type", "function":
        {"name", "arguments": {…}}}]}
    {"role": "tool", "tool_call_id": "…", "content": "…"}

Each API converts its own shape into this one. Text only: no model here takes pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import Schema, either, enum, list_of, open_object, string
from ..fields.reading import shown

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template. tools: in OpenAI's shape. variables: of the template, such as enable_thinking.

    goes_on: the model continues the last message, which is the assistant's; otherwise it answers.
    forced: the beginning of the answer, written for the model.
    """

    messages: list[Message]
    tools: list[dict] | None = None
    documents: list[dict] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    add_generation_prompt: bool = True
    forced: str = ""

    def first(self, count: int) -> Conversation:
        """Its first messages, with nothing asked of the model."""
        return Conversation(
            messages=self.messages[:count],
            tools=self.tools,
            documents=self.documents,
            variables=self.variables,
            add_generation_prompt=False,
        )


def has_answers(conversation: Conversation) -> bool:
    """False if it has just begun: no message is the assistant's."""
    return any(message["role"] == "assistant" for message in conversation.messages)


def split_thoughts(parts: list[Any], where: str) -> tuple[list[str], list[Any]]:
    """(thoughts, the other parts) of an assistant's content, where clients put thoughts among its parts."""
    thoughts: list[str] = []
    others: list[Any] = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in THOUGHT_PARTS:
            others.append(part)
            continue
        text = part.get("thinking", part.get("text"))
        if text is not None and not isinstance(text, str):
            raise RequestRefused(f"{where}[{number}].thinking takes a string", param=f"{where}[{number}]")
        if text:
            thoughts.append(text)
    return thoughts, others


THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts. Only the server that redacted a thought can read it."""


def join_parts(parts: list[Any], where: str) -> str:
    """The text of a message's content parts, which all APIs write as ``{"type": "text", "text": …}``; other keys of a
    part are passed over. Raises RequestRefused; pictures, sound and files by name."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        name = f"{where}[{number}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestRefused(f'{name} is {shown(part)}; it takes {{"type": "text", "text": "..."}}', param=name)
        if kind in TEXT_PARTS:
            text = part.get(TEXT_PARTS[kind])
            if not isinstance(text, str):
                raise RequestRefused(f"{name}.{TEXT_PARTS[kind]} takes a string", param=name)
            texts.append(text)
        elif kind in OTHER_PARTS:
            raise RequestRefused(
                f"{name} is of type {kind}; this server takes text only", code="unsupported_content", param=name
            )
        else:
            raise RequestRefused(f'{name} takes {{"type": "text", "text": "..."}}', param=name)
    return "\n".join(texts)


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part -> the field that has its text."""

_PART: Schema = {
    "type": "object",
    "properties": {"type": enum(*TEXT_PARTS), "text": string(), "refusal": string()},
    "required": ["type"],
}

TEXT = either(string(), list_of(either(_PART, string())), about="A text, or parts of it; this server takes text only.")

DOCUMENTS = list_of(open_object(), "For templates that take documents.")

OTHER_PARTS = frozenset(
    {"image", "image_url", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "file",
     "input_file", "document"}
)  # fmt: skip


def read_arguments(text: Any) -> Any:
    """Decode the JSON text of an earlier call's arguments to the object that templates expect. Unfinished JSON, and
    JSON that is nested too deeply, stays a text."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text


class Arguments:
    """Reads the arguments of one request. The check of the body counted each as one text, so this counts the values
    inside, before the decoder, which blocks all other requests, creates many millions of them."""

    def __init__(self) -> None:
        self._num_values = 0

    def read_arguments(self, text: Any, where: str) -> Any:
        """Raises RequestRefused."""
        if isinstance(text, str):
            self._num_values += sum(map(text.count, "[{,"))
            if self._num_values > MAX_ARGUMENT_VALUES:
                raise RequestRefused(
                    f"the arguments of the calls up to {where} hold more than {MAX_ARGUMENT_VALUES} values, or commas; "
                    "send fewer",
                    param=where,
                )
        return read_arguments(text)


MAX_ARGUMENT_VALUES = 500_000
