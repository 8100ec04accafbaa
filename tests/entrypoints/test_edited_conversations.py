"""Conversations whose middle, end or first line changes, on the toy model: each request finds exactly the tokens that
it shares with any earlier one, whichever branch that belongs to. The requests have the shapes that Claude Code, Codex
and opencode send; the words are ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.transcripts import Message, tool, user

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "16384", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
RULES = "claude-code-billing,claude-code-tokens-left,dates"
MAX_TOKENS = 12


@dataclass
class Harness:
    """Sends requests, and knows by its own count which tokens each may find. computed: the tokens of all requests whose
    KV was computed: the prompt, and the output but its last token. page: tokens."""

    server: ServerUnderTest
    log: Path
    page: int
    computed: list[list[int]] = field(default_factory=list)

    def send(self, path: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the answer, its record), with the tokens found compared with the count."""
        before = len(self.records())
        answer = self.server.client.post(path, json={"model": "toy", "temperature": 0} | body)
        assert answer.status_code == 200, answer.text
        self.server.wait_until(lambda: len(self.records()) > before, "the record of the request")
        record = self.records()[-1]
        ids = record["input_ids"]
        shared = max((len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, old)))) for old in self.computed),
                     default=0)  # fmt: skip
        expected = min(shared, len(ids) - 1)
        # A handoff takes over the last page, too, which no other request finds.
        assert expected // self.page * self.page <= record["cached_tokens"] <= expected, (expected, record)
        self.computed.append(ids + record["output_ids"][:-1])
        return answer.json(), record | {"shared": expected}

    def chat(self, *messages: Message, **fields: Any) -> tuple[str, dict[str, Any]]:
        answer, record = self.send(
            "/v1/chat/completions", messages=list(messages), max_tokens=MAX_TOKENS, **fields
        )  # fmt: skip
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"]
        return choice["message"]["content"], record | choice["baton"] | details

    def records(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line for line in lines if "input_ids" in line]

    def divergences(self) -> dict[str, float]:
        lines = re.findall(
            r'conversation_divergences_total\{kind="(\w+)".*\} ([\d.]+)', self.server.client.get("/metrics").text
        )
        return {kind: float(count) for kind, count in lines}

    def new_kinds(self, before: dict[str, float]) -> dict[str, float]:
        now = self.divergences()
        return {kind: count - before.get(kind, 0) for kind, count in now.items() if count != before.get(kind, 0)}


@pytest.fixture(scope="module", params=["1", pytest.param("64", marks=pytest.mark.slow)], ids=["page 1", "page 64"])
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("server")
    flags = (*FLAGS, "--page-size", request.param, "--record-requests", str(folder / "log"))
    with ServerUnderTest(TOY_MODEL, folder, *flags, "--normalize-prefix", RULES, behaviour=None) as running:
        yield Harness(running.wait_ready(), folder / "log", int(request.param))


@pytest.fixture
def harness(pages: Harness) -> Harness:
    """With an empty cache."""
    assert pages.server.client.post("/flush_cache").status_code == 200
    pages.computed.clear()
    return pages


def said(words: str) -> Message:
    return {"role": "assistant", "content": words}


def turns(harness: Harness, *words: str, **fields: Any) -> list[Message]:
    """A conversation of some turns; every second message of ours is a tool's."""
    messages: list[Message] = []
    for number, each in enumerate(words):
        messages.append(tool(each) if number % 2 else user(each))
        text, record = harness.chat(*messages, **fields)
        if number:
            assert record["continuation"]["path"] == "handoff"
        messages.append(said(text))
    return messages


def test_cut_tool_output_goes_on_from_the_cut_and_both_branches_stay(harness: Harness) -> None:
    whole = turns(harness, "Which files are here?", "notes.txt\nmanual.md\n" * 8, "Which is the largest?")
    before = harness.divergences()
    cut = [*whole[:2], tool("notes.txt\nmanual.md\n[cut]"), *whole[3:], user("And the smallest?")]
    text, record = harness.chat(*cut, return_cache_report=True)
    found = record["cache_report"]["divergence"]
    assert (found["kind"], found["message"], found["role"]) == ("messages", 2, "tool")
    assert (found["token"], found["char"]) == (record["shared"], len("notes.txt\nmanual.md\n"))
    assert found["now"][8:].startswith("[cut]") and found["was"][8:].startswith("notes.txt") and found["message_token"]
    assert record["shared"] > len(harness.computed[0]) and harness.new_kinds(before) == {"messages": 1}
    _, record = harness.chat(*cut, said(text), user("Thanks."))
    assert record["continuation"]["path"] == "handoff", "the edited conversation goes on as any other"
    _, record = harness.chat(*whole, user("And the smallest?"))
    assert record["shared"] >= len(harness.computed[2]), "the whole first branch is still there"


def test_regenerated_first_answer_finds_the_whole_prompt(harness: Harness) -> None:
    _, first = harness.chat(user("How many lines are in manual.md?"))
    before = harness.divergences()
    _, again = harness.chat(user("How many lines are in manual.md?"), temperature=1, seed=5)
    assert again["cached_tokens"] >= (first["input_tokens"] - 1) // harness.page * harness.page
    assert harness.new_kinds(before) == {"regenerated": 1}


def test_regenerated_later_answer_forks_at_the_last_user_turn(harness: Harness) -> None:
    whole = turns(harness, "How many lines are in manual.md?", "12 manual.md", "Which file is the largest?")
    asked = harness.records()[-1]["input_tokens"]
    before = harness.divergences()
    other, again = harness.chat(*whole[:-1], logit_bias={str(harness.computed[-1][asked]): -100})
    assert other != whole[-1]["content"]
    assert again["shared"] == asked - 1 and again["input_tokens"] == asked
    assert harness.new_kinds(before) == {"regenerated": 1}
    for answer in (whole[-1]["content"], other):
        _, record = harness.chat(*whole[:-1], said(answer), user("Thanks."))
        assert record["shared"] >= asked, "each branch finds its own answer"


def test_edited_last_message_and_switch_back(harness: Harness) -> None:
    whole = turns(harness, "How many lines are in draft.md?", "31 draft.md", "Which file is the largest one here?")
    before = harness.divergences()
    edited = [*whole[:-2], user("Which file is the smallest one here?")]
    text, record = harness.chat(*edited)
    assert record["shared"] > harness.records()[-2]["input_tokens"] - 16
    assert harness.new_kinds(before) == {"messages": 1}
    harness.chat(*edited, said(text), user("Go on."))
    _, back = harness.chat(*whole, user("Thanks."))
    assert back["shared"] >= len(harness.computed[2])


def test_conversation_that_branches_many_times_finds_its_trunk(harness: Harness) -> None:
    trunk = turns(harness, "How many lines are in draft.md?", "31 draft.md")
    for number in range(20):
        _, record = harness.chat(*trunk, user(f"Question {number}: which file?"))
        assert record["shared"] >= len(harness.computed[1])


# -- Claude Code -------------------------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.%s; cc_entrypoint=cli; cch=%s;"
LEFT = "<total_tokens>%d tokens left</total_tokens>"


def block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def claude(harness: Harness, messages: list[dict[str, Any]], first: str, left: str = "", **fields: Any) -> Any:
    """first: a line of the system prompt."""
    system = [block(text) for text in (first, "You are an agent that answers questions about files.", left) if text]
    answer, record = harness.send("/v1/messages", messages=messages, system=system, max_tokens=MAX_TOKENS, **fields)
    return answer, record


def tool_turn(number: int, output: str) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"t{number}", "name": "Bash", "input": {"command": f"cat {number}.txt"}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": output}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def opening(words: str, day: int = 24) -> dict[str, Any]:
    reminder = f"<system-reminder>\n# currentDate\nToday's date is 2026-11-{day}.\n</system-reminder>"
    return {"role": "user", "content": [block(reminder), block(words)]}


def test_claude_code_with_a_billing_line_and_midnight_finds_every_turn(harness: Harness) -> None:
    first, record = claude(harness, [opening("Read it")], BILLING % ("f03", "a1"))
    assert set(first["baton"]["normalized_prefix"]) == {"claude-code-billing"}
    messages = [opening("Read it", day=25), {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": "And now?"}]  # fmt: skip
    second, record = claude(harness, messages, BILLING % ("2a7", "b2"))
    assert second["baton"]["continuation"]["path"] == "handoff"
    assert set(second["baton"]["normalized_prefix"]) == {"claude-code-billing", "dates"}
    assert record["shared"] >= len(harness.computed[0]) - 1


def test_claude_code_countdown_costs_the_moved_line_and_the_answer_only(harness: Harness) -> None:
    first, record = claude(harness, [opening("Read it")], "Be brief.", LEFT % 91234)
    moved = first["baton"]["normalized_prefix"]["claude-code-tokens-left"]
    asked = record["input_ids"]
    messages = [opening("Read it"), {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": "And now?"}]  # fmt: skip
    _, record = claude(harness, messages, "Be brief.", LEFT % 80001)
    opened = {"prompt": "<|im_end|>\n<|im_start|>assistant\n"}
    behind = harness.server.client.post("/tokenize", json=opened).json()["count"]
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(asked, record["input_ids"]))))
    assert shared == record["shared"]
    assert len(asked) - behind - moved - 1 <= shared <= len(asked) - behind, "all but the line, and a break before it"


def test_cleared_tool_results_go_on_from_the_first_cleared_one(harness: Harness) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 3},
            "keep": {"type": "tool_uses", "value": 1}}  # fmt: skip
    fields: dict[str, Any] = {"context_management": {"edits": [edit]}}
    messages = [opening("Read all files")]
    cleared: list[int] = []
    for number in range(7):
        messages += tool_turn(number, f"line {number} of the file\n" * 6)
        answer, record = claude(harness, messages, BILLING % (number, number), **fields)
        applied = answer["context_management"]["applied_edits"]
        cleared.append(applied[0]["cleared_tool_uses"] if applied else 0)
        if number and cleared[-1] == cleared[-2]:
            assert record["shared"] > harness.records()[-2]["input_tokens"] - 16, "all of the last prompt"
    assert cleared == [0, 0, 0, 3, 3, 3, 6]
    _, record = claude(harness, messages[:7], BILLING % ("x", "y"), **fields)
    assert record["shared"] >= len(harness.computed[2]) - MAX_TOKENS, "the prompt before the edit is still there"


def test_compacted_claude_code_session_keeps_its_system_prompt(harness: Harness) -> None:
    session: dict[str, Any] = {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "compacted"})}}
    messages = [opening("Read all files"), *tool_turn(1, "one"), *tool_turn(2, "two")]
    claude(harness, messages, BILLING % (1, 1), **session)
    summarise = {"role": "user", "content": "Your task is to create a summary of the conversation so far."}
    before = harness.divergences()
    claude(harness, [*messages[:-1], {"role": "user", "content": [*messages[-1]["content"], block("Now"),
                                                                    block(summarise["content"])]}],
           BILLING % (1, 2), **session)  # fmt: skip
    continued = opening("This session is being continued from a previous conversation. Files one and two were read.")
    _, record = claude(harness, [continued], BILLING % (1, 3), **session)
    assert record["shared"] > 20 and harness.new_kinds(before).get("history") == 1
    _, record = claude(harness, [continued, *tool_turn(3, "three")], BILLING % (1, 4), **session)
    assert record["shared"] >= harness.records()[-2]["input_tokens"] - 1


# -- Codex -------------------------------------------------------------------------------------------------------------


def item(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def codex(harness: Harness, items: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    date = "  <current_date>2026-11-24</current_date>\n"
    environment = f"<environment_context>\n  <cwd>/w</cwd>\n{date}</environment_context>"
    given = [item("developer", "You are an agent."), item("user", environment), *items]
    return harness.send("/v1/responses", input=given, store=False, max_output_tokens=MAX_TOKENS, prompt_cache_key="k")


def test_compacted_codex_session_keeps_what_stands_before_it(harness: Harness) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command":"ls"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "notes.txt\nmanual.md"}
    items = [item("user", "Which files are here?"), call, output]
    codex(harness, items[:1])
    codex(harness, items)
    compacted = [items[0], item("user", "Another model has worked on this. Its summary: two files were listed.")]
    _, record = codex(harness, compacted)
    assert record["shared"] >= harness.records()[-3]["input_tokens"] - 8
    _, record = codex(harness, [*compacted, item("user", "Go on")])
    assert record["shared"] > harness.records()[-2]["input_tokens"] - 8
    _, record = codex(harness, items)
    assert record["shared"] == record["input_tokens"] - 1, "the branch before the compaction"


# -- opencode ----------------------------------------------------------------------------------------------------------


def test_opencode_session_goes_on_after_midnight(harness: Harness) -> None:
    def system(day: str) -> Message:
        return {
            "role": "system",
            "content": f"You are opencode.\n<env>\n  Platform: linux\n  Today's date: {day}\n</env>",
        }

    text, _ = harness.chat(system("Tue Nov 24 2026"), user("Which files are here?"))
    _, record = harness.chat(system("Wed Nov 25 2026"), user("Which files are here?"), said(text), tool("notes.txt"))
    assert record["continuation"]["path"] == "handoff" and set(record["normalized_prefix"]) == {"dates"}
    _, record = harness.chat(system("Wed Nov 25 2026"), user("Which files are there?"))
    assert "normalized_prefix" not in record, "a new conversation has the new date"


# -- the same by hand --------------------------------------------------------------------------------------------------


def test_prompts_under_rules_equal_those_normalized_by_hand(harness: Harness) -> None:
    def tokens(*messages: Message) -> list[int]:
        return harness.server.client.post("/tokenize", json={"messages": list(messages)}).json()["tokens"]

    billed = {"role": "system", "content": f"{BILLING % (1, 2)}\nBe brief.\n{LEFT % 500}"}
    _, record = harness.chat(billed, user("Hi"), said("Hello"), user("And?"))
    plain = [{"role": "system", "content": "Be brief.\n"}, user("Hi"), said("Hello"), user(f"And?\n{LEFT % 500}")]
    assert record["input_ids"] == tokens(*plain) == tokens(billed, user("Hi"), said("Hello"), user("And?"))
