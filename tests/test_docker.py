"""The Dockerfiles, read line by line: images are not built in tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.command import COMMANDS
from baton.entrypoints.http.health_routes import __file__ as HEALTH_ROUTES
from baton.entrypoints.server_args import build_parser
from baton.entrypoints.server_config import ServerConfig

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ("Dockerfile.cpu", "Dockerfile.cuda")


def pins(lines: list[str]) -> dict[str, str]:
    """Name -> version, of the lines that pin one."""
    return {match[1]: match[2] for line in lines if (match := re.match(r"([\w-]+)==([\w.*]+)$", line))}


def instructions(name: str) -> list[tuple[str, str]]:
    """(Keyword, the rest) of each instruction, lines that continue joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    found = [line.split(" ", 1) for line in joined.splitlines() if line.strip()]
    return [(keyword, rest) for keyword, rest in found]


def last(name: str, keyword: str) -> str:
    return [rest for found, rest in instructions(name) if found == keyword][-1]


def pip_installs(name: str) -> list[str]:
    return [rest for keyword, rest in instructions(name) if keyword == "RUN" and "pip install" in rest]


def copied(name: str) -> list[str]:
    """What comes from the repository."""
    copies = (rest for keyword, rest in instructions(name) if keyword == "COPY" and not rest.startswith("--from"))
    return [source for rest in copies for source in rest.split()[:-1]]


def let_through(path: str) -> bool:
    """By .dockerignore, whose last matching line counts; here all begin with `*`, and then name single exceptions."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line == "*":
            ignored = True
        elif line == f"!{path}":
            ignored = False
    return not ignored


@pytest.mark.parametrize("name", FILES)
def test_copied_files_exist_and_reach_the_build(name: str) -> None:
    sources = copied(name)
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and let_through(source), source
    folders = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values())
    assert {folder.split("/")[0] for folder in folders} <= set(sources), "the wheel needs every layer"
    assert {"pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]} <= set(sources)


def test_nothing_else_reaches_the_build() -> None:
    exceptions = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert exceptions == {source for name in FILES for source in copied(name)}
    assert not let_through(".git") and not let_through("tests") and not let_through(".env")


def test_cpu_image_has_the_tested_versions() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    (torch,) = re.findall(r'"torch==([\w.]+)\+cpu"', " ".join(pip_installs("Dockerfile.cpu")))
    assert torch == constraints["torch"]
    assert all("-c /tmp/constraints.txt" in line for line in pip_installs("Dockerfile.cpu"))
    assert last("Dockerfile.cpu", "ARG") == "TORCH_INDEX=https://download.pytorch.org/whl/cpu"


def test_cuda_image_has_the_versions_of_the_extra() -> None:
    extra = pins(PROJECT["optional-dependencies"]["cuda"])
    (torch,) = re.findall(r'"torch==([\w.*]+)"', " ".join(pip_installs("Dockerfile.cuda")))
    assert torch == extra["torch"]
    assert not any("constraints" in line for line in pip_installs("Dockerfile.cuda")), "those have another torch"
    major, minor = re.findall(r"^nvidia/cuda:(\d+)\.(\d+)\.\d+-devel-ubuntu", last("Dockerfile.cuda", "FROM"))[0]
    assert last("Dockerfile.cuda", "ARG") == f"TORCH_INDEX=https://download.pytorch.org/whl/cu{major}{minor}"
    assert f"CUDA {major}" in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_package_comes_with_the_index_of_its_torch(name: str) -> None:
    lines = pip_installs(name)
    assert len(lines) == 2 and all('--extra-index-url "${TORCH_INDEX}"' in line for line in lines)
    (extras,) = re.findall(r"\*\.whl\)\[([\w,]+)\]", lines[-1])
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert name.removeprefix("Dockerfile.") in extras.split(",")


@pytest.mark.parametrize("name", FILES)
def test_python_of_the_images_is_a_tested_one(name: str) -> None:
    tested = {line.split(" :: ")[-1] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    versions = set(re.findall(r"python:?(3\.\d+)", (ROOT / "docker" / name).read_text()))
    assert len(versions) == 1 and versions <= tested, "the wheel is built by the Python that installs it"


@pytest.mark.parametrize("name", FILES)
def test_container_starts_a_server_that_others_can_reach(name: str) -> None:
    program, command, *flags = json.loads(last(name, "ENTRYPOINT"))
    assert program in PROJECT["scripts"] and command == "serve" and command in COMMANDS
    args = build_parser().parse_args([*flags, "--model-path", "/model"])
    assert vars(args)["host"] == "0.0.0.0" and "port" not in vars(args), "it listens on the default port"
    assert last(name, "EXPOSE") == str(ServerConfig().port)
    assert json.loads(last(name, "CMD")) == ["--help"], "without a model it explains itself"


@pytest.mark.parametrize("name", FILES)
def test_health_is_checked_on_the_port_of_the_server(name: str) -> None:
    options, command = last(name, "HEALTHCHECK").split(" CMD ")
    assert f"--start-period={ServerConfig().ready_timeout / 60:g}m" in options, "as long as a start may take"
    command = json.loads(command)
    compile(command[-1], "healthcheck", "exec")
    (port, path) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1])[0]
    assert port == str(ServerConfig().port) and f'"{path}"' in Path(HEALTH_ROUTES).read_text()
    assert command[:2] == ["python", "-c"], "the slim image has no curl"


@pytest.mark.parametrize("name", FILES)
def test_server_does_not_run_as_root(name: str) -> None:
    steps = instructions(name)
    user = next(index for index, (keyword, _) in enumerate(steps) if keyword == "USER")
    uid, gid = steps[user][1].split(":")
    assert uid.isdigit() and gid.isdigit() and int(uid) > 0, "a number: Kubernetes checks it"
    assert any(keyword == "RUN" and f"useradd --uid {uid} " in rest for keyword, rest in steps[:user])
    assert not any(keyword in ("RUN", "COPY", "FROM") for keyword, _ in steps[user:])
    (home,) = re.findall(r"HOME=(\S+)", last(name, "ENV"))[:1]
    assert last(name, "WORKDIR") == home


def test_images_differ_only_where_devices_do() -> None:
    def common(name: str) -> list[tuple[str, str]]:
        steps = instructions(name)
        return steps[next(index for index, (_, rest) in enumerate(steps) if "useradd" in rest) :]

    assert common(FILES[0]) == common(FILES[1])
