"""docs/operations.md lists what there is: flags, metrics, error codes and log lines are compared with the code."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.entrypoints.http_statuses import STATUSES
from baton.entrypoints.server_args import build_parser
from baton.entrypoints.server_config import ChatConfig, ServerConfig
from baton.runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig
from baton.runtime.metrics import ServerMetrics
from baton.scheduler.config import SchedulerConfig
from docs.operations_tables import PAGE, TABLES, between

ROOT = Path(__file__).parents[2]
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")
OF_THE_LANGUAGE = {"aborted", "stopped"}
"""Codes of errors that no server sends."""


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables, headings left out."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in found]


def calls() -> Iterator[ast.Call]:
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))


@pytest.mark.parametrize("name", TABLES)
def test_operations_tables_are_up_to_date(name: str) -> None:
    assert between(PAGE.read_text(), name) == TABLES[name](), "run: python -m docs.operations_tables"


def test_every_flag_is_listed_with_its_default() -> None:
    listed = {cells[0]: cells[2] for cells in rows(between(PAGE.read_text(), "flags")) if cells[0].startswith("`--")}
    worker = [ModelArgs, SchedulerConfig, TierConfig, JobConfig, KVEventConfig]
    fields = [f for part in [*worker, ChatConfig, RecordingConfig, ServerConfig] for f in dataclasses.fields(part)]
    flags = {action.option_strings[0] for action in build_parser()._actions} - {"-h", "--version", "--config"}
    assert set(listed) == {f"`{flag}`" for flag in flags} == {f"`--{field.name.replace('_', '-')}`" for field in fields}
    assert listed["`--port`"] == "`30000`" and listed["`--dtype`"] == "`auto`"
    assert listed["`--disable-radix-cache`"] == "off" and listed["`--item-trie`"] == "none"
    for field in fields:
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert listed[f"`--{field.name.replace('_', '-')}`"] == f"`{field.default}`"


def test_every_metric_is_listed_with_its_type() -> None:
    rendered = dict(re.findall(r"^# TYPE (\S+) (\w+)$", ServerMetrics("any").render().decode(), re.MULTILINE))
    rendered = {name: kind for name, kind in rendered.items() if not name.endswith("_created")}
    listed = {cells[0].strip("`"): cells[1] for cells in rows(between(PAGE.read_text(), "metrics"))}
    del listed["metric"]
    assert listed == rendered and len(listed) > 20


def test_every_explained_metric_exists() -> None:
    names = {name.removeprefix("baton:") for name in re.findall(r"`(baton:\w+)`", between(PAGE.read_text(), "metrics"))}
    explained = set(re.findall(r"`(?:baton:)?(\w+_(?:total|reqs|perc))`", PAGE.read_text()))
    assert explained and explained <= names


def test_every_error_code_is_listed_with_its_status() -> None:
    """tests/entrypoints/test_http_statuses.py compares the table of statuses with the codes in the sources."""
    listed = {code.strip("`"): status for status, code, *_ in rows(section("Errors"))[1:]}
    other = {"http_error": "other"}  # the status is that of the error in HTTP itself
    assert listed == {code: str(status) for code, status in STATUSES.items()} | other


def test_language_error_codes_are_explained() -> None:
    sources = [file.read_text() for file in (ROOT / "entrypoints" / "lang").rglob("*.py")]
    assert {code for source in sources for code in re.findall(r'\bcode\s*=\s*"(\w+)"', source)} == OF_THE_LANGUAGE
    assert all(f"`{code}`" in section("Errors") for code in OF_THE_LANGUAGE)


def test_every_log_line_is_listed() -> None:
    """By the longest piece between its placeholders."""
    page, count = " ".join(section("The log").split()), 0
    missing = []
    for call in calls():
        is_log = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "logger"
        if not is_log or ast.unparse(call.func) == "logger.debug":
            continue
        count += 1
        pieces = re.split(r"%[-\d.]*\w|\n", ast.literal_eval(call.args[0]))
        longest = max((piece.strip(" ;:,(") for piece in pieces), key=len)
        if longest not in page:
            missing.append(longest)
    assert count > 15 and not missing
