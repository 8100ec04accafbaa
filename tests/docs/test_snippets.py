"""Every snippet of the documentation works: shell and Python blocks run against a live server on the toy model.

A block that cannot run here has the comment `<!-- not run: REASON -->` on the line above it, which GitHub does not
show. Where a `json` or `text` block follows directly, it shows what the snippet prints, and is compared: in it `…`
stands for anything, and so do times.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.lang import set_default_backend
from tests.doubles.doc_pages import PAGES, ROOT, Fence, count_marks, name_of, read_fences
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.shown_output import compare_output, differences, matches

RUN = ("bash", "python")
TIMEOUT_S = 30
DOCUMENTED_ADDRESS = "localhost:30000"
NAME = "examples/toy_model"
"""What the pages serve, by its path from the root."""
FLAGS = ("--max-total-tokens", "16384", "--dtype", "float32", "--device", "cpu", "--served-model-name", NAME)
COMMANDS = re.compile(r"^(\$ )?(curl|python|pip|make|baton|baton-server) ", re.MULTILINE)


def snippets(page: Path) -> list[Fence]:
    return [fence for fence in read_fences(page.read_text()) if fence.language in RUN]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with ServerUnderTest(ROOT / NAME, tmp_path_factory.mktemp("server"), *FLAGS, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the snippets run: like the repository's root, but what they write is thrown away."""
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    set_default_backend(None)  # a snippet sets one, for the whole process


@pytest.mark.process
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=name_of)
def test_snippets_run(page: Path, server: ServerUnderTest, folder: Path) -> None:
    assert server.client.post("/flush_cache").status_code == 200  # counts of cached tokens begin at 0 on every page
    fences = read_fences(page.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for fence, following in zip(fences, [*fences[1:], None]):
        if fence.language not in RUN or fence.not_run is not None:
            continue
        where = f"{name_of(page)}:{fence.line}"
        code = fence.text.replace(DOCUMENTED_ADDRESS, f"127.0.0.1:{server.port}")
        printed = run_shell(code, where) if fence.language == "bash" else run_python(code, where, names)
        if following is not None and following.language in ("json", "text") and not following.follows:
            compare_output(following, printed, where)


def run_shell(code: str, where: str) -> str:
    """What it prints. A refusal by the server is a failure, as is any command that ends with another status than 0."""
    settings = 'set -euo pipefail; curl() { command curl --fail-with-body -sS "$@" && echo; }\n'
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        ["bash", "-c", settings + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # bash and what it started
        process.communicate()
        pytest.fail(f"{where} was not done within {TIMEOUT_S} s; say `<!-- not run: it takes minutes -->` if it may")
    assert process.returncode == 0, f"{where} ended with {process.returncode}:\n{printed}\n{errors}"
    return printed


def run_python(code: str, where: str, names: dict[str, Any]) -> str:
    """What it prints; later snippets of the page see its names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_not_run_marks_give_a_reason_above_a_snippet(page: Path) -> None:
    marked = [fence for fence in read_fences(page.read_text()) if fence.not_run is not None]
    assert len(marked) == count_marks(page.read_text()), "a mark has to stand on the line above its block"
    for fence in marked:
        assert fence.language in RUN, f"line {fence.line}: only {RUN} blocks are run, so this one needs no mark"
        assert fence.not_run, f"line {fence.line}: say why it is not run: <!-- not run: it needs a GPU -->"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_unexecuted_blocks_contain_no_commands(page: Path) -> None:
    for fence in read_fences(page.read_text()):
        if fence.language not in RUN:
            assert not COMMANDS.search(fence.text), f"line {fence.line}: make it a bash block"


def test_output_comparison_detects_differences() -> None:
    real = {"id": "cmpl-7", "n": 3, "e2e_latency": 0.5, "items": [{"score": -0.25}]}
    assert not differences({"id": "cmpl-…", "n": 3, "e2e_latency": 9, "items": [{"score": -0.251}]}, real, "answer")
    assert not differences({"n": 3, "…": 0}, real, "answer")
    assert differences({"n": 3}, real, "answer")
    assert differences({"n": 4, "…": 0}, real, "answer") == ["answer.n: the page shows 4, the answer is 3"]
    assert differences({"items": [{"score": -0.3}], "…": 0}, real, "answer")
    assert differences({"gone": 1, "…": 0}, real, "answer") == ["answer.gone: not in the answer"]
    assert matches("a … c", "a b c") and not matches("a … c", "a b d")


def test_fences_and_marks_are_parsed() -> None:
    page = "<!-- not run: it needs a GPU -->\n```bash\nfalse\n```\n\n"
    page += "```text\nno\n```\n<!-- not run -->\n```python\n1\n```\n"
    shell, text, python = read_fences(page)
    assert (shell.language, shell.text, shell.line, shell.not_run) == ("bash", "false\n", 2, "it needs a GPU")
    assert (text.language, text.follows, text.not_run) == ("text", "", None)
    assert (python.not_run, python.line) == ("", 10)
    assert count_marks(page) == 2
    with pytest.raises(AssertionError, match="ended with 1"):
        run_shell("false", "here")
