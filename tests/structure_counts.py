"""Counts of what makes the code hard to search or to follow; `python tests/structure_counts.py` prints them.

tests/test_structure_counts.py bounds those for which a bound makes sense. The others are for comparing two commits:
a number that could only be met by bending the code is not worth meeting.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("memory_pool", "radix", "scheduler", "attention", "runtime", "entrypoints")
PURE_LAYERS = ("memory_pool", "radix", "scheduler")
BESIDE_THE_SERVER = ("entrypoints/lang/", "entrypoints/simulate/", "entrypoints/analyze/")

_PARTS = "pins|tiers|offload|leases|continuations|cache_statistics|cache|speculation"
_REACH = re.compile(rf"\bscheduler\.(?:_[a-z]\w*|(?:{_PARTS})\b)")
_PERSON = re.compile(r"\b(?:who|whose|whom|nobody|somebody|everybody)\b", re.IGNORECASE)
_RIDDLE = re.compile(r"(?:Of|What|Whether|That of|Whose|Those)\b")
_READING_LIST = re.compile(r"<!-- reading list -->\n(.*?)\n\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    path: str
    """Relative to the checkout."""
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def sources(folders: tuple[str, ...] = LAYERS) -> list[Source]:
    """The Python files of these folders that git tracks."""
    command = ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {path: (ROOT / path).read_text() for path in paths if (ROOT / path).is_file()}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def is_server(path: str) -> bool:
    """False for the language, the simulator, the log analysis and the Numba kernels."""
    return not path.startswith(BESIDE_THE_SERVER) and "numba" not in path


def methods_by_name(files: list[Source]) -> Counter[str]:
    """How many classes define a method of each name; dunders are left out, and a property's setter counts once."""
    names: Counter[str] = Counter()
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
                names.update(name for name in methods if not name.startswith("__"))
    return names


def reaches_through_the_scheduler(files: list[Source]) -> list[str]:
    """Where runtime and entrypoints use a part of the scheduler in place of a method of its own."""
    return [
        f"{file.path}:{number}: {line.strip()}"
        for file in files
        if file.path.startswith(("runtime/", "entrypoints/"))
        for number, line in enumerate(file.text.splitlines(), 1)
        if _REACH.search(line) and "import" not in line
    ]


def callbacks_of_pure_layers(files: list[Source]) -> list[str]:
    """Parameters of constructors in the pure layers that take a function, which may call back into the owner."""
    return [
        f"{file.path}:{argument.lineno}: {node.name}({argument.arg})"
        for file in files
        if file.path.startswith(PURE_LAYERS)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for argument in (*method.args.args, *method.args.kwonlyargs)
        if argument.annotation is not None and "Callable" in ast.unparse(argument.annotation)
    ]


def docstrings(files: list[Source]) -> Iterator[tuple[str, str]]:
    """(where, text) of modules, classes, functions and attributes."""
    for file in files:
        for node in ast.walk(file.tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            for item in body:
                value = item.value if isinstance(item, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield f"{file.path}:{item.lineno}", value.value.strip()


def unclear_docstrings(files: list[Source]) -> list[str]:
    """Docstrings that treat code as a person, or begin with a word that hides the subject."""
    return [
        f"{where}: {text.splitlines()[0]}"
        for where, text in docstrings(files)
        if _PERSON.search(text) or _RIDDLE.match(text)
    ]


def reading_list() -> list[str]:
    """The files that docs/tour.md names as the way of a plain request, in its order."""
    found = _READING_LIST.search((ROOT / "docs/tour.md").read_text())
    return [] if found is None else re.findall(r"`([\w/]+\.py)`", found[1])


def main() -> None:
    files = sources()
    server = [file for file in files if is_server(file.path)]
    print(f"server: {len(server)} files, {sum(file.num_lines for file in server):,} lines")
    lines = {file.path: file.num_lines for file in files}
    way = reading_list()
    print(f"the way of a plain request: {len(way)} files, {sum(lines.get(path, 0) for path in way):,} lines")
    unclear = unclear_docstrings(files)
    print(f"docstrings: {len(list(docstrings(files))):,}, unclear: {len(unclear)}")
    print(f"reaches through the scheduler: {len(reaches_through_the_scheduler(files))}")
    print(f"callbacks of the pure layers: {len(callbacks_of_pure_layers(files))}")
    frequent = [f"{name} {count}" for name, count in methods_by_name(files).most_common() if count > 10]
    print(f"method names with more than 10 definitions: {', '.join(frequent)}")


if __name__ == "__main__":
    main()
