"""One Chromium for a file's tests; a page that complains in its console fails its test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import CHROMIUM_FLAGS, PageUnderTest

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def plain_page(browser: Any) -> Iterator[PageUnderTest]:
    """For tests that ask nothing of the browser. Each has a server, and so an origin, of its own."""
    page = PageUnderTest(browser, {})
    yield page
    page.close()


@pytest.fixture
def open_page(browser: Any, plain_page: PageUnderTest) -> Iterator[Callable[..., PageUnderTest]]:
    """open_page(url, **options of the browser's context); ``allow``: parts of complaints that the test provokes."""
    own: list[PageUnderTest] = []

    def opener(url: str, allow: tuple[str, ...] = (), **options: Any) -> PageUnderTest:
        if options:
            own.append(PageUnderTest(browser, options))
        return (own[-1] if own else plain_page).goto(url, allow)

    yield opener
    complaints = [page.complaints for page in (*own, plain_page)]
    plain_page.goto("about:blank")
    for page in own:
        page.close()
    assert complaints == [[] for _ in complaints]


@pytest.fixture
def dashboard() -> Iterator[FakeDashboard]:
    """A server with a small tree at which nothing is going on."""
    with FakeDashboard(scenes.hello(), scenes.update(), scenes.small_tree()) as running:
        yield running


@pytest.fixture
def busy() -> Iterator[FakeDashboard]:
    """A server in full swing."""
    shown, lives = scenes.busy(100.0)
    with FakeDashboard(scenes.hello(), shown, scenes.large_tree(seed=7, count=240)) as running:
        running.lives = {(life["rid"], life["index"]): life for life in lives}
        yield running
