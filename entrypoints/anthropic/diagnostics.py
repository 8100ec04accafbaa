"""``diagnostics`` of a request and its answer: why a chat does not go on from an earlier message, in Anthropic's words.

The request names the message (``previous_message_id``); the answer says what has changed since that message's request.
It is about the prompt only: for tokens that were evicted there is ``baton.cache_report``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...scheduler.outcome import RequestRefused
from ..chat.chats import Comparison
from ..description.json_schema import Properties, answered, enum, nullable, string, taken, whole
from ..fields.ignored import Ignored
from ..fields.reading import refuse_unserved, shown, typed

MESSAGE_PREFIX = "msg_"
"""A message's id is this, and the rid of its request."""

_TYPES = {
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
    "history": "messages_changed",
    "answer": "messages_changed",
    "thoughts_unsent": "messages_changed",
    "regenerated": "messages_changed",
    "rewound": "messages_changed",
}
"""By the kind of a `Divergence`. Others are ``unavailable``: the messages are the same, and still the prompt is not."""

DIAGNOSTICS = taken(
    {"previous_message_id": string("The id of the message that this chat continues; null for the first.")},
    "Asks why the prompt does not go on from that of an earlier message.",
)

DIAGNOSED: Properties = {
    "diagnostics": nullable(
        answered(
            {
                "cache_miss_reason": answered(
                    {"type": enum(*sorted(set(_TYPES.values())), "previous_message_not_found", "unavailable")},
                    optional={"cache_missed_input_tokens": whole("Of the earlier request, behind the change.", 0)},
                )
            }
        )
    )
}


@dataclass(slots=True, frozen=True)
class Diagnostics:
    """What the request asks for. rid: of the earlier message's request; None for a first message."""

    rid: str | None


def read_diagnostics(given: Any, ignored: Ignored) -> Diagnostics | None:
    """None where the request does not ask. Raises RequestRefused."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestRefused(f"diagnostics is {shown(given)}; it takes an object", param="diagnostics")
    name = "diagnostics.previous_message_id"
    refuse_unserved(given, ("previous_message_id",), where="diagnostics.", ignored=ignored)
    previous = given.get("previous_message_id")
    return Diagnostics(None if previous is None else typed(previous, str, name).removeprefix(MESSAGE_PREFIX))


def diagnose(asked: Diagnostics, compared: Comparison | None) -> dict[str, Any] | None:
    """``diagnostics`` of the answer; None if the prompt continues the earlier message. compared: the chat with that
    message; None if it is not on record."""
    if asked.rid is None:
        return None
    if compared is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if compared.continues:
        return None
    divergence = compared.divergence
    kind = _TYPES.get(divergence.kind) if divergence is not None else None
    if divergence is None or kind is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": divergence.lost_tokens}}
