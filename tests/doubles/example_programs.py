"""Programs that several test modules run."""

from __future__ import annotations

from baton.entrypoints.lang import ProgramState, function, gen


@function
def two_stages(s: ProgramState, question: str) -> str:
    s += question
    s += gen("thought", max_tokens=8, stop="|")
    s += " so "
    s += gen("answer", temperature=0.5)
    return "returned"
