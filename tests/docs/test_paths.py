"""What the documentation names is there: files, modules, pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.doubles.doc_pages import PAGES, PAGES_OF_EXAMPLES, ROOT, name_of, prose

EVERY_PAGE = PAGES + PAGES_OF_EXAMPLES
FILE = re.compile(r"(?<![\w/.…*-])(?:\.\./)*((?:[\w*-]+/)*[\w*]+\.py)\b")
"""`path/file.py`, `file.py`, or with a * in it."""
MODULE = re.compile(r"python -m ((?:benchmarks|examples|baton)[\w.]*\w)(?![\w.<])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return [Path(name) for name in listed.stdout.splitlines()]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_files_named_in_docs_exist(page: Path, files: list[Path]) -> None:
    """A path counts from the root, from the page, or from the folder that its section is about (then its end must be
    that of a real file)."""
    named = {name for name in FILE.findall(page.read_text()) if "NAME" not in name}  # NAME is the reader's
    missing = [name for name in sorted(named) if not any(file.match(name) for file in files)]
    assert not missing, f"{name_of(page)} names files that are not there: {missing}"


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_modules_named_in_docs_exist(page: Path) -> None:
    for module in set(MODULE.findall(page.read_text())):
        path = ROOT / module.removeprefix("baton.").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"no module {module}"


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_links_in_docs_resolve(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page.read_text())):
        file = page if not target else (page.parent / target).resolve()
        assert file.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name_of(page)} links to {target}#{anchor}: no such heading"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
