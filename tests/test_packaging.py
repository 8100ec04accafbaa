"""What is in the folders is what is installed, and the layers hold."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAYERS = ("attention", "entrypoints", "memory_pool", "radix", "runtime", "scheduler")
PACKAGED = (*LAYERS, "examples")
"""Folders that are installed."""
TOP = ROOT / "entrypoints" / "package" / "__init__.py"
"""Installed as `baton` itself."""
HELPER_FOLDERS = ("benchmarks", "docs", "examples", "tests")
EXTRAS = ("cuda", "cpu", "tiers", "remote", "learned", "tokenizers", "examples", "bench", "dev", "mutants")


def folders_with_code() -> set[str]:
    found = set()
    for layer in PACKAGED:
        for file in set((ROOT / layer).rglob("*.py")) - {TOP}:
            found.add("baton." + ".".join(file.parent.relative_to(ROOT).parts))
    return found


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_code_folder_is_a_package() -> None:
    """setup.py goes by the `__init__.py` of a folder; without one it would be missing in an installation."""
    marked = {
        f"baton.{'.'.join(f.parent.relative_to(ROOT).parts)}"
        for layer in PACKAGED
        for f in set((ROOT / layer).rglob("__init__.py")) - {TOP}
    }
    assert folders_with_code() == marked
    places = pyproject()["tool"]["setuptools"]["package-dir"]
    assert places == {"baton": "entrypoints/package"} | {f"baton.{layer}": layer for layer in PACKAGED}


def test_typing_links_point_to_the_layers() -> None:
    links = {link.name: link.resolve() for link in (ROOT / ".typing" / "baton").iterdir()}
    assert links == {layer: ROOT / layer for layer in PACKAGED}


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a stale build/ folder would end up in the wheel
    for layer in PACKAGED:
        shutil.copytree(ROOT / layer, source / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    files = {file for layer in PACKAGED for file in (ROOT / layer).rglob("*.py")} - {TOP}
    assert packed == {f"baton/{file.relative_to(ROOT)}" for file in files} | {"baton/__init__.py"}
    static = "baton/entrypoints/http/dashboard/static/"
    page = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(static)}
    files = (ROOT / "entrypoints/http/dashboard/static").rglob("*.*")
    assert page == {f"baton/{file.relative_to(ROOT)}" for file in files}
    templates = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".jinja")}
    files = (ROOT / "entrypoints/chat/bundled_templates").iterdir()
    assert templates == {f"baton/{file.relative_to(ROOT)}" for file in files} and len(templates) > 1
    marked = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("py.typed")}
    assert marked == {f"baton/{layer}/py.typed" for layer in LAYERS} | {"baton/py.typed"}
    use_wheel(wheel, tmp_path)


def use_wheel(wheel: Path, folder: Path) -> None:
    """Install it beside this environment's packages, and use it from another folder as a stranger would."""
    site = folder / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found = run("-c", f"import baton, sys; print(baton.__version__, baton.__file__, 'torch' in sys.modules)\n{USE}")
    version, file, has_torch, text = found.split(maxsplit=3)
    assert (version, file, has_torch) == (pyproject()["project"]["version"], str(site / "baton/__init__.py"), "False")
    assert "wc -l manual.md" in text
    assert "usage: baton COMMAND" in run("-m", "baton.entrypoints.command", "--help")
    assert "--model-path" in run("-m", "baton.entrypoints.command", "serve", "--help")
    (script,) = (site / "bin").glob("baton")
    assert run(str(script), "--version") == f"baton {version}\n"
    assert "The server has shut down cleanly." in run(str(script), "demo")


PROMPT = "<|im_start|>user\\nHow many lines are in manual.md?<|im_end|>\\n<|im_start|>assistant\\n"
USE = f"""
from baton import Engine
with Engine(model_path={str(ROOT / "examples" / "toy_model")!r}, device="cpu") as engine:
    print(engine.generate("{PROMPT}", {{"temperature": 0, "max_new_tokens": 16}})["text"])
"""


distributions_of_modules = cache(packages_distributions)
NOT_INSTALLED = {"flashinfer": "flashinfer-python"}
"""Distributions of modules that an environment without a GPU lacks."""


def imported_modules(*folders: str) -> set[str]:
    """Top-level modules from outside that the code in these folders imports, also lazily or for type checkers."""
    return set().union(*map(_imported_modules, folders)) - {"baton", *HELPER_FOLDERS} - set(sys.stdlib_module_names)


@cache
def _imported_modules(folder: str) -> set[str]:
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        beside = {other.stem for other in file.parent.glob("*.py")}  # scripts import each other by their bare names
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found |= {name.partition(".")[0] for name in names} - beside
    return found


def distribution_of(module: str) -> str:
    return canonical([*distributions_of_modules().get(module, []), NOT_INSTALLED.get(module, module)][0])


def canonical(requirement: str) -> str:
    """The name in a requirement as package indexes compare it."""
    return re.sub("[-_.]+", "-", re.split(r"[\[=<>!;~ ]", requirement)[0]).lower()


def declared(*extras: str) -> set[str]:
    project = pyproject()["project"]
    optional = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonical(line) for line in [*project["dependencies"], *optional]}


def test_layers_import_only_declared_distributions() -> None:
    modules = imported_modules(*LAYERS)
    assert {"starlette", "llvmlite", "torch"} <= modules
    serving = declared("cuda", "cpu", "tiers", "remote", "learned", "bench")
    assert not {distribution_of(module) for module in modules} - serving


def test_helper_folders_import_only_declared_distributions() -> None:
    assert not {distribution_of(module) for module in imported_modules(*HELPER_FOLDERS)} - declared(*EXTRAS)


USED_WITHOUT_AN_IMPORT = {
    "axe-playwright-python": "imported by name, in a test that is skipped without it",
    "fastapi-offline": "its pages are read as files",
    "httptools": "uvicorn's parser",
    "protobuf": "transformers reads SentencePiece models with it",
    "tiktoken": "transformers reads tiktoken files with it",
    "scikit-learn": "imported by name, where it is asked for",
    "sglang-kernel": "imported by name, where it is there",
    "schemathesis": "a program",
    "build": "a program",
    "import-linter": "a program",
    "pyright": "a program",
    "ruff": "a program",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "wheel": "builds wheels without isolation",
}


def test_every_declared_distribution_is_used() -> None:
    folders = (*LAYERS, *HELPER_FOLDERS)
    imported = {distribution_of(module) for module in imported_modules(*folders)} | {"setuptools"}  # setup.py
    assert declared(*EXTRAS) - imported == set(USED_WITHOUT_AN_IMPORT)


def test_serving_needs_neither_test_tools_nor_triton() -> None:
    tools = {"pytest", "ruff", "pyright", "hypothesis", "matplotlib", "playwright", "triton"}
    assert not tools & declared("cpu", "tiers") and tools <= declared("dev")
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "serve", "install"):
        assert re.search(rf"^{target}: \$\(SERVING\)", makefile, re.MULTILINE), target
    (recipe,) = re.findall(r"^\$\(SERVING\):.*\n((?:[^\n]+\n)+)", makefile, re.MULTILINE)
    assert re.findall(r"-e '\.\[(.*)\]'", recipe) == ["cpu,tiers"]


def test_newest_changelog_section_matches_the_version() -> None:
    sections = re.findall(r"^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [(name, date) for name, date in sections if name != "Unreleased"]
    assert released[0][0] == pyproject()["project"]["version"]
    assert all(date for _, date in released), "a release has a date"
    assert released == sorted(released, key=lambda entry: entry[1], reverse=True)


def test_cuda_extra_pins_the_torch_of_its_kernels() -> None:
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


def test_hosted_ci_runs_the_local_ci_targets() -> None:
    assert make_targets(".github/workflows/ci.yml") == make_targets(".ci/run") == ["make check", "make test"]


def test_pre_commit_hooks_match_make_check() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checked = re.findall(r"\$\(BIN\)/([^&\n]*[^&\s])", recipe[1])
    hooks = re.findall(
        r"^ +entry: (?:env \S+ )?\.venv/bin/(.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE
    )
    assert hooks == checked and len(hooks) == 4
