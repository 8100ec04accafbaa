"""Rooms stay small enough to be read: limits on files, classes, functions, folders, and lines of docs."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES, MAX_FILES, MAX_COLUMNS = 400, 300, 60, 16, 120


def sources() -> list[Path]:
    return [file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]


def spans(kinds: type | tuple[type, ...]) -> dict[str, int]:
    """Lines of every definition of these kinds, decorators left out."""
    found = {}
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds):
                found[f"{file.relative_to(ROOT)}:{node.name}"] = node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
    return found


def over(sizes: dict[str, int], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def test_files() -> None:
    sizes = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources()}
    assert len(sizes) > 100 and not over(sizes, MAX_FILE_LINES)


def test_classes() -> None:
    assert not over(spans(ast.ClassDef), MAX_CLASS_LINES)


def test_functions() -> None:
    assert not over(spans((ast.FunctionDef, ast.AsyncFunctionDef)), MAX_FUNCTION_LINES)


def test_folders() -> None:
    sizes: dict[str, int] = {}
    for file in sources():
        folder = str(file.parent.relative_to(ROOT))
        sizes[folder] = sizes.get(folder, 0) + 1
    assert not over(sizes, MAX_FILES)


def test_lines_of_docs() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    long = [
        f"{name}:{number}"
        for name in listed.stdout.split()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "](" not in line
    ]
    assert not long
