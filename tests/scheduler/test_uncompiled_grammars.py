"""Requests whose grammar is still being compiled: they wait, and end, without harm to others."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from baton.runtime.constraints.grammar import GrammarConstraint, GrammarError
from tests.doubles.scheduler_harness import Harness


def uncompiled() -> tuple[GrammarConstraint, Future[Any]]:
    root: Future[Any] = Future()
    return GrammarConstraint(Future(), root, "json_schema"), root


@pytest.mark.parametrize("first", ["aborted", "failed"])
def test_requests_that_end_while_grammars_compile_harm_no_other(first: str) -> None:
    """One is aborted, and its grammar is never ready; the grammar of another fails."""
    harness = Harness()
    aborted, failed, root = uncompiled()[0], *uncompiled()
    for rid in ("aborted", "failed") if first == "aborted" else ("failed", "aborted"):
        harness.add(rid, [1, 2, 3], grammar=aborted if rid == "aborted" else failed)
    harness.add("free", [4, 5, 6], 12)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.is_compiling and not harness.outcomes["failed", 0].tokens
    harness.abort("aborted")
    root.set_exception(GrammarError("it is too deep"))
    harness.run()
    refusal = harness.outcomes["failed", 0].refusal
    assert refusal is not None and refusal.code == "invalid_grammar"
    assert len(harness.outcomes["free", 0].tokens) == 12
    assert not harness.scheduler.is_compiling


def test_output_that_may_not_be_long_enough_is_refused_once_the_grammar_is_known() -> None:
    harness = Harness()
    grammar, root = uncompiled()
    harness.add("short", [1, 2, 3], 4, grammar=grammar)
    harness.add("free", [4, 5, 6], 12)
    harness.step()
    root.set_result(SimpleNamespace(min_tokens=5))
    harness.run()
    refusal = harness.outcomes["short", 0].refusal
    assert refusal is not None and refusal.param == "max_new_tokens" and "has 5 tokens" in refusal.message
    assert len(harness.outcomes["free", 0].tokens) == 12
