"""Every refusal has a status: the codes in the sources are those of the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from baton.entrypoints.http_statuses import STATUSES, status_of
from baton.scheduler.outcome import RequestRefused

ROOT = Path(__file__).parent.parent.parent


def codes() -> Iterator[tuple[str, str]]:
    """The codes that refusals are made with, each with the place."""
    for folder in ("scheduler", "runtime", "entrypoints"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                if node.func.id not in ("RequestRefused", "RequestError", "UnservedTool", "ForeignField"):
                    continue
                for keyword in node.keywords:
                    if keyword.arg == "code":
                        for part in ast.walk(keyword.value):
                            if isinstance(part, ast.Constant):
                                yield str(part.value), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_error_codes_and_statuses_correspond() -> None:
    found = dict(codes())
    assert len(found) > 50
    unknown = {code: place for code, place in found.items() if code not in STATUSES}
    assert not unknown, unknown
    unused = STATUSES.keys() - found.keys()
    assert unused <= {"invalid_request"}, unused


def test_pure_layers_name_no_status() -> None:
    assert not hasattr(RequestRefused("no"), "status")
    assert status_of(RequestRefused("no")) == 400
    assert status_of(RequestRefused("no", code="queue_full")) == 429
