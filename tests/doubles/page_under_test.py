"""The dashboard's page in a browser: what is on it, and what it complained about."""

from __future__ import annotations

import time
from typing import Any

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_S = 10


class PageUnderTest:
    """``page`` is Playwright's. ``complaints``: warnings, errors (violations of the policy are some) and exceptions,
    but those that contain a text of ``allow``."""

    def __init__(self, browser: Any, options: dict[str, Any]) -> None:
        """options: of the browser's context."""
        self._allowed: tuple[str, ...] = ()
        self.complaints: list[str] = []
        self._context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        self._context.set_default_timeout(1000 * WAIT_S)
        self.page = self._context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self._complain(f"{error} {error.stack}"))

    def goto(self, url: str, allow: tuple[str, ...] = ()) -> PageUnderTest:
        """Open a page of another server, with nothing left of what an earlier page stored."""
        self.complaints, self._allowed = [], allow
        self.page.goto(url)
        return self

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._complain(f"{message.type}: {message.text}")

    def _complain(self, text: str) -> None:
        if not any(part in text for part in self._allowed):
            self.complaints.append(text)

    def close(self) -> None:
        self._context.close()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait_text(self, selector: str, part: str) -> None:
        """Until the text of an element, without what is hidden in it, contains it."""
        self.wait(f"document.querySelector({selector!r})?.innerText.includes({part!r})")

    def wait(self, expression: str) -> None:
        """Until an expression of JavaScript is true. (Playwright's own wait is an eval in the page, which its policy
        forbids.)"""
        deadline = time.monotonic() + WAIT_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"not true within {WAIT_S} s: {expression}\n{self.complaints}"
            self.page.wait_for_timeout(20)

    def wait_live(self) -> PageUnderTest:
        self.wait_text("#connection-text", "Live")
        return self

    def wait_tree(self, part: str = "tokens in") -> None:
        """Until the tree's summary contains a text, and the tree that it describes has been drawn."""
        self.wait_text("#tree-summary", part)
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def rows(self) -> list[str]:
        """What the timeline says of each request, from the top."""
        told = self.page.evaluate(
            "[...document.querySelectorAll('.life')].map((row) => [row.ariaPosInSet, row.ariaLabel])",
        )
        return [label for _, label in sorted(told, key=lambda row: int(row[0]))]

    def wait_rows(self, count: int) -> list[str]:
        self.wait(f"document.querySelectorAll('.life').length === {count}")
        return self.rows()

    def focused(self) -> str:
        """Name of the element that has the keyboard: its label, or its text."""
        return self.page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent")

    def elements(self) -> int:
        return self.page.evaluate("document.querySelectorAll('*').length")

    def colour(self, name: str) -> str:
        """A colour of the style sheet in the theme that is on, as #rrggbb."""
        return self.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")

    def has_colour(self, canvas: str, colour: str, top: float, bottom: float, least: int = 1) -> bool:
        """Whether a canvas has at least so many pixels of this colour between two heights, in CSS pixels from its
        upper edge. (The edges of letters are of many colours.)"""
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        return self.page.evaluate(
            """([canvas, top, bottom, least, ...wanted]) => {
                const drawn = document.querySelector(canvas);
                const scale = drawn.width / drawn.clientWidth;
                const copy = new OffscreenCanvas(drawn.width, drawn.height);
                const pen = copy.getContext("2d", { willReadFrequently: true });
                pen.drawImage(drawn, 0, 0);
                const { data } = pen.getImageData(0, top * scale, drawn.width, Math.max(1, (bottom - top) * scale));
                let found = 0;
                for (let at = 0; at < data.length; at += 4) {
                    if (wanted.every((level, part) => Math.abs(data[at + part] - level) < 3)) found++;
                }
                return found >= least;
            }""",
            [canvas, top, bottom, least, red, green, blue],
        )
