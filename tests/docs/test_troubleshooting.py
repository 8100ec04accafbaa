"""The messages that docs/troubleshooting.md quotes are in the sources, and docs/install.md names what there is."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from baton.entrypoints.http_statuses import STATUSES
from baton.entrypoints.server_args import build_parser

ROOT = Path(__file__).parents[2]
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
PLACEHOLDER = "\0"


@cache
def literals() -> tuple[str, ...]:
    """Every string of the sources but docstrings; what is filled in is a PLACEHOLDER, be it by {} or by %."""
    found = []
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            tree = ast.parse(file.read_text())
            skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                    found.append(re.sub(r"%[-\d.]*[sdgr]", PLACEHOLDER, node.value))
    return tuple(found)


def is_printed(quoted: str) -> bool:
    """Whether one string of the sources holds the quoted message; each … stands for what is filled in, or for more."""
    pieces = quoted.split("…")
    return any(_has_in_order(literal, pieces) for literal in literals())


def _has_in_order(text: str, pieces: list[str]) -> bool:
    end = 0
    for piece in pieces:
        at = text.find(piece, end)
        if at < 0:
            return False
        end = at + len(piece)
    return True


def messages() -> list[str]:
    """The first cell of each row, without what stands behind the message."""
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]
    return [row.removeprefix("| ").split("` (")[0].split("` in `")[0].strip("`") for row in rows]


@pytest.mark.parametrize("message", messages())
def test_quoted_messages_are_those_of_the_sources(message: str) -> None:
    assert sum(map(len, message.split("…"))) >= 10, "short enough to be found anywhere"
    assert is_printed(message)


def test_warning_in_the_text_is_quoted_as_it_is_logged() -> None:
    (warning,) = re.findall(r"^`(--host .*?)` is a warning", PAGE, re.MULTILINE)
    assert is_printed(warning)


def test_messages_of_no_source_are_noticed() -> None:
    assert len(messages()) > 30
    for wrong in (
        "cannot listen at …:…: …; use another --port",
        "unknown flags …",
        "use another --port … cannot listen",
    ):
        assert not is_printed(wrong)


def test_statuses_are_those_of_the_errors() -> None:
    shown = {int(status) for status in re.findall(r"` \((\d{3})\) \|", PAGE)}
    assert shown and shown <= set(STATUSES.values())


@pytest.mark.parametrize("page", [PAGE, INSTALL], ids=["troubleshooting", "install"])
def test_flags_on_the_pages_exist(page: str) -> None:
    own = set(build_parser()._option_string_actions)
    of_others = {"--extra-index-url", "--gpus", "--no-deps", "--rm", "--output"}
    of_bench = {"--base-url", "--num-prompts", "--random-input-len", "--random-output-len"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert named and not named - own - of_others - of_bench


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = INSTALL.split("| extra | brings |")[1].split("\n\n")[0]
    assert {name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z]+)`", line.split("|")[1])} == set(
        extras
    )


def test_installed_versions_are_the_tested_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = (ROOT / "constraints.txt").read_text()
    (torch,) = re.findall(r"'torch==([\d.]+)\+cpu'", INSTALL)
    assert f"torch=={torch}\n" in constraints
    assert f"baton_serve-{project['version']}-py3-none-any.whl" in INSTALL
    assert "Python 3.11 or newer" in INSTALL and project["requires-python"] == ">=3.11"
