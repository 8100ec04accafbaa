"""What is in the folders is what is installed, and the layers hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")


def folders_with_code() -> set[str]:
    found = set()
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            found.add("baton." + ".".join(file.parent.relative_to(ROOT).parts))
    return found


def test_every_folder_is_a_listed_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
