"""Finds the beginning of a conversation's next prompt as soon as its last answer has ended.

    turn      …<|im_start|>assistant\\n<think>\\nHm.\\n</think>\\nParis.             what the model read and wrote
    history   …<|im_start|>assistant\\nParis.<|im_end|>\\n                        what the template writes next time
                                      └── only this is tokenised, and computed while the tool runs or the user types

A template may drop the thoughts of earlier turns, or write the last answer its own way. The next prompt then departs
from what the turn has left in the cache. But all of it up to the next message is known: the conversation, the answer as
the client will send it back, and a stub in place of the next message, whose text marks the end.

Pure functions, but for `ReturnHabits`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text, joined
from .conversations import Conversations, Turn
from .messages import Conversation, Message, read_arguments
from .rendering import Renderer

MIN_TOKENS = 16
"""A next prompt that departs from the turn by fewer tokens is not prepared."""

_STUB = "BatonNextMessage5V"
"""Only letters and digits: templates strip, split and escape other characters."""


class History(NamedTuple):
    """The beginning of the next prompt: the turn's first tokens, and text that is not tokenised yet."""

    text: str
    shared_ids: np.ndarray
    """int32 [n]: tokens of the turn that the next prompt begins with."""
    rest: str
    """The text after them. It begins with a special token unless it is all of the text."""


def returned_answer(pieces: Iterable[Piece], *, with_thoughts: bool) -> Message:
    """The answer as its client will send it back, in the form that templates read."""
    said = joined(list(pieces))
    text = "".join(piece.text for piece in said if isinstance(piece, Text))
    message: Message = {"role": "assistant", "content": text}
    thoughts = "".join(piece.text for piece in said if isinstance(piece, Reasoning))
    if thoughts and with_thoughts:
        message["reasoning_content"] = thoughts
    calls: dict[int, Message] = {}
    for piece in said:
        if isinstance(piece, CallBegins):
            calls[piece.index] = {"name": piece.name, "arguments": {}}
        elif isinstance(piece, CallArguments):
            calls[piece.index]["arguments"] = read_arguments(piece.delta)
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": function} for index, function in calls.items()
        ]
    return message


def next_history(
    renderer: Renderer,
    conversations: Conversations,
    special: Mapping[int, str],
    turn: Turn,
    conversation: Conversation,
    answer: Message,
) -> History | None:
    """The beginning of the next prompt; None if the next chat continues the turn as it is, or if the template does not
    show where the next message begins. special: id -> text. conversation: that of the turn's prompt. answer: see
    `returned_answer`. Raises RequestRefused where the template does not take the messages."""
    stub: Message = {"role": "user", "content": _STUB}
    if calls := answer.get("tool_calls"):
        function = calls[0]["function"]["name"]
        stub = {"role": "tool", "tool_call_id": calls[0]["id"], "name": function, "content": _STUB}
    following = dataclasses.replace(
        conversation, messages=[*conversation.messages, answer, stub], goes_on=False, forced=""
    )
    rendered = renderer.render(following)
    end = rendered.rfind(_STUB)
    if end < 0 or conversations.match_turn(turn, following, rendered) is not None:
        return None
    marks = _marks(special.values(), rendered[:end])
    if not marks:
        return None
    text = rendered[: marks[-1].start()]
    return History(text, *_split(text, turn, special))


def _split(text: str, turn: Turn, special: Mapping[int, str]) -> tuple[np.ndarray, str]:
    """(the turn's ids up to the last special token that both have, the text from there)."""
    none = np.empty(0, dtype=np.int32)
    in_turn = _marks(special.values(), turn.text)
    places = np.flatnonzero(np.isin(turn.ids, np.fromiter(special, dtype=np.int32, count=len(special))))
    if len(in_turn) != len(places):
        return none, text  # a special token's text stands for other tokens somewhere
    shared = _num_shared(text, turn.text)
    inside = [number for number, mark in enumerate(in_turn) if mark.end() <= shared]
    if not inside:
        return none, text
    return turn.ids[: places[inside[-1]]], text[in_turn[inside[-1]].start() :]


def _marks(special: Iterable[str], text: str) -> list[re.Match[str]]:
    """Where the special tokens stand in a text."""
    texts = sorted(filter(None, special), key=len, reverse=True)
    return list(re.finditer("|".join(map(re.escape, texts)), text)) if texts else []


def _num_shared(text: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def num_prepared(ids: Sequence[int], turn: Turn) -> int:
    """Number of ids after those that the turn has too."""
    length = min(len(ids), len(turn.ids))
    differing = np.flatnonzero(np.asarray(ids[:length], dtype=np.int32) != turn.ids[:length])
    return len(ids) - (int(differing[0]) if len(differing) else length)


class ReturnHabits:
    """Learns for each scope (a client and namespace) whether its chats bring thoughts back, and how often the next
    prompt departs from its turn at all."""

    MAX_SCOPES = 1024
    PATIENCE = 8
    """After so many turns in a row with nothing to prepare, only one turn in so many is looked at."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, _Habit] = OrderedDict()
        """Latest last."""

    def returns_thoughts(self, scope: str) -> bool:
        return self._habit(scope).returns_thoughts

    def record_return(self, scope: str, message: Message) -> None:
        """A chat has sent back an answer that had thoughts."""
        self._habit(scope).returns_thoughts = bool(message.get("reasoning_content"))

    def is_worth_a_look(self, scope: str) -> bool:
        habit = self._habit(scope)
        return habit.in_vain < self.PATIENCE or habit.in_vain % self.PATIENCE == 0

    def record_look(self, scope: str, *, departs: bool | None) -> None:
        """departs: the next prompt departs from the turn; None if that was not looked at."""
        habit = self._habit(scope)
        habit.in_vain = 0 if departs else habit.in_vain + 1

    def _habit(self, scope: str) -> _Habit:
        habit = self._scopes.setdefault(scope, _Habit())
        self._scopes.move_to_end(scope)
        if len(self._scopes) > self.MAX_SCOPES:
            self._scopes.popitem(last=False)
        return habit


@dataclasses.dataclass(slots=True)
class _Habit:
    returns_thoughts: bool = False
    in_vain: int = 0
