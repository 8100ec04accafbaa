"""What is cleared of a conversation, and when."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from baton.entrypoints.anthropic.context_management import (
    CLEARED_RESULT,
    ClearThinking,
    ClearToolUses,
    ContextEdits,
    History,
    read_context_management,
)
from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused

USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def read(*edits: Any) -> ContextEdits:
    found = read_context_management({"edits": list(edits)}, Ignored())
    assert found is not None
    return found


def amount(unit: str, value: int) -> dict[str, Any]:
    return {"type": unit, "value": value}


# -- the field ---------------------------------------------------------------------------------------------------------


def test_context_edit_defaults_match_anthropic() -> None:
    assert read_context_management(None, Ignored()) is None
    assert read() == read_context_management({}, Ignored()) == ContextEdits()
    assert read({"type": THINKING}, {"type": USES}) == ContextEdits(
        ClearThinking(THINKING, keep=1), ClearToolUses(type=USES, keep=3)
    )


def test_every_context_edit_setting_is_read() -> None:
    edits = read(
        {
            "type": USES,
            "trigger": amount("input_tokens", 30_000),
            "keep": amount("tool_uses", 0),
            "clear_at_least": amount("input_tokens", 5000),
            "exclude_tools": ["web_search"],
            "clear_tool_inputs": True,
        },
        {"type": THINKING, "keep": amount("thinking_turns", 2)},
    )
    assert edits.tool_uses == ClearToolUses(
        type=USES, trigger_tokens=30_000, keep=0, clear_at_least=5000, exclude_tools=frozenset({"web_search"}),
        inputs_of=None,
    )  # fmt: skip
    assert edits.thinking == ClearThinking(THINKING, 2)
    assert read({"type": THINKING, "keep": "all"}).thinking == ClearThinking(THINKING, None)
    by_uses = read({"type": USES, "trigger": amount("tool_uses", 7), "clear_tool_inputs": ["Bash"], "keep": None})
    assert by_uses.tool_uses == ClearToolUses(type=USES, trigger_uses=7, inputs_of=frozenset({"Bash"}))


def test_unsupported_edit_is_reported_as_ignored() -> None:
    ignored = Ignored()
    assert read_context_management({"edits": [{"type": "compact_20260112"}]}, ignored) == ContextEdits()
    assert list(ignored.reasons) == ["context_management.edits[0]"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("clear", "context_management"),
        ({"edit": []}, "context_management.edit"),
        ({"edits": {}}, "context_management.edits"),
        ({"edits": ["x"]}, "context_management.edits[0]"),
        ({"edits": [{"type": "clear_all_20250919"}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": USES}, {"type": USES}]}, "context_management.edits[1]"),
        ({"edits": [{"type": USES, "keep": 3}]}, "context_management.edits[0].keep"),
        ({"edits": [{"type": USES, "keep": amount("input_tokens", 3)}]}, "context_management.edits[0].keep.type"),
        ({"edits": [{"type": USES, "keep": amount("tool_uses", -1)}]}, "context_management.edits[0].keep.value"),
        ({"edits": [{"type": USES, "exclude_tools": "x"}]}, "context_management.edits[0].exclude_tools"),
        ({"edits": [{"type": USES, "clear_tool_inputs": 3}]}, "context_management.edits[0].clear_tool_inputs"),
        ({"edits": [{"type": THINKING, "keep": amount("thinking_turns", 0)}]},
         "context_management.edits[0].keep.value"),
        ({"edits": [{"type": THINKING, "trigger": amount("input_tokens", 1)}]},
         "context_management.edits[0].trigger"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(given: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_context_management(given, Ignored())
    assert caught.value.param == param and status_of(caught.value) == 400


# -- editing -----------------------------------------------------------------------------------------------------------


def use(number: int, tool: str = "Bash", size: int = 100, thoughts: str = "") -> list[dict[str, Any]]:
    """A call and its result of ``size`` characters."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": tool, "arguments": {"n": number}}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thoughts:
        answer["reasoning_content"] = thoughts
    result = f"{number}:".ljust(size, "x")
    return [answer, {"role": "tool", "tool_call_id": f"c{number}", "content": result}]


def chat(*uses: list[dict[str, Any]], words: str = "Go") -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}, *(message for each in uses for message in each)]


def edited(messages: list[dict], edits: ContextEdits, trigger: int | None = None) -> tuple[list[dict], list[dict]]:
    """A token is a character."""
    history = History(messages, None)
    counts = {text: len(text) for text in history.texts(edits)}
    if edits.tool_uses is not None and edits.tool_uses.trigger_tokens is not None:
        trigger = edits.tool_uses.trigger_tokens
    return history.edited(edits, counts, trigger)


def cleared(messages: list[dict]) -> list[int]:
    """Which of the results are."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return [number for number, content in enumerate(results) if content == CLEARED_RESULT]


def uses_edit(**fields: Any) -> ContextEdits:
    return ContextEdits(tool_uses=ClearToolUses(type=USES, **fields))


def test_nothing_is_cleared_below_the_trigger() -> None:
    messages = chat(*(use(number) for number in range(5)))
    assert edited(messages, uses_edit(trigger_tokens=10_000)) == (messages, [])


def test_oldest_tool_results_are_cleared_and_latest_kept() -> None:
    messages = chat(*(use(number) for number in range(6)))
    before = [dict(message) for message in messages]
    after, applied = edited(messages, uses_edit(trigger_tokens=600, keep=2))
    assert cleared(after) == [0, 1, 2, 3] and messages == before, "the client's own are not touched"
    saved = 4 * (100 - len(CLEARED_RESULT))
    assert applied == [{"type": USES, "cleared_tool_uses": 4, "cleared_input_tokens": saved}]
    assert [message["tool_calls"] for message in after if message["role"] == "assistant"] == [
        message["tool_calls"] for message in messages if message["role"] == "assistant"
    ]


def test_excluded_tools_and_short_results_are_not_cleared() -> None:
    messages = chat(use(0, "Memory"), use(1, size=5), *(use(number) for number in range(2, 6)))
    edit = uses_edit(trigger_tokens=200, keep=1, exclude_tools=frozenset({"Memory"}))
    assert cleared(edited(messages, edit)[0]) == [2, 3, 4]


@pytest.mark.parametrize(("inputs_of", "left"), [(None, [{}, {}]), (frozenset({"Bash"}), [{}, {"n": 1}])])
def test_tool_inputs_are_cleared_on_request(inputs_of: frozenset[str] | None, left: list[dict]) -> None:
    messages = chat(use(0, "Bash"), use(1, "Read"), use(2))
    after, _ = edited(messages, uses_edit(trigger_tokens=100, keep=1, inputs_of=inputs_of))
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in after if "tool_calls" in message]
    assert arguments == [*left, {"n": 2}] and messages[1]["tool_calls"][0]["function"]["arguments"] == {"n": 0}


def test_clearing_waits_for_clear_at_least() -> None:
    uses = [use(number) for number in range(8)]
    edit = uses_edit(trigger_tokens=300, keep=1, clear_at_least=4 * (100 - len(CLEARED_RESULT)))
    assert cleared(edited(chat(*uses[:4]), edit)[0]) == []
    assert cleared(edited(chat(*uses[:5]), edit)[0]) == [0, 1, 2, 3]
    assert cleared(edited(chat(*uses[:8]), edit)[0]) == [0, 1, 2, 3], "three more are too few"


def test_tool_use_count_can_trigger_clearing() -> None:
    uses = [use(number) for number in range(9)]
    edit = uses_edit(trigger_uses=4, keep=1)
    found = [cleared(edited(chat(*uses[:count]), edit)[0]) for count in range(10)]
    assert found == [[], [], [], [], [], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], list(range(8))]


def test_parallel_calls_and_stray_results_are_handled() -> None:
    calls = [use(number)[0]["tool_calls"][0] for number in range(3)]
    results = [use(number)[1] for number in (2, 0, 1)]
    stray = {"role": "tool", "tool_call_id": "unknown", "content": "y" * 100}
    messages = [*chat(), {"role": "assistant", "content": "", "tool_calls": calls}, *results, stray]
    after, _ = edited(messages, uses_edit(trigger_tokens=10, keep=1))
    assert [message["content"][:2] for message in after if message["role"] == "tool"] == ["[t", "[t", "1:", "yy"]


@pytest.mark.parametrize("seed", range(30))
def test_growing_chat_keeps_its_prefix_between_clearings(seed: int) -> None:
    """The results of one turn are those of the next but for those that it clears, and then the prompt was too large."""
    rng = random.Random(seed)
    uses = [use(number, size=rng.randrange(1, 400), thoughts="t" * rng.randrange(0, 90)) for number in range(40)]
    trigger, keep, least = rng.randrange(500, 3000), rng.randrange(0, 5), rng.randrange(0, 900)
    edits = ContextEdits(
        ClearThinking(THINKING, rng.choice([None, 1, 2])),
        ClearToolUses(type=USES, trigger_tokens=trigger, keep=keep, clear_at_least=least),
    )
    before: list[dict] = []
    for count in range(1, 41):
        given = chat(*uses[:count])
        after, _ = edited(given, edits)
        if after[: len(before)] != before:
            grown = [*before, *given[len(before) :]]
            newly = len(set(cleared(after)) - set(cleared(before)))
            assert newly and size_of(grown) > trigger, f"seed {seed}: cleared for nothing"
        assert set(cleared(before)) <= set(cleared(after)), f"seed {seed}: a result came back"
        before = after


def size_of(messages: list[dict]) -> int:
    """Characters, and 4 for each message."""
    texts = [message["content"] + message.get("reasoning_content", "") for message in messages]
    texts += [
        msgspec.json.encode(call["function"]["arguments"]).decode()
        for message in messages
        for call in message.get("tool_calls", [])
    ]
    return sum(map(len, texts)) + 4 * len(messages)


# -- thoughts ----------------------------------------------------------------------------------------------------------


def thinking(keep: int | None) -> ContextEdits:
    return ContextEdits(thinking=ClearThinking(THINKING, keep))


def said(words: str, thoughts: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": words} | ({"reasoning_content": thoughts} if thoughts else {})


TURNS = [
    *chat(use(0, thoughts="first"), use(1, thoughts="and more")), said("A"),
    *chat(words="Next"), said("B"),
    *chat(words="Then"), said("C", "second"),
    *chat(use(2, thoughts="third"), words="Last"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "left", "turns", "tokens"),
    [
        (None, ["first", "and more", "second", "third"], 0, 0),
        (3, ["first", "and more", "second", "third"], 0, 0),
        (2, ["second", "third"], 1, 13),
        (1, ["third"], 2, 19),
    ],
)
def test_thinking_of_the_last_turns_is_kept(keep: int | None, left: list[str], turns: int, tokens: int) -> None:
    """All answers between two messages of the user are one turn."""
    after, applied = edited(TURNS, thinking(keep))
    assert [message["reasoning_content"] for message in after if "reasoning_content" in message] == left
    told = {"type": THINKING, "cleared_thinking_turns": turns, "cleared_input_tokens": tokens}
    assert applied == ([told] if turns else [])


def test_applied_edits_list_thinking_first() -> None:
    edits = ContextEdits(ClearThinking(THINKING), ClearToolUses(type=USES, trigger_tokens=50, keep=0))
    _, applied = edited(TURNS, edits)
    assert [edit["type"] for edit in applied] == [THINKING, USES]


def test_system_reminder_between_calls_starts_no_turn() -> None:
    reminder = {"role": "system", "content": "Mind the time."}
    messages = [*chat(use(0, thoughts="one")), reminder, *use(1, thoughts="two")]
    assert edited(messages, thinking(1)) == (messages, [])
