"""flash-linear-attention's own kernels, in Triton's interpreter: `make test-kernels`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.doubles.foreign_envs import ROOT, env_folder, env_python
from tests.doubles.state_steps import SCENES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["short_conv", "gated_delta", "ssd"])
def test_kernels_compute_what_torch_does(name: str) -> None:
    pytest.importorskip("triton")
    env_python("fla")
    # In this environment, with that package before its own: where it is installed, transformers would use it as well.
    packages = env_folder("fla") / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    paths = [str(packages), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "doubles" / "fla_interpreted.py"), name],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout.splitlines()[-1]) == len(SCENES)
