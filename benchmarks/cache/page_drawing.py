"""Measures how long the dashboard's page takes to place and draw its tree, in headless Chromium, without a GPU.

    python -m benchmarks.cache.page_drawing [--spans 2000] [--frames 240]

    place     a snapshot into rectangles: once for each that comes, every two seconds at most
    draw      all that is in view: the whole tree, and zoomed into a fifth of it, with and without spans that light up
    frames    time between the frames of a view that moves all the time; 16.7 ms is 60 a second

Prints a table, writes page_drawing.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common.measured import RESULTS, about_this_run

PAGE = Path(__file__).parents[2] / "entrypoints" / "http" / "dashboard" / "static"
VIEW = {"width": 1440, "height": 900}

_MEASURE = """async ([tree, frames]) => {
    const at = (name) => import(new URL(`${name}.js`, document.baseURI));
    const { Icicle } = await at("tree/icicle");
    const { IciclePainter, ROW } = await at("tree/icicle_paint");
    const { Scene } = await at("drawing/canvas");
    const style = getComputedStyle(document.documentElement);
    const colours = new Map();
    const theme = {
        onChange() {},
        colour(name) {
            if (!colours.has(name)) colours.set(name, style.getPropertyValue(`--${name}`).trim());
            return colours.get(name);
        },
    };
    const host = document.createElement("div");
    host.style.cssText = "position: fixed; inset: 0 0 50% 0";
    document.body.append(host);
    const scene = new Scene(host, () => {});
    const painter = new IciclePainter(theme);
    let icicle;
    const times = (count, call) => {
        const begin = performance.now();
        for (let each = 0; each < count; each++) call(each);
        return (performance.now() - begin) / count;
    };
    const found = { place: times(50, () => (icicle = new Icicle(tree, "*"))) };
    scene.setSpace(icicle.rows.length * ROW);
    const dark = new Map();
    const lit = new Map([...icicle.byKey.keys()].map((key) => [key, 0.5]));
    // Reading a pixel waits until all has been drawn.
    const draw = (view, lights) => {
        painter.paint(scene, icicle, view, { hovered: null, lit: lights });
        scene.context.getImageData(0, 0, 1, 1);
    };
    for (const [name, view] of [["whole", { from: 0, to: 1 }], ["zoomed", { from: 0.1, to: 0.3 }]]) {
        found[`draw ${name}`] = times(100, () => draw(view, dark));
        found[`draw ${name}, lit`] = times(100, () => draw(view, lit));
    }
    const gaps = [];
    await new Promise((done) => {
        let last = null;
        const step = (now) => {
            if (last !== null) gaps.push(now - last);
            last = now;
            const share = gaps.length / frames;
            painter.paint(scene, icicle, { from: 0.5 * share, to: 1 - 0.4 * share }, { hovered: null, lit });
            if (gaps.length < frames) requestAnimationFrame(step);
            else done();
        };
        requestAnimationFrame(step);
    });
    gaps.sort((one, other) => one - other);
    found["frames, median"] = gaps[Math.floor(gaps.length / 2)];
    found["frames, 95 % within"] = gaps[Math.floor(gaps.length * 0.95)];
    return found;
}"""


def snapshot(spans: int, seed: int = 3) -> dict[str, Any]:
    """A tree event: conversations of some turns on six shared prompts."""
    draw = random.Random(seed)
    parents, starts, own = [-1] * 6, [0] * 6, [draw.randint(300, 2000) for _ in range(6)]
    while len(own) < spans:
        parent = draw.randrange(max(0, len(own) - 400), len(own)) if draw.random() < 0.7 else draw.randrange(6)
        parents.append(parent)
        starts.append(starts[parent] + own[parent])
        own.append(1 + int(draw.lognormvariate(4.5, 1)))
    subtree = list(own)
    for place in range(spans - 1, 5, -1):
        subtree[parents[place]] += subtree[place]
    rows = []
    for place, (parent, start, tokens, whole) in enumerate(zip(parents, starts, own, subtree, strict=True)):
        tier, flags = "host" if place % 5 == 4 else "device", "LS" if place % 9 == 8 else ""
        text = f"turn {place}: how many lines are in manual.md?"
        namespace = "" if parent < 0 else None
        idle = draw.lognormvariate(3, 2)
        rows.append([place, parent, start, tokens, whole, 1, tier, flags, idle, 3, namespace, text])
    return {"t": 1.0, "took": 0.0, "nodes": spans, "tokens": sum(subtree[:6]), "complete": True, "spans": rows}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def files() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(PAGE)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def measure(spans: int, frames: int) -> dict[str, Any]:
    """Milliseconds."""
    from playwright.sync_api import sync_playwright  # an extra

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium; apt-get install chromium")
    with files() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=VIEW)  # type: ignore[arg-type]
        page.goto(f"{url}/index.html")
        page.add_style_tag(url=f"{url}/base.css")
        found = page.evaluate(_MEASURE, [snapshot(spans), frames])
        browser.close()
        return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spans", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=240)
    arguments = parser.parse_args()
    found = measure(arguments.spans, arguments.frames)
    for name, value in found.items():
        print(f"{name:>22} {value:8.2f} ms")
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {**about_this_run("cpu"), "spans": arguments.spans, "ms": found}
    (RESULTS / "page_drawing.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
