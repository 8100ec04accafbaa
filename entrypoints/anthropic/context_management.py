"""Context editing: clears old thoughts and old results of tools before the prompt is rendered.

    clear_thinking_20251015     thoughts of all but the last turns that have some
    clear_tool_uses_20250919    results of all but the last tool uses, once the prompt is larger than the trigger

A client sends its whole history every time, so each request has to find again what earlier ones cleared. Clearing
whatever is old now would move the edit by one tool use in each turn, and nothing behind it would ever be found in the
cache. So the history is played through from its beginning: before each answer that it holds, the edit applies if the
prompt of that time, edited so far, was over the trigger. Between two such moments the prompt only grows, and its prefix
stays cached; a tool use that was cleared stays cleared. The result depends on the history alone.

Tokens are those of each text by itself, with a few for each message: the trigger is met within a few percent.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ..chat.call import ChatCall
from ..chat.chats import Chats
from ..chat.messages import Message
from ..fields.ignored import Ignored
from ..fields.reading import one_of, refuse_unserved, shown, typed

DEFAULT_TRIGGER = 100_000
DEFAULT_KEPT_USES = 3
DEFAULT_KEPT_TURNS = 1

CLEARED_RESULT = "[this tool result was cleared to save context]"

_MESSAGE_TOKENS = 4
"""Estimate for the marks around a message."""

_FIELDS = {
    "clear_thinking": ("type", "keep"),
    "clear_tool_uses": ("type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"),
}
_TYPE = re.compile(r"(clear_thinking|clear_tool_uses)_\d{8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """keep: number of turns that keep their thoughts; None for all."""

    type: str
    keep: int | None = DEFAULT_KEPT_TURNS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearToolUses:
    """trigger: the most tokens of the prompt, or uncleared tool uses, that are allowed; both None for the default.
    keep: tool uses. clear_at_least: tokens; less is not worth it. inputs_of: the tools that lose their inputs, too;
    None for all."""

    type: str
    trigger_tokens: int | None = None
    trigger_uses: int | None = None
    keep: int = DEFAULT_KEPT_USES
    clear_at_least: int = 0
    exclude_tools: frozenset[str] = frozenset()
    inputs_of: frozenset[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class ContextEdits:
    """The edits that ``context_management`` asks for; None for one that it does not name."""

    thinking: ClearThinking | None = None
    tool_uses: ClearToolUses | None = None


def read_context_management(given: Any, ignored: Ignored) -> ContextEdits | None:
    """The field of a request; None where it is missing. ignored: gets edits that are not made here. Raises
    RequestRefused."""
    if given is None:
        return None
    where = "context_management"
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {shown(given)}; it takes an object with edits", param=where)
    refuse_unserved(given, ("edits",), where=f"{where}.", ignored=ignored)
    edits = given.get("edits")
    if not isinstance(edits, list | None):
        raise RequestRefused(f"{where}.edits is {shown(edits)}; it takes a list", param=f"{where}.edits")
    read: dict[str, ClearThinking | ClearToolUses] = {}
    for number, edit in enumerate(edits or []):
        name = f"{where}.edits[{number}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str):
            raise RequestRefused(f"{name} is {shown(edit)}; it takes an object with a type", param=name)
        if kind.startswith("compact_"):
            ignored.add_field(name, "conversations are not summarised here")
            continue
        if (family := _TYPE.fullmatch(kind)) is None:
            raise RequestRefused(
                f"{name}.type is {shown(kind)}; it takes clear_tool_uses_20250919 or clear_thinking_20251015",
                code="unsupported_field",
                param=f"{name}.type",
            )
        if family[1] in read:
            raise RequestRefused(f"{name} is the second {family[1]}; give one of them", param=name)
        refuse_unserved(edit, _FIELDS[family[1]], where=f"{name}.", ignored=ignored)
        edit = {key: value for key, value in edit.items() if value is not None}
        read[family[1]] = _thinking(edit, name) if family[1] == "clear_thinking" else _tool_uses(edit, name)
    thinking, tool_uses = read.get("clear_thinking"), read.get("clear_tool_uses")
    assert not isinstance(thinking, ClearToolUses) and not isinstance(tool_uses, ClearThinking)
    return ContextEdits(thinking, tool_uses)


def _thinking(edit: dict[str, Any], where: str) -> ClearThinking:
    keep = edit.get("keep", {"type": "thinking_turns", "value": DEFAULT_KEPT_TURNS})
    if keep == "all" or (isinstance(keep, dict) and keep == {"type": "all"}):
        return ClearThinking(edit["type"], None)
    return ClearThinking(edit["type"], _amount(keep, ("thinking_turns",), 1, f"{where}.keep")[1])


def _tool_uses(edit: dict[str, Any], where: str) -> ClearToolUses:
    read: dict[str, Any] = {}
    if "trigger" in edit:
        unit, value = _amount(edit["trigger"], ("input_tokens", "tool_uses"), 1, f"{where}.trigger")
        read["trigger_tokens" if unit == "input_tokens" else "trigger_uses"] = value
    if "keep" in edit:
        read["keep"] = _amount(edit["keep"], ("tool_uses",), 0, f"{where}.keep")[1]
    if "clear_at_least" in edit:
        read["clear_at_least"] = _amount(edit["clear_at_least"], ("input_tokens",), 0, f"{where}.clear_at_least")[1]
    if "exclude_tools" in edit:
        read["exclude_tools"] = _names(edit["exclude_tools"], f"{where}.exclude_tools")
    inputs = edit.get("clear_tool_inputs", False)
    if isinstance(inputs, bool):
        read["inputs_of"] = None if inputs else frozenset()
    else:
        read["inputs_of"] = _names(inputs, f"{where}.clear_tool_inputs")
    return ClearToolUses(type=edit["type"], **read)


def _amount(given: Any, units: tuple[str, ...], least: int, where: str) -> tuple[str, int]:
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {shown(given)}; it takes an object with type and value", param=where)
    refuse_unserved(given, ("type", "value"), where=f"{where}.")
    unit = one_of(given.get("type"), units, f"{where}.type")
    if (value := typed(given.get("value"), int, f"{where}.value")) < least:
        raise RequestRefused(f"{where}.value is {value}; use {least} or more", param=f"{where}.value")
    return unit, value


def _names(given: Any, where: str) -> frozenset[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise RequestRefused(f"{where} is {shown(given)}; it takes a list of tools' names", param=where)
    return frozenset(given)


# -- editing -----------------------------------------------------------------------------------------------------------


async def edited_call(
    call: ChatCall, edits: ContextEdits, chats: Chats, *, may_overflow: bool = False
) -> tuple[ChatCall, list[dict[str, Any]]]:
    """The call with its conversation edited, and ``applied_edits`` as the answer has them. may_overflow: as in
    `Chats.render`. Raises RequestRefused."""
    if edits.tool_uses is None and (edits.thinking is None or edits.thinking.keep is None):
        return call, []
    conversation = call.conversation
    chats.check_size(conversation, may_overflow=may_overflow)
    history = History(conversation.messages, conversation.tools)
    trigger = _trigger(edits.tool_uses, chats.context_length)
    if edits.tool_uses is not None and trigger is not None and history.num_bytes <= trigger:
        edits = dataclasses.replace(edits, tool_uses=None)  # a token has at least one byte
    texts = list(history.texts(edits))
    counts = dict(zip(texts, await chats.count_tokens(texts), strict=True)) if texts else {}
    messages, applied = history.edited(edits, counts, trigger)
    if not applied:
        return call, []
    return dataclasses.replace(call, conversation=dataclasses.replace(conversation, messages=messages)), applied


def _trigger(edit: ClearToolUses | None, context_length: int) -> int | None:
    """In tokens; None where tool uses are counted. The default is never beyond what the model can read."""
    if edit is None or edit.trigger_uses is not None:
        return None
    return min(DEFAULT_TRIGGER, context_length) if edit.trigger_tokens is None else edit.trigger_tokens


@dataclass(slots=True, frozen=True)
class _ToolUse:
    """A call and its result. saves: tokens."""

    message: int
    """Index of the message with the result."""
    caller: int
    """The message with the call, and which of its calls."""
    number: int
    name: str
    saves: int
    clears_input: bool


@dataclass(slots=True)
class _Replay:
    """How far the history has been played through. Amounts are in tokens."""

    size: int = 0
    """The messages so far, as edited."""
    turns: deque[tuple[list[int], int]] = field(default_factory=deque)
    """Turns with thoughts that are kept: their messages, and the tokens of the thoughts."""
    cleared_thoughts: list[int] = field(default_factory=list)
    num_cleared_turns: int = 0
    thoughts_saved: int = 0
    kept: deque[_ToolUse] = field(default_factory=deque)
    clearable: list[_ToolUse] = field(default_factory=list)
    clearable_tokens: int = 0
    cleared: list[_ToolUse] = field(default_factory=list)


class History:
    """The messages of a request, as templates take them, before they are edited."""

    def __init__(self, messages: list[Message], tools: list[dict] | None) -> None:
        self._messages = messages
        self._tools = msgspec.json.encode(tools).decode() if tools else ""
        self._inputs = {
            (at, number): _input_text(call)
            for at, message in enumerate(messages)
            for number, call in enumerate(message.get("tool_calls") or ())
        }

    @property
    def num_bytes(self) -> int:
        """Roughly, and not too few: the size of its texts in UTF-8."""
        texts = [self._tools, *self._inputs.values()]
        for message in self._messages:
            texts += (message.get("content") or "", message.get("reasoning_content") or "")
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + 64 * len(self._messages)

    def texts(self, edits: ContextEdits) -> set[str]:
        """The texts that `edited` needs token counts for."""
        thoughts = {message.get("reasoning_content") or "" for message in self._messages}
        if edits.tool_uses is None:
            return (thoughts if edits.thinking is not None and edits.thinking.keep is not None else set()) - {""}
        contents = {message.get("content") or "" for message in self._messages}
        return (thoughts | contents | {self._tools, CLEARED_RESULT, *self._inputs.values()}) - {""}

    def edited(
        self, edits: ContextEdits, counts: Mapping[str, int], trigger: int | None
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """(messages, ``applied_edits``). counts: text -> tokens. trigger: in tokens; None where tool uses count."""
        replay = _Replay(size=counts.get(self._tools, 0))
        callers: dict[str, tuple[int, int]] = {}
        """Id of a call -> its message, and which of its calls."""
        in_turn = False
        for at, message in enumerate(self._messages):
            role = message["role"]
            if role == "assistant":
                self._edit_tool_uses(replay, edits.tool_uses, trigger)  # as before this answer was given
            replay.size += _MESSAGE_TOKENS + counts.get(message.get("content") or "", 0)
            if role == "assistant":
                thoughts = message.get("reasoning_content") or ""
                replay.size += counts.get(thoughts, 0)
                for number, call in enumerate(message.get("tool_calls") or ()):
                    replay.size += counts.get(self._inputs[at, number], 0)
                    callers[call.get("id") or ""] = at, number
                if thoughts:
                    self._think(replay, edits.thinking, at, counts.get(thoughts, 0), in_turn)
                    in_turn = True
            elif role == "tool":
                caller = callers.pop(message.get("tool_call_id") or "", None)
                if caller is not None and edits.tool_uses is not None:
                    self._use(replay, edits.tool_uses, at, caller, counts)
            elif role == "user":
                in_turn = False
        self._edit_tool_uses(replay, edits.tool_uses, trigger)
        return self._rewritten(replay), _applied(replay, edits)

    @staticmethod
    def _think(replay: _Replay, edit: ClearThinking | None, at: int, tokens: int, in_turn: bool) -> None:
        """An answer has thoughts. in_turn: one of the same turn had some before."""
        if edit is None or edit.keep is None:
            return
        if in_turn:
            messages, before = replay.turns.pop()
            replay.turns.append(([*messages, at], before + tokens))
        else:
            replay.turns.append(([at], tokens))
        if len(replay.turns) > edit.keep:
            messages, saved = replay.turns.popleft()
            replay.cleared_thoughts += messages
            replay.num_cleared_turns += 1
            replay.thoughts_saved += saved
            replay.size -= saved

    def _use(
        self, replay: _Replay, edit: ClearToolUses, at: int, caller: tuple[int, int], counts: Mapping[str, int]
    ) -> None:
        """A tool has returned."""
        name = self._messages[caller[0]]["tool_calls"][caller[1]]["function"]["name"]
        saves = counts.get(self._messages[at].get("content") or "", 0) - counts.get(CLEARED_RESULT, 0)
        clears_input = edit.inputs_of is None or name in edit.inputs_of
        if clears_input:
            saves += counts.get(self._inputs[caller], 0)
        replay.kept.append(_ToolUse(at, *caller, name, saves, clears_input))
        if len(replay.kept) > edit.keep:
            use = replay.kept.popleft()
            if use.name not in edit.exclude_tools and use.saves > 0:
                replay.clearable.append(use)
                replay.clearable_tokens += use.saves

    @staticmethod
    def _edit_tool_uses(replay: _Replay, edit: ClearToolUses | None, trigger: int | None) -> None:
        """Clear what may be cleared, if the prompt so far asks for it."""
        if edit is None or not replay.clearable:
            return
        num_uses = len(replay.kept) + len(replay.clearable)
        is_over = num_uses > (edit.trigger_uses or 0) if trigger is None else replay.size > trigger
        if not is_over or replay.clearable_tokens < edit.clear_at_least:
            return
        replay.cleared += replay.clearable
        replay.size -= replay.clearable_tokens
        replay.clearable, replay.clearable_tokens = [], 0

    def _rewritten(self, replay: _Replay) -> list[Message]:
        if not (replay.cleared or replay.cleared_thoughts):
            return self._messages
        messages = list(self._messages)
        for at in replay.cleared_thoughts:
            messages[at] = {name: value for name, value in messages[at].items() if name != "reasoning_content"}
        for use in replay.cleared:
            messages[use.message] = {**messages[use.message], "content": CLEARED_RESULT}
            if use.clears_input:
                calls = list(messages[use.caller]["tool_calls"])
                call = calls[use.number]
                calls[use.number] = {**call, "function": {**call["function"], "arguments": {}}}
                messages[use.caller] = {**messages[use.caller], "tool_calls": calls}
        return messages


def _input_text(call: dict[str, Any]) -> str:
    return msgspec.json.encode(call["function"]["arguments"]).decode()


def _applied(replay: _Replay, edits: ContextEdits) -> list[dict[str, Any]]:
    applied: list[dict[str, Any]] = []
    if edits.thinking is not None and replay.num_cleared_turns:
        applied.append(
            {
                "type": edits.thinking.type,
                "cleared_thinking_turns": replay.num_cleared_turns,
                "cleared_input_tokens": replay.thoughts_saved,
            }
        )
    if edits.tool_uses is not None and replay.cleared:
        applied.append(
            {
                "type": edits.tool_uses.type,
                "cleared_tool_uses": len(replay.cleared),
                "cleared_input_tokens": sum(use.saves for use in replay.cleared),
            }
        )
    return applied
