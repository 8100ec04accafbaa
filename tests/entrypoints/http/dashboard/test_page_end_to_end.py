"""The page beside a real server: what programs and agents do is seen, and a restart on the same port is survived."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.doubles.page_under_test import PageUnderTest
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[4] / "examples" / "toy_model"
KEY = "sesame"
FLAGS = ("--max-total-tokens", "4096", "--device", "cpu", "--dtype", "float32", "--admin-api-key", KEY)
TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
SUFFIX = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"


def started(folder: Path, port: int = 0) -> ServerUnderTest:
    return ServerUnderTest(TOY_MODEL, folder, *FLAGS, behaviour=None, port=port)


def test_page_follows_two_stage_requests_and_a_restart(tmp_path: Path, open_page: Callable[..., PageUnderTest]) -> None:
    with started(tmp_path) as server:
        server.wait_ready()
        shown = open_page(f"{server.url}/dashboard", allow=("status of 401", "net::", "status of 503"))
        shown.wait_text("#connection-text", "Needs a key")
        shown.page.keyboard.type(KEY)
        shown.page.keyboard.press("Enter")
        shown.wait_live()
        greedy = {"temperature": 0, "max_new_tokens": 16}
        parent = server.generate(rid="stage-1", text=TASK, retain_ttl=30, sampling_params=greedy)
        assert parent.status_code == 200, parent.text
        shown.wait_text("#held-lists", "stage-1")
        shown.wait("document.querySelector('.life')?.ariaLabel.includes('leased now')")
        assert shown.rows()[0].startswith("stage-1, ")
        child = server.generate(
            rid="stage-2", continuation_of="stage-1", continuation_suffix=SUFFIX, sampling_params=greedy
        )
        assert child.json()["meta_info"]["continuation"]["path"] == "handoff"
        # The policy has made a job of the two.
        shown.wait("document.querySelector('.life')?.ariaLabel.startsWith('job stage-1:')")
        shown.wait("document.querySelectorAll('.life')[1]?.ariaLabel.endsWith('handed off to stage-2')")
        told = "stage-2, continues stage-1"
        shown.wait(f"document.querySelectorAll('.life')[2]?.ariaLabel.startsWith('{told}')")
        # Where an admin key guards it, the tree has text.
        shown.wait_tree()  # more than the one of the answer that made it ready
        shown.page.locator(".tree-item[tabindex='0']").focus()
        shown.page.keyboard.press("ArrowDown")
        shown.wait("document.querySelector('.tree-item:focus').ariaLabel.startsWith('default namespace')")
        shown.page.keyboard.press("ArrowDown")
        shown.wait("document.querySelector('.tree-item:focus').ariaLabel.includes('How many lines')")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        shown.wait_text("#connection-text", "Offline")
        port = server.port
    with started(tmp_path, port) as server:
        server.wait_ready()
        shown.wait_live()
        shown.wait_text("#announcer", "restarted")
        shown.wait("![...document.querySelectorAll('.life')].some((row) => row.ariaLabel.includes('stage-'))")
        httpx.post(f"{server.url}/generate", json={"rid": "again", "text": TASK}, timeout=30).raise_for_status()
        shown.wait("document.querySelector('.life')?.ariaLabel.startsWith('again, ')")
