"""Anthropic's diagnostics of a prompt that does not go on from an earlier message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.entrypoints.anthropic.diagnostics import Diagnostics, diagnose, read_diagnostics
from baton.entrypoints.chat.chats import Comparison
from baton.entrypoints.chat.divergence import Divergence
from baton.entrypoints.fields.ignored import Ignored
from baton.scheduler.outcome import RequestRefused

EDITED = Divergence(
    kind="messages", message=2, role="user", char=3, token=40, was="old", now="new", removed_chars=1, inserted_chars=1,
    agrees_chars=0, removed_tokens=9, inserted_tokens=9, lost_tokens=25, since="r1",
)  # fmt: skip


@pytest.mark.parametrize(
    "given, asked",
    [
        (None, None),
        ({}, Diagnostics(None)),
        ({"previous_message_id": None}, Diagnostics(None)),
        ({"previous_message_id": "msg_r1"}, Diagnostics("r1")),
        ({"previous_message_id": "r1"}, Diagnostics("r1")),
    ],
)
def test_read_diagnostics(given: Any, asked: Diagnostics | None) -> None:
    assert read_diagnostics(given, Ignored()) == asked


@pytest.mark.parametrize("given", [[], "msg_r1", {"previous_message_id": 7}])
def test_unreadable_diagnostics_are_refused(given: Any) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_diagnostics(given, Ignored())
    assert str(refused.value.param).startswith("diagnostics")


@pytest.mark.parametrize(
    "kind, type_",
    [
        ("system", "system_changed"),
        ("tools", "tools_changed"),
        ("messages", "messages_changed"),
        ("rewound", "messages_changed"),
    ],
)
def test_changes_have_a_type_and_the_tokens_that_they_cost(kind: Any, type_: str) -> None:
    told = diagnose(Diagnostics("r1"), Comparison(False, replace(EDITED, kind=kind)))
    assert told == {"cache_miss_reason": {"type": type_, "cache_missed_input_tokens": 25}}


def test_first_messages_and_continued_ones_have_no_diagnosis() -> None:
    assert diagnose(Diagnostics(None), Comparison(False, EDITED)) is None
    assert diagnose(Diagnostics(None), None) is None
    assert diagnose(Diagnostics("r1"), Comparison(True, None)) is None


def test_unknown_messages_and_unexplained_changes() -> None:
    def type_of(told: dict[str, Any] | None) -> str:
        assert told is not None
        return told["cache_miss_reason"]["type"]

    assert type_of(diagnose(Diagnostics("r9"), None)) == "previous_message_not_found"
    assert type_of(diagnose(Diagnostics("r1"), Comparison(False, None))) == "unavailable"
    for kind in ("template", "settings"):
        compared = Comparison(False, replace(EDITED, kind=kind))
        assert type_of(diagnose(Diagnostics("r1"), compared)) == "unavailable"
