"""A server that is started, restarted and closed; a small one in a process of its own."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.models import write_tokenizer
from benchmarks.hybrids.chat import Completions
from benchmarks.hybrids.engines import Contender
from benchmarks.hybrids.servers import start_servers
from benchmarks.peers.engines import LARGE, Room

SMALL_SERVER = """
import http.server, json, pathlib, signal, sys
log, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
number = len(log.read_text().splitlines()) if log.exists() else 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.do_GET()
        self.wfile.write(json.dumps({"path": self.path, "ended before": number}).encode())
    def log_message(self, *_):
        pass
def end(number, _):
    log.open("a").write(signal.Signals(number).name + "\\n")
    sys.exit()
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True, kw_only=True)
class SmallEngine(Contender):
    name = "small"
    ready_path = "/health"
    calls: list[Any] = field(default_factory=list)

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        return [sys.executable, "-c", SMALL_SERVER, str(self.files / "ended"), str(port)]

    def before_stop(self, completions: Completions) -> None:
        self.calls.append(("save", completions.post("/save", {})["ended before"]))

    def after_start(self, completions: Completions) -> None:
        self.calls.append(("restore", completions.post("/restore", {})["ended before"]))


class BrokenEngine(SmallEngine):
    name = "broken"

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no such model')"]


class AbsentEngine(SmallEngine):
    name = "absent"
    flag = "--absent"


@pytest.mark.process
def test_client_saves_before_a_restart_and_restores_after_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    small = SmallEngine(python=sys.executable, context=100, files=tmp_path)
    broken = BrokenEngine(python=sys.executable, context=100, files=tmp_path)
    absent = AbsentEngine(python=None, context=100, files=tmp_path)
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        servers = start_servers([small, broken, absent], tmp_path, tmp_path / "work", skipped, stack)
        assert [server.engine for server in servers] == [small]
        assert skipped["absent"] == "no --absent names the python of its environment"
        assert "ended with status 1\nno such model" in skipped["broken"]
        assert small.calls == []
        servers[0].restart()
        assert small.calls == [("save", 0), ("restore", 1)]
        assert servers[0].completions.post("/other", {}) == {"path": "/other", "ended before": 1}
    assert (tmp_path / "ended").read_text().split() == ["SIGTERM", "SIGINT"]
