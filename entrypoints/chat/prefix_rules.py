"""Rules of ``--normalize-prefix``: they keep text that changes with each request out of the beginning of a prompt.

    x-anthropic-billing-header: cc_version=…;      claude-code-billing: dropped
    You are an agent. …
    <total_tokens>91234 tokens left</total_tokens>     claude-code-tokens-left: moved ──────────┐
    Today's date: Tue Nov 24 2026                      dates: fixed, as the first turn had it   │
    user: List the files.                                                                       │
    assistant: …                                                                                │
    tool: a.txt  ◀──────────────────────────────────────────────────────────────────────────────┘

A prompt finds in the cache only what stands before the first token that differs. Each rule knows one text of an agent
program, in the messages before the first answer. None is on unless the operator names it, and every answer says how
many tokens each rule took.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .messages import Conversation, Message

logger = logging.getLogger(__name__)

_SYSTEM = ("system", "developer")
_MOVE_TO = ("user", "tool")


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """effect: dropped, the model does not see the text; moved, to the end of the last message of the user or a tool;
    fixed, the value of the conversation's first turn stays. sent_by, example: for the documentation. patterns: role ->
    the text; only its first occurrence counts. The value that
    is fixed is the group of the pattern."""

    name: str
    effect: Literal["dropped", "moved", "fixed"]
    sent_by: str
    example: str
    patterns: Mapping[str, re.Pattern[str]]


def _in_system(pattern: re.Pattern[str]) -> dict[str, re.Pattern[str]]:
    return dict.fromkeys(_SYSTEM, pattern)


_DAY = r"(\d{4}-\d\d-\d\d|[A-Z][a-z]{2} [A-Z][a-z]{2} \d\d \d{4})"

RULES = {
    rule.name: rule
    for rule in (
        PrefixRule(
            "claude-code-billing",
            "dropped",
            "Claude Code, first in the system prompt",
            "x-anthropic-billing-header: cc_version=2.1.197.2a7; cc_entrypoint=cli;",
            _in_system(re.compile(r"\A(?:x-anthropic-[\w-]+:[^\n]*(?:\n|\Z))+", re.ASCII)),
        ),
        PrefixRule(
            "claude-code-tokens-left",
            "moved",
            "Claude Code with totalTokensReminder, in the system prompt",
            "<total_tokens>91234 tokens left</total_tokens>",
            _in_system(re.compile(r"^<total_tokens>\w{1,20} tokens left</total_tokens>(?:\n|\Z)", re.M | re.ASCII)),
        ),
        PrefixRule(
            "dates",
            "fixed",
            "Claude Code and Codex in the first user message, opencode in the system prompt",
            "Today's date: Tue Nov 24 2026",
            _in_system(re.compile(rf"^ *Today's date: {_DAY}\n</env>", re.M))
            | {
                "user": re.compile(
                    rf"^# currentDate\nToday's date is {_DAY}\.$|^ *<current_date>{_DAY}</current_date>$", re.M
                )
            },
        ),
    )
}


class PrefixRuleError(ValueError):
    """There is no rule of that name; the message lists those that there are."""


def read_rules(names: str) -> tuple[PrefixRule, ...]:
    """The rules of a comma-separated list, in the order of `RULES`. Raises PrefixRuleError."""
    given = {name for each in names.split(",") if (name := each.strip())}
    if unknown := sorted(given - RULES.keys()):
        raise PrefixRuleError(f"{', '.join(unknown)}: no such rule; use {', '.join(RULES)}")
    return tuple(rule for rule in RULES.values() if rule.name in given)


@dataclass(frozen=True, slots=True)
class Normalized:
    """A conversation as the template gets it. taken: rule -> the text that it dropped, moved or replaced; no rule that
    changed nothing. fixed: values for the conversation's later turns, by rule and role."""

    conversation: Conversation
    taken: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)


def normalized(conversation: Conversation, rules: tuple[PrefixRule, ...], fixed: Mapping[str, str]) -> Normalized:
    """The conversation under these rules. fixed: of its last turn; empty for a new conversation."""
    if not rules:
        return Normalized(conversation)
    result = Normalized(conversation, fixed=dict(fixed))
    messages = conversation.messages
    for rule in rules:
        for number, match in reversed(find_texts(messages, rule)):
            if rule.effect == "fixed":
                messages = _with_fixed_value(messages, number, match, rule, result)
            else:
                messages = _without_text(messages, number, match, rule, result)
    return dataclasses.replace(result, conversation=dataclasses.replace(conversation, messages=messages))


def find_texts(messages: list[Message], rule: PrefixRule) -> list[tuple[int, re.Match[str]]]:
    """The messages before the first answer that have the rule's text, and where; the first one of each role."""
    found: list[tuple[int, re.Match[str]]] = []
    patterns = dict(rule.patterns)
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role == "assistant" or not patterns:
            break
        pattern = patterns.get(role)
        if pattern is not None and isinstance(content, str) and (match := pattern.search(content)) is not None:
            found.append((number, match))
            del patterns[role]
    return found


def without_volatile_texts(messages: list[Message]) -> list[Message]:
    """The messages without the text of any rule, on or off: the same for all turns of a conversation."""
    for rule in RULES.values():
        for number, match in find_texts(messages, rule):
            messages = _replaced(messages, number, match.span(), "")
    return messages


def _without_text(
    messages: list[Message], number: int, match: re.Match[str], rule: PrefixRule, result: Normalized
) -> list[Message]:
    """With the text dropped, or moved. An empty message is dropped with it."""
    text = match[0].rstrip("\n")
    if rule.effect == "moved":
        target = next((at for at in range(len(messages) - 1, -1, -1) if messages[at]["role"] in _MOVE_TO), None)
        if target is None:
            return messages
        end = len(messages[target].get("content") or "")
        messages = _replaced(messages, target, (end, end), "\n" + text)
    result.taken[rule.name] = text
    messages = _replaced(messages, number, match.span(), "")
    return messages if messages[number]["content"] else messages[:number] + messages[number + 1 :]


def _with_fixed_value(
    messages: list[Message], number: int, match: re.Match[str], rule: PrefixRule, result: Normalized
) -> list[Message]:
    assert match.lastindex is not None
    value, key = match[match.lastindex], f"{rule.name}/{messages[number]['role']}"
    kept = result.fixed.setdefault(key, value)
    if kept == value:
        return messages
    result.taken[rule.name] = value
    return _replaced(messages, number, match.span(match.lastindex), kept)


def _replaced(messages: list[Message], number: int, span: tuple[int, int], text: str) -> list[Message]:
    content = messages[number].get("content") or ""
    message = {**messages[number], "content": content[: span[0]] + text + content[span[1] :]}
    return [*messages[:number], message, *messages[number + 1 :]]


class RuleHints:
    """Logs that a rule would help which is off; each line once for a rule."""

    def __init__(self, rules: tuple[PrefixRule, ...]) -> None:
        off = [rule for rule in RULES.values() if rule not in rules]
        self._unseen = [rule for rule in off if rule.effect == "dropped"]
        self._undiverged = off

    def log_seen(self, conversation: Conversation, num_tokens: int) -> None:
        """A chat is opened. conversation: as the template gets it; num_tokens: of its prompt."""
        for rule in list(self._unseen):
            if find_texts(conversation.messages, rule):
                self._unseen.remove(rule)
                logger.warning(
                    "a prompt of %d tokens begins with a line such as '%s', which differs between sessions; prompts of "
                    "different sessions share no KV unless --normalize-prefix %s is given",
                    num_tokens,
                    rule.example,
                    rule.name,
                )

    def log_divergence(self, conversation: Conversation, message: int | None, char: int, num_lost: int) -> None:
        """A chat diverges from the last turn of its conversation, at this character of this message. conversation: as
        the template gets it. num_lost: tokens of that turn behind the place."""
        for rule in list(self._undiverged):
            found = find_texts(conversation.messages, rule)
            if any(number == message and match.start() <= char < match.end() for number, match in found):
                self._undiverged.remove(rule)
                logger.warning(
                    "a line such as '%s' changes within a conversation, which costs %d tokens a turn; "
                    "use --normalize-prefix %s",
                    rule.example,
                    num_lost,
                    rule.name,
                )
