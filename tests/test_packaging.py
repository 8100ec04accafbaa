"""What is in the folders is what is installed, and the layers hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")


def folders_with_code() -> set[str]:
    found = set()
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            found.add("baton." + ".".join(file.parent.relative_to(ROOT).parts))
    return found


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_is_a_listed_package() -> None:
    project = pyproject()
    assert set(project["tool"]["setuptools"]["packages"]) == folders_with_code()


def test_typing_links_lead_to_the_layers() -> None:
    links = {link.name: link.resolve() for link in (ROOT / ".typing" / "baton").iterdir()}
    assert links == {layer: ROOT / layer for layer in LAYERS}


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a stale build/ folder would end up in the wheel
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, source / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    expected = {f"baton/{file.relative_to(ROOT)}" for layer in LAYERS for file in (ROOT / layer).rglob("*.py")}
    assert packed == expected
    page = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("baton/entrypoints/dashboard/page/")}
    files = (ROOT / "entrypoints/dashboard/page").rglob("*.*")
    assert page == {f"baton/{file.relative_to(ROOT)}" for file in files}
    templates = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".jinja")}
    files = (ROOT / "entrypoints/chat/bundled_templates").iterdir()
    assert templates == {f"baton/{file.relative_to(ROOT)}" for file in files} and len(templates) > 1
    marked = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("py.typed")}
    assert marked == {f"baton/{layer}/py.typed" for layer in LAYERS}


def test_newest_section_of_the_changelog_is_the_version() -> None:
    sections = re.findall(r"^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [(name, date) for name, date in sections if name != "Unreleased"]
    assert released[0][0] == pyproject()["project"]["version"]
    assert all(date for _, date in released), "a release has a date"
    assert released == sorted(released, key=lambda entry: entry[1], reverse=True)


def test_the_cuda_extra_brings_the_torch_that_its_kernels_were_built_for() -> None:
    """sglang-kernel 0.4.4 loads into torch 2.11 alone; constraints.txt, which has the torch of CPUs, must not keep pip
    from it."""
    extra = pyproject()["project"]["optional-dependencies"]["cuda"]
    assert "torch==2.11.*" in extra and "sglang-kernel==0.4.4" in extra
    constrained = {re.split("[=<>]", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "torch" in constrained and "sglang-kernel" not in constrained
    page = (ROOT / "docs/gpu.md").read_text()
    (install,) = re.findall(r"^\S*pip install .*cuda.*$", page, re.MULTILINE)
    assert "-e '.[cuda]'" in install and "-c constraints.txt" not in install.split("#")[0]


def make_targets(file: str) -> list[str]:
    return re.findall(r"^\s*(?:- run: )?(make \S+)$", (ROOT / file).read_text(), re.MULTILINE)


def test_hosted_ci_runs_the_targets_of_the_local_one() -> None:
    assert make_targets(".github/workflows/ci.yml") == make_targets(".ci/run") == ["make check", "make test"]


def test_pre_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checked = re.findall(r"\$\(BIN\)/([^&\n]*[^&\s])", recipe[1])
    hooks = re.findall(r"^ +entry: \.venv/bin/(.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert hooks == checked and len(hooks) == 4
