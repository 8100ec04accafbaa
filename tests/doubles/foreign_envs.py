"""Virtual environments of programs that are tried with Baton: each has its own, in build/envs, with pinned versions.

    python tests/doubles/foreign_envs.py NAME…      builds those that are missing or out of date

NAME.txt in tests/gateways/requirements lists all packages of one. They are installed without dependencies, so nothing
depends on the day of the build. Those in `SHARING` also see the packages of Baton's own environment, behind their own:
torch and transformers are not installed twice.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "tests" / "gateways" / "requirements"
SHARING = ("lm-eval", "sglang")


def env_folder(name: str) -> Path:
    return ROOT / "build" / "envs" / name


def is_built(name: str) -> bool:
    stamp = env_folder(name) / ".installed"
    return stamp.exists() and stamp.read_text() == (REQUIREMENTS / f"{name}.txt").read_text()


def env_python(name: str) -> str:
    """The interpreter of an environment. Skips the test where it is not built."""
    if not is_built(name):
        import pytest

        pytest.skip(f"build/envs/{name} is not built; make test-gateways, test-clients and test-kernels build them")
    return str(env_folder(name) / "bin" / "python")


def build(name: str) -> None:
    folder = env_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if name in SHARING:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shared = [path for path in sys.path if path.endswith("-packages")] or [sysconfig.get_path("purelib")]
        (folder / "lib" / version / "site-packages" / "zz_shared.pth").write_text("\n".join(shared) + "\n")
    requirements = REQUIREMENTS / f"{name}.txt"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "-r", str(requirements)]
    subprocess.run(pip, check=True)
    (folder / ".installed").write_text(requirements.read_text())


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        if not is_built(wanted):
            print(f"building build/envs/{wanted}", flush=True)
            build(wanted)
