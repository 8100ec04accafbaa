"""The jobs of conversations that share a name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.entrypoints.chat import named_jobs
from baton.entrypoints.chat.messages import Conversation
from baton.entrypoints.chat.named_jobs import MAX_MESSAGES, NamedJobs, opening_of


def chat(*texts: str, system: str = "Be brief.") -> Conversation:
    """System message, then user and assistant in turns."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    messages += [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return Conversation(messages=messages)


def find(jobs: NamedJobs, *texts: str, scope: str = "", name: str = "key:k", client: str = "", **more: str) -> str:
    return jobs.find_job(scope, name, opening_of(chat(*texts, **more)), client)


def test_each_new_opening_is_a_new_job() -> None:
    jobs = NamedJobs()
    first = find(jobs, "Hi")
    assert first.startswith("key:k:") and [find(jobs, "Hi") for _ in range(2)] == [f"{first}-2", f"{first}-3"]
    assert find(jobs, "Hi there") not in (first, f"{first}-2", f"{first}-3")


def test_a_thousand_conversations_with_one_name_and_first_message_are_a_thousand_jobs() -> None:
    jobs = NamedJobs()
    names = [find(jobs, "Hi") for _ in range(1000)]
    assert len(set(names)) == 1000
    # Each finds its job again, by the answers that make it another than the others.
    for number, name in enumerate(names):
        jobs.record_chat("", "key:k", opening_of(chat("Hi", f"answer {number}", "Go on")), name)
    order = list(range(1000))
    random.Random(0).shuffle(order)
    for number in order:
        assert find(jobs, "Hi", f"answer {number}", "[cleared]", "Ho", "And then?") == names[number]


def test_conversations_that_are_no_nearer_are_not_compared_message_by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands with the same messages would stop the server's loop for a quarter of a second."""
    compared: list[bytes] = []
    shared = named_jobs._shared
    monkeypatch.setattr(named_jobs, "_shared", lambda one, other: compared.append(one) or shared(one, other))
    jobs, texts = NamedJobs(), [f"text {number}" for number in range(40)]
    names = [find(jobs, "text 0") for _ in range(100)]
    for number, name in enumerate(names):
        jobs.record_chat("", "key:k", opening_of(chat(*texts, f"end {number}")), name)
    assert find(jobs, *texts, "end 7", "more") == names[7] and len(compared) == 2
    assert find(jobs, *texts, "another end") == names[7], "of equals the last one used"
    assert find(jobs, *texts[:30]) == names[7] and len(compared) == 4


def test_edited_conversation_finds_its_job_by_what_is_left() -> None:
    jobs = NamedJobs()
    one, two = (find(jobs, "Hi") for _ in range(2))
    jobs.record_chat("", "key:k", opening_of(chat("Hi", "A", "result 1", "B", "result 2")), one)
    jobs.record_chat("", "key:k", opening_of(chat("Hi", "A", "result 3", "B", "result 4")), two)
    assert find(jobs, "Hi", "A", "result 1", "B", "[cleared]", "C", "Go on") == one
    assert find(jobs, "Hi", "A", "result 3", "[cleared]", "Go on") == two
    assert find(jobs, "Hi", "A", "[cleared]", "C", "Go on") == two, "of equals the last one used"


def test_only_conversation_of_a_name_is_found_whatever_was_edited() -> None:
    jobs = NamedJobs()
    only = find(jobs, "Hi")
    assert find(jobs, "Hi", "another answer", "Go on") == only
    assert find(jobs, "Hi", "another answer", "Go on", system="Today is Monday.") == only


def test_unknown_conversation_among_several_is_a_new_job() -> None:
    jobs = NamedJobs()
    several = {find(jobs, "Hi") for _ in range(2)}
    new = find(jobs, "Hi", "an unknown answer", "Go on")
    assert new not in several
    assert find(jobs, "Hi", "an unknown answer", "[cleared]", "A", "Go on") == new


def test_conversation_first_seen_in_the_middle_gets_a_job() -> None:
    jobs = NamedJobs()
    assert find(jobs, "Hi", "A", "Go on") == find(jobs, "Hi", "A", "[cleared]", "B", "Go on")


def test_scopes_and_names_do_not_share_jobs() -> None:
    jobs = NamedJobs()
    scopes = [("alice/", "key:k"), ("bob/", "key:k"), ("alice/salt", "key:k"), ("alice/", "key:l")]
    found = [find(jobs, "Hi", scope=scope, name=name) for scope, name in scopes]
    assert found[0] == found[1] == found[2] != found[3], "the scheduler tells clients and namespaces apart"
    for number, (scope, name) in enumerate(scopes):
        jobs.record_chat(scope, name, opening_of(chat("Hi", "A", "Go on")), f"job {number}")
    assert find(jobs, "Hi", "A", "Ho", scope="bob/") == "job 1"


def test_records_are_bounded_and_a_flood_forgets_its_own() -> None:
    jobs = NamedJobs(10)
    mine = [find(jobs, f"Hi {number}", scope="alice/", client="alice") for number in range(4)]
    for number in range(1000):
        find(jobs, f"Flood {number}", scope="bob/", client="bob")
        assert len(jobs) <= 10
    again = [find(jobs, f"Hi {number}", "A", "Go on", scope="alice/", client="alice") for number in range(4)]
    assert again == mine
    assert len(jobs._known) <= 10
    for number in range(1000):
        find(jobs, f"Hi {number}", scope="alice/", client="alice")
    assert len(jobs) == 10 and len(jobs._known) <= 10


def test_thoughts_ids_of_calls_and_system_messages_do_not_matter() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": {"all": True}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Monday"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]
    other = [
        messages[1],
        {"role": "assistant", "content": "", "tool_calls": [call | {"id": "2"}]},
        {"role": "system", "content": "A reminder"},
        {"role": "tool", "tool_call_id": "2", "content": "a"},
    ]
    assert opening_of(Conversation(messages=messages)) == opening_of(Conversation(messages=other))
    other[1] = {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "rm"}}]}
    assert opening_of(Conversation(messages=messages)) != opening_of(Conversation(messages=other))


def test_beginning_of_the_answer_is_no_answer() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure"}]
    assert opening_of(Conversation(messages=messages, goes_on=True)).is_new
    assert not opening_of(Conversation(messages=messages)).is_new


def deep(levels: int) -> list:
    nested: list = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "no user"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "content": "only"}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": deep(100_000)}}]}],
        [{"role": "user", "content": "x"}] * 10_000,
    ],
    ids=["system", "surrogate", "assistant", "deep", "long"],
)
def test_odd_conversations_have_an_opening(messages: list[dict[str, Any]]) -> None:
    opening = opening_of(Conversation(messages=messages))
    assert 8 <= len(opening.digests) <= 8 * MAX_MESSAGES
    assert NamedJobs().find_job("", "key:k", opening).startswith("key:k:")
