"""Makes the pictures of the dashboard: docs/images/dashboard.png, and dashboard.gif, in which a program passes through.

    python -m docs.dashboard_pictures

Needs Chromium and the `dev` extra. Starts a server on the toy model, with a host tier and little memory, gives it work
for a while, and photographs its page. What is seen is what happens then; no two runs are alike.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from examples.dashboard_work import Work

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
KEY = "dashboard-pictures"
"""Text of the tree is shown to the admin key alone."""

FLAGS = [
    *("--max-total-tokens", "12288", "--host-cache-ratio", "2", "--max-leased-ratio", "0.7"),
    *("--schedule-policy", "handoff", "--conversation-ttl", "8", "--chunked-prefill-size", "64"),
    *("--device", "cpu", "--dtype", "float32", "--admin-api-key", KEY),
]
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]

WARM_UP_S, READY_S = 75.0, 60.0
PICTURE, RECORDING = {"width": 1440, "height": 900}, {"width": 1200, "height": 760}
FRAME_S, FRAMES, COLOURS = 0.125, 84, 128
MOST_BYTES = {"dashboard.png": 600_000, "dashboard.gif": 3_000_000}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Its URL, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "baton.entrypoints.launch_server", "--model-path", "examples/toy_model"]
    command += ["--port", str(port), "--served-model-name", "toy_model", *FLAGS]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not get ready; its log is above")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
        return reply.status == 200
    return False


def open_page(browser: Any, url: str, size: dict[str, int], scale: int, seconds: str) -> Any:
    """The page, live, with the timeline showing the last ``seconds``."""
    page = browser.new_context(viewport=size, device_scale_factor=scale, color_scheme="light").new_page()
    page.goto(f"{url}/dashboard")
    page.locator("#key").fill(KEY)
    page.locator("#key").press("Enter")
    page.get_by_text("Live", exact=True).first.wait_for()
    page.locator("#window").select_option(seconds)
    return page


def record(page: Any, act: threading.Thread) -> list[Image.Image]:
    """A picture every FRAME_S, from a moment before ``act`` begins."""
    frames = []
    begin = time.monotonic()
    for number in range(FRAMES):
        if number == 8:
            act.start()
        page.wait_for_timeout(max(0, 1000 * (begin + number * FRAME_S - time.monotonic())))
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    act.join()
    return frames


def save_recording(frames: list[Image.Image], file: Path) -> None:
    """One palette for all, so that what stands still does not flicker, and need not be stored again."""
    sample = Image.new("RGB", (frames[0].width, 3 * frames[0].height))
    for place, frame in enumerate((frames[0], frames[len(frames) // 2], frames[-1])):
        sample.paste(frame, (0, place * frame.height))
    palette = sample.quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [int(1000 * FRAME_S)] * (len(drawn) - 1) + [2500]
    drawn[0].save(file, save_all=True, append_images=drawn[1:], duration=times, loop=0, optimize=True)


def save_picture(content: bytes, file: Path) -> None:
    Image.open(io.BytesIO(content)).convert("RGB").quantize(192, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    from playwright.sync_api import sync_playwright  # an extra

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium; apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        page = open_page(browser, url, PICTURE, 2, "15")
        work = Work(url, agents=3, programs=3, chats=2).start()
        page.wait_for_timeout(1000 * WARM_UP_S)
        # A moment at which there is something of everything.
        page.locator("#batch-lists tbody tr").nth(2).wait_for()
        page.locator("#held-lists table").first.locator("tbody tr").nth(1).wait_for()
        save_picture(page.screenshot(), IMAGES / "dashboard.png")
        work.stop()
        page.close()

        page = open_page(browser, url, RECORDING, 1, "15")
        work = Work(url, seed=2, agents=1, programs=0, chats=1).start()
        page.wait_for_timeout(6000)
        act = threading.Thread(target=work.two_stages, args=("recommend", 2.2, random.Random(3)))
        save_recording(record(page, act), IMAGES / "dashboard.gif")
        work.stop()
        browser.close()
    for name, most in MOST_BYTES.items():
        size = (IMAGES / name).stat().st_size
        print(f"docs/images/{name}: {size / 1000:.0f} kB")
        if size > most:
            raise SystemExit(f"docs/images/{name} is larger than {most / 1000:.0f} kB; take fewer frames or colours")


if __name__ == "__main__":
    main()
