"""What a server takes while nobody asks it anything, with the flags it has by default."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"


def test_idle_server_uses_less_than_500_mb(tmp_path: Path) -> None:
    with ServerUnderTest(TOY_MODEL, tmp_path, "--device", "cpu", behaviour=None) as server:
        server.wait_ready()
        processes = [psutil.Process(server.process.pid), *server.children().values()]
        assert len(processes) == 3
        assert sum(process.memory_full_info().pss for process in processes) < 500e6
        assert server.metric("kv_cache_total_tokens") > 10_000, "the pool is as large as ever"
