"""A child ends with its lifeline, also in the middle of a poll."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from baton.runtime.channels import Endpoints
from baton.runtime.launcher.child_process import DetokenizerProcess

ROOT = Path(__file__).parents[3]

CHILD = """
import sys
import baton.runtime.detokenizer as module
from baton.runtime.launcher.child_process import DetokenizerProcess, run_child

class Receiver(module.Receiver):
    def poll(self, timeout_s):
        print("polling", flush=True)
        return super().poll(3600.0)

module.Receiver = Receiver

def run(child, stop):
    module.run_detokenizer(None, child.endpoints, stop)

sys.exit(run_child("child", DetokenizerProcess, run))
"""


def test_lifeline_end_interrupts_a_poll(tmp_path: Path) -> None:
    """A child that is still polling after its grace is ended with status 1."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    _, failure_fd = pipe = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(failure_fd,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    endpoints = Endpoints.for_processes(tmp_path)
    config = DetokenizerProcess(
        endpoints=endpoints, parent_pid=os.getpid(), failure_fd=failure_fd, tokenizer_path="unused"
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"polling\n"
        for path in tmp_path.iterdir():  # the launcher removes the run directory once all are connected
            path.unlink()
        process.stdin.close()
        assert process.wait(60) == 0
    for fd in pipe:
        os.close(fd)
