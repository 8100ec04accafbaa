"""Each rule takes its own text out of the way of the prefix, before the first answer, and no other."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.chat.messages import Conversation
from baton.entrypoints.chat.prefix_rules import (
    RULES,
    PrefixRuleError,
    RuleHints,
    normalized,
    read_rules,
    without_volatile_texts,
)
from baton.entrypoints.server_config import ChatConfig

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.2a7; cc_entrypoint=cli; cch=%s;"
LEFT = "<total_tokens>%s tokens left</total_tokens>"
REMINDER = (
    "<system-reminder>\nUse the following context:\n# currentDate\nToday's date is %s.\n\n      IMPORTANT: maybe.\n"
    "</system-reminder>\n\nList it"
)
CODEX = "<environment_context>\n  <shell>bash</shell>\n  <current_date>%s</current_date>\n</environment_context>"
OPENCODE = "You are opencode.\n<env>\n  Platform: linux\n  Today's date: %s\n</env>\nSkills"
DROP, LEFT_RULE, DATES = "claude-code-billing", "claude-code-tokens-left", "dates"


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*messages: tuple[str, str]) -> Conversation:
    return Conversation(messages=[message(*each) for each in messages])


def test_names_are_read_in_any_order_and_unknown_ones_refused():
    assert read_rules("") == () and read_rules(" , ") == ()
    assert [rule.name for rule in read_rules("dates, claude-code-billing")] == [DROP, DATES]
    with pytest.raises(PrefixRuleError, match=r"first-line, x: no such rule; use claude-code-billing, .*dates"):
        read_rules("x,dates,first-line")


def test_flag_and_documentation_name_every_rule():
    about = next(each for each in dataclasses.fields(ChatConfig) if each.name == "normalize_prefix").metadata["help"]
    page = (Path(__file__).parents[3] / "docs" / "harnesses.md").read_text()
    for rule in RULES.values():
        assert rule.name in about and re.search(rf"^\| `{rule.name}` \|.*\| {rule.effect}\b", page, re.M)
        assert rule.example.partition(";")[0] in page


def test_no_rule_leaves_the_conversation_alone():
    given = chat(("system", BILLING % "a"), ("user", REMINDER % "2026-11-24"))
    assert normalized(given, (), {}).conversation is given
    for rule in RULES.values():
        plain = chat(("system", "Be brief."), ("user", "Today's date is 2026-11-24. Hi"), ("assistant", "Hi"))
        result = normalized(plain, (rule,), {})
        assert result.conversation == plain and not result.taken and not result.fixed


def test_billing_line_is_dropped_and_reported():
    result = normalized(chat(("system", BILLING % "a1" + "\nBe brief."), ("user", "Hi")), read_rules(DROP), {})
    assert result.conversation.messages == [message("system", "Be brief."), message("user", "Hi")]
    assert result.taken == {DROP: BILLING % "a1"}
    alone = normalized(chat(("system", BILLING % "a1"), ("user", "Hi")), read_rules(DROP), {})
    assert alone.conversation.messages == [message("user", "Hi")]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_billing_line_of_others_stays(role: str):
    given = chat(("user", "Hi"), (role, BILLING % "a1" + "\nmore"))
    assert normalized(given, read_rules(DROP), {}).conversation == given


@pytest.mark.parametrize("last", ["user", "tool"])
def test_tokens_left_are_moved_behind_the_last_message(last: str):
    rules = read_rules(LEFT_RULE)
    given = chat(
        ("system", f"Be brief.\n{LEFT % 91234}\nReally."), ("user", "Hi"), ("assistant", "So"), (last, "a.txt")
    )
    result = normalized(given, rules, {})
    contents = [each["content"] for each in result.conversation.messages]
    assert contents == ["Be brief.\nReally.", "Hi", "So", f"a.txt\n{LEFT % 91234}"]
    assert result.taken == {LEFT_RULE: LEFT % 91234}
    assert given.messages[0]["content"].count("tokens left") == 1, "the client's messages are not changed"


def test_moved_text_needs_a_message_to_stand_in():
    given = chat(
        ("system", LEFT % 5),
    )
    assert normalized(given, read_rules(LEFT_RULE), {}).conversation == given


def test_text_is_moved_in_front_of_a_message_that_the_model_continues():
    given = Conversation(messages=[message("system", LEFT % 5), message("user", "Hi"), message("assistant", "We")],
                         goes_on=True)  # fmt: skip
    result = normalized(given, read_rules(LEFT_RULE), {}).conversation
    assert [each["content"] for each in result.messages] == [f"Hi\n{LEFT % 5}", "We"] and result.goes_on


@pytest.mark.parametrize(
    ("role", "text", "first", "later"),
    [
        ("user", REMINDER, "2026-11-24", "2026-11-25"),
        ("user", CODEX, "2026-11-24", "2026-11-25"),
        ("system", OPENCODE, "Tue Nov 24 2026", "Wed Nov 25 2026"),
    ],
)
def test_dates_keep_the_value_of_the_first_turn(role: str, text: str, first: str, later: str):
    rules = read_rules(DATES)
    one = normalized(chat((role, text % first), ("user", "Go")), rules, {})
    assert one.conversation.messages[0]["content"] == text % first and one.taken == {}
    two = normalized(chat((role, text % later), ("user", "Go"), ("assistant", "ok")), rules, one.fixed)
    assert two.conversation.messages[0]["content"] == text % first
    assert two.taken == {DATES: later} and two.fixed == one.fixed
    new = normalized(chat((role, text % later), ("user", "Go")), rules, {})
    assert new.conversation.messages[0]["content"] == text % later


def test_dates_behind_the_first_answer_stay():
    given = chat(("user", "Hi"), ("assistant", "Hi"), ("user", REMINDER % "2026-11-25"))
    assert normalized(given, read_rules(DATES), {f"{DATES}/user": "2026-11-24"}).conversation == given


def test_stable_part_is_equal_for_all_turns():
    turns = [
        without_volatile_texts([message("system", f"{BILLING % n}\n{LEFT % n}\n{OPENCODE % f'Tue Nov 2{n} 2026'}"),
                                message("user", REMINDER % f"2026-11-2{n}")])
        for n in (4, 5)
    ]  # fmt: skip
    assert turns[0] == turns[1] and "List it" in turns[0][1]["content"]


def test_hints_are_logged_once_and_only_for_rules_that_are_off(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    given = chat(("system", BILLING % "a1" + "\nBe brief."), ("user", "Hi"))
    for rules, count in ((read_rules(DROP), 0), ((), 1)):
        hints = RuleHints(rules)
        for _ in range(3):
            hints.log_seen(given, 42)
        assert len(caplog.records) == count
    assert "42 tokens" in caplog.text and "--normalize-prefix claude-code-billing" in caplog.text
    caplog.clear()
    hints = RuleHints(())
    hints.log_divergence(given, 0, len(BILLING) + 3, 7)
    hints.log_divergence(given, 1, 2, 7)
    hints.log_divergence(given, None, 2, 7)
    assert not caplog.records
    for _ in range(2):
        hints.log_divergence(given, 0, BILLING.index("%s"), 24_000)
    assert len(caplog.records) == 1 and "costs 24000 tokens a turn" in caplog.text
