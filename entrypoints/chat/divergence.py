"""Where a chat parts from the last turn of its conversation, and whose doing it is. Pure functions.

    last turn   [system] … cch=a1; You are an agent. [user] List it. [assistant] a.txt
    new chat    [system] … cch=b7; You are an agent. [user] List it. [assistant] a.txt [user] And now?
                              ├──┤ 2 characters each; behind them the texts agree again

An agent program may change what it has sent before: a counter in its system prompt, a tool's output that it cuts, a
message that its user edits. A chat template may write earlier messages differently once others follow. Everything
behind such a place is computed again, so the place is worth knowing.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .message_digests import ChatDigests, said_digest
from .messages import Message

EXCERPT_CHARS = 40
_BEFORE_CHARS = 8
"""Characters of an excerpt that stand before the place."""

_ANCHOR_CHARS, _ANCHOR_TOKENS = 64, 16
"""Two texts agree again where so many characters, or tokens, in a row are equal."""

_ANCHOR_STEPS = (0, *(4**power for power in range(9)))
"""How far behind the place anchors are looked for: up to 65,536 characters or tokens."""

_CONTENT_CHARS = 200

_SURROGATES = re.compile("[\ud800-\udfff]")

Kind = Literal[
    "system",
    "tools",
    "settings",
    "messages",
    "history",
    "answer",
    "thoughts_unsent",
    "template",
    "regenerated",
    "rewound",
]
"""Each with its cause, in the client but for `template`:

system, tools       the system prompt, or the tools, changed
settings            variables of the template changed, such as enable_thinking
messages            an earlier message was edited, replaced or removed
history             nothing is left of the conversation but its system prompt, as after a compaction
answer              the last answer came back with other words or calls than the model's
thoughts_unsent     the last answer came back without its thoughts
template            the chat template writes the same messages differently now that others follow: it drops thoughts
regenerated         the same messages, without the last answer
rewound             the first messages only
"""


class Change(NamedTuple):
    """The first difference of two texts: ``removed`` characters of the old one from ``start`` on stand against
    ``inserted`` ones of the new. agrees: the characters that are equal behind them; 0 if the texts do not agree
    again, so that both spans reach to the end."""

    start: int
    removed: int
    inserted: int
    agrees: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """message: index of the message that has the place, and its role; None where the place is not in a message.
    char: of the place, in that message's content, or in the prompt where there is no message. token: of the place, in
    the prompt; message_token: in that message's content, tokenised by itself. was, now: `EXCERPT_CHARS` of both texts
    around the place. lost_tokens: of the last turn, behind the place. since: rid of the turn compared with."""

    kind: Kind
    message: int | None
    role: str | None
    char: int
    token: int
    was: str
    now: str
    removed_chars: int
    inserted_chars: int
    agrees_chars: int
    removed_tokens: int
    inserted_tokens: int
    lost_tokens: int
    since: str
    message_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One side of a comparison. text, ids: of the prompt and, for a recorded turn, of the answer; ids is int32 [n].
    prompt_chars: where the answer begins."""

    digests: ChatDigests
    text: str
    prompt_chars: int
    ids: np.ndarray


def find_divergence(old: Rendered, new: Rendered, messages: list[Message], since: str) -> Divergence | None:
    """None if the new text begins with the old one. messages: of the new chat. since: rid of the old turn. Linear in
    the texts."""
    change = first_change(old.text, new.text, _ANCHOR_CHARS)
    if change is None:
        return None
    tokens = first_change(_as_text(old.ids), _as_text(new.ids), _ANCHOR_TOKENS)
    tokens = tokens or Change(len(old.ids), 0, len(new.ids) - len(old.ids), 0)
    starts = content_starts(messages, new.text)
    kind, at = _cause(old, new, messages, starts, change)
    return Divergence(
        kind=kind,
        message=at,
        role=messages[at]["role"] if at is not None else None,
        char=change.start if at is None else max(0, change.start - starts[at] + _num_leading_spaces(messages[at])),
        token=tokens.start,
        was=excerpt(old.text, change.start),
        now=excerpt(new.text, change.start),
        removed_chars=change.removed,
        inserted_chars=change.inserted,
        agrees_chars=change.agrees,
        removed_tokens=tokens.removed,
        inserted_tokens=tokens.inserted,
        lost_tokens=len(old.ids) - tokens.start,
        since=since,
    )


def first_change(old: str, new: str, anchor: int) -> Change | None:
    """None if ``new`` begins with ``old``. anchor: the texts agree again where so many characters are equal, or all up
    to the end of one."""
    start = common_prefix(old, new)
    if start == len(old):
        return None
    nearest: tuple[int, int] | None = None
    for step in _ANCHOR_STEPS:
        nearest = _meeting(old, new, start, step, anchor)
        if nearest is None and (crossed := _meeting(new, old, start, step, anchor)) is not None:
            nearest = crossed[1], crossed[0]
        if nearest is not None:
            break
    if nearest is None:
        shared = common_suffix(old[start:], new[start:])
        return Change(start, len(old) - start - shared, len(new) - start - shared, shared)
    back = common_suffix(old[start : nearest[0]], new[start : nearest[1]])
    removed, inserted = nearest[0] - start - back, nearest[1] - start - back
    return Change(start, removed, inserted, common_prefix(old[start + removed :], new[start + inserted :]))


def _meeting(one: str, other: str, start: int, step: int, anchor: int) -> tuple[int, int] | None:
    """Where both have the anchor that begins so many characters behind the start of ``one``'s change. The end of
    ``one`` may be a shorter anchor."""
    piece = one[start + step : start + step + anchor]
    if len(piece) < anchor // 4:
        return None
    if other.startswith(piece, start + step):
        return start + step, start + step
    found = other.find(piece, start)
    return None if found < 0 else (start + step, found)


def common_prefix(one: str, other: str) -> int:
    """Length of the text that both begin with. Compares halves of halves, so it takes linear time in native code."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_suffix(one: str, other: str) -> int:
    """Length of the text that both end with."""
    low, high = 0, min(len(one), len(other))
    if one[len(one) - high :] == other[len(other) - high :]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle
    return low


def content_starts(messages: list[Message], text: str) -> list[int]:
    """Where each message's content begins in the text, without spaces around it; where a template has changed a
    content, the end of the one before it."""
    starts: list[int] = []
    at = 0
    for message in messages:
        content = message.get("content")
        words = content.strip() if isinstance(content, str) else ""
        found = text.find(words[:_CONTENT_CHARS], at) if words else -1
        starts.append(at if found < 0 else found)
        at = at if found < 0 else found + len(words)
    return starts


def _num_leading_spaces(message: Message) -> int:
    content = message.get("content")
    return len(content) - len(content.lstrip()) if isinstance(content, str) else 0


def excerpt(text: str, place: int) -> str:
    """`EXCERPT_CHARS` around a place; without lone surrogates, which no JSON text may have."""
    begin = max(0, place - _BEFORE_CHARS)
    return _SURROGATES.sub("\ufffd", text[begin : begin + EXCERPT_CHARS])


def _cause(
    old: Rendered, new: Rendered, messages: list[Message], starts: list[int], change: Change
) -> tuple[Kind, int | None]:
    """(kind, the message that has the place)."""
    was, now = old.digests, new.digests
    num_old, num_new = len(was.messages), len(now.messages)
    shortest = min(num_old, num_new)
    different = np.flatnonzero(was.messages[:shortest] != now.messages[:shortest])
    same, place = int(different[0]) if len(different) else shortest, change.start
    is_before = same == shortest or place < _end_of(messages, starts, same - 1)
    if is_before and was.tools != now.tools:
        return "tools", None
    if is_before and was.variables != now.variables:
        return "settings", None
    at = max(0, bisect_right(starts, place) - 1)
    if same < shortest:
        if is_before:
            return "template", at
        if messages[same]["role"] in ("system", "developer"):
            return "system", same
        is_new = not change.agrees and _is_new_history(was.messages[same:], now.messages[same:], messages[:same])
        return ("history" if is_new else "messages"), same
    if num_new <= num_old:
        if num_new == num_old and place < len(new.text):  # the chat brings a beginning of its answer
            is_answer = len(messages) > same and place >= old.prompt_chars
            return ("answer", same) if is_answer else ("settings", None)
        return ("rewound" if num_new < num_old else "regenerated"), None
    if place < old.prompt_chars:
        return "template", at
    if said_digest(messages[same]) != was.said:
        return "answer", same
    return ("thoughts_unsent" if was.thought and not messages[same].get("reasoning_content") else "template"), same


def _is_new_history(was: np.ndarray, now: np.ndarray, shared: list[Message]) -> bool:
    """Is no message left but the system's? was, now: digests from the first message that changed on."""
    has_begun = any(message["role"] not in ("system", "developer") for message in shared)
    return not has_begun and len(was) > 1 and not np.isin(was, now).any()


def _end_of(messages: list[Message], starts: list[int], at: int) -> int:
    """Where a message's content ends; 0 before the first."""
    if at < 0:
        return 0
    content = messages[at].get("content")
    return starts[at] + (len(content.strip()) if isinstance(content, str) else 0)


def _as_text(ids: np.ndarray) -> str:
    """A character for each id."""
    return ids.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
