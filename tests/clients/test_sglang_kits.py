"""SGLang's own HTTP tests, unpatched, with model "default", on a server of the toy model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from foreign_envs import env_python
from server_under_test import ServerUnderTest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"


def test_the_api_contract(tmp_path: Path) -> None:
    python, script = env_python("sglang"), Path(__file__).parent / "sglang_kits.py"
    with ServerUnderTest(TOY_MODEL, tmp_path, "--device", "cpu", "--dtype", "float32", behaviour=None) as server:
        server.wait_ready()
        command = [python, "-W", "ignore", str(script), server.url]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert ran.returncode == 0 and "Ran 6 tests" in ran.stdout, ran.stdout + ran.stderr
