"""What is in the folders is what is installed, and the layers hold."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.doc_pages import Fence, read_fences
from tests.doubles.server_under_test import free_port
from tests.doubles.shown_output import compare_output

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


WHEEL_BLOCK = "pip wheel "
"""Begins a line of the README's block that builds, installs and tries a wheel."""
DOWNLOADS = re.compile(r"^pip install .*'torch==.*\n", re.MULTILINE)
"""The one line of that block that cannot run without a download."""
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_FORCE_REINSTALL": "1"}
"""Settings of pip with which the README's lines take everything but Baton from this environment. (pip reads a 0 for
NO_BUILD_ISOLATION as --no-build-isolation.)"""


@pytest.fixture(scope="module")
def readme() -> list[Fence]:
    return read_fences((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def newcomer(readme: list[Fence], tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """Somebody who has followed the README's lines for a wheel in an empty folder."""
    top = tmp_path_factory.mktemp("newcomer")
    source = top / "clone"  # a copy: a stale build/ folder would end up in the wheel
    for layer in PACKAGED:
        shutil.copytree(ROOT / layer, source / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (block,) = [fence.text for fence in readme if re.search(f"^{WHEEL_BLOCK}", fence.text, re.MULTILINE)]
    lines, downloads = DOWNLOADS.subn("", block)
    lines, places = re.subn(r"^CLONE=.*\n", "", lines, flags=re.MULTILINE)
    assert (downloads, places) == (1, 1), block
    someone = Newcomer(top / "empty")
    someone.folder.mkdir()
    make, install = lines.split(f"\n{WHEEL_BLOCK}")
    someone.run(make.replace("python3 ", f"{shlex.quote(sys.executable)} "))
    (site,) = someone.folder.glob(".venv/lib/*/site-packages")
    for bundled in [*site.glob("setuptools*"), *site.glob("pkg_resources")]:  # too old; pip would download others
        shutil.rmtree(bundled)
    (site / "tests.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    someone.printed = someone.run(f". .venv/bin/activate\n{WHEEL_BLOCK}{install}", OFFLINE | {"CLONE": str(source)})
    return someone


class Newcomer:
    """A shell in an empty folder, from which the repository cannot be imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        """What the installation and the demo printed."""

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(more or {})

    def run(self, code: str, more: Mapping[str, str] | None = None) -> str:
        """What the lines print. Fails the test where one of them fails; curl fails for the server's refusals, too."""
        settings = 'set -euo pipefail; curl() { command curl --fail-with-body -sS "$@" && echo; }\n'
        done = subprocess.run(
            ["bash", "-c", settings + code],
            cwd=self.folder,
            env=self.environment(more),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_inside(self, code: str) -> str:
        return self.run(f". .venv/bin/activate\n{code}")

    @contextlib.contextmanager
    def server(self, code: str, port: int) -> Iterator[None]:
        """The server that these lines start, until Ctrl-C."""
        log = self.folder / "server.log"
        with log.open("wb") as output:
            code = f". .venv/bin/activate\nexec {code}"
            command = ["bash", "-c", code]
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            while not self._is_ready(port):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()

    def _is_ready(self, port: int) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
            return reply.status == 200
        return False


@pytest.mark.process
def test_wheel_holds_every_module(newcomer: Newcomer) -> None:
    (wheel,) = (newcomer.folder / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {file for layer in PACKAGED for file in (ROOT / layer).rglob("*.py")} - {TOP}
    packed = {name for name in names if name.endswith(".py")}
    assert packed == {f"baton/{file.relative_to(ROOT)}" for file in files} | {"baton/__init__.py"}
    static = "baton/entrypoints/http/dashboard/static/"
    files = (ROOT / "entrypoints/http/dashboard/static").rglob("*.*")
    assert {name for name in names if name.startswith(static)} == {f"baton/{file.relative_to(ROOT)}" for file in files}
    templates = {name for name in names if name.endswith(".jinja")}
    files = (ROOT / "entrypoints/chat/bundled_templates").iterdir()
    assert templates == {f"baton/{file.relative_to(ROOT)}" for file in files} and len(templates) > 1
    marked = {name for name in names if name.endswith("py.typed")}
    assert marked == {f"baton/{layer}/py.typed" for layer in LAYERS} | {"baton/py.typed"}


@pytest.mark.process
def test_installed_wheel_has_its_commands(newcomer: Newcomer) -> None:
    version = pyproject()["project"]["version"]
    found = newcomer.run_inside(
        "python -c \"import baton, sys; print(baton.__version__, 'torch' in sys.modules, baton.__file__)\""
    )
    (file,) = newcomer.folder.glob(".venv/lib/*/site-packages/baton/__init__.py")
    assert found.split() == [version, "False", str(file)]
    assert "usage: baton COMMAND" in newcomer.run_inside("python -m baton.entrypoints.command --help")
    assert "--model-path" in newcomer.run_inside("baton serve --help")
    assert newcomer.run_inside("baton --version") == f"baton {version}\n"
    assert "The server has shut down cleanly." in newcomer.printed, "`baton demo` is the block's last line"
    help_text = newcomer.run_inside("python -m baton.examples.real_model --help")
    assert "python -m baton.examples.real_model [" in help_text and "python -m examples" not in help_text


@pytest.mark.process
def test_readme_works_word_for_word_from_a_wheel(readme: list[Fence], newcomer: Newcomer) -> None:
    """Every snippet that the pages' own tests run in a clone, each in a process of its own, on the README's server."""
    port = free_port()
    (serve,) = [fence.text for fence in readme if fence.text.startswith("baton serve --model-path examples/toy_model")]
    ran = []
    with newcomer.server(serve.replace("30000", str(port)), port):
        for fence, following in zip(readme, [*readme[1:], None]):
            if fence.language not in ("bash", "python") or fence.not_run is not None:
                continue
            code = fence.text.replace("localhost:30000", f"127.0.0.1:{port}")
            if fence.language == "python":
                (newcomer.folder / "snippet.py").write_text(code)
                code = "python snippet.py"
            printed = newcomer.run_inside(code)
            ran.append(fence.language)
            if following is not None and following.language in ("json", "text") and not following.follows:
                compare_output(following, printed, f"README.md:{fence.line}")
    assert set(ran) == {"bash", "python"}


distributions_of_modules = cache(packages_distributions)
NOT_INSTALLED = {"flashinfer": "flashinfer-python", "fla": "fla-core"}
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
