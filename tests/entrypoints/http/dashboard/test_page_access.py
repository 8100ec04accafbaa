"""Accessibility of the page: axe-core, contrast, the keyboard, less motion, narrow screens, both themes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import PageUnderTest

pytestmark = pytest.mark.process

Open = Callable[..., PageUnderTest]
SCHEMES = ("light", "dark")


def violations(shown: PageUnderTest) -> list[str]:
    """Findings of axe-core, with its best practices."""
    sync_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = sync_playwright.Axe().run(shown.page).response["violations"]
    return [f"{each['id']}: {node['html'][:200]} {node['failureSummary']}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_busy_page_has_no_axe_violations(scheme: str, busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url, color_scheme=scheme).wait_live()
    shown.wait_tree()
    shown.wait("document.querySelectorAll('.life').length > 5")
    shown.page.locator("#tree-scene canvas").click(position={"x": 30, "y": 50})
    shown.page.locator(".life >> nth=0").click()
    shown.page.locator(".tree-item[tabindex='0']").focus()
    shown.page.keyboard.press("ArrowDown")
    shown.wait("!document.querySelector('#tip').hidden && !document.querySelector('#life-detail').hidden")
    assert violations(shown) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_key_form_empty_paused_and_offline_pages_have_no_axe_violations(scheme: str, open_page: Open) -> None:
    with FakeDashboard(scenes.hello(), scenes.update()) as dashboard:
        dashboard.key = "sesame"
        shown = open_page(dashboard.url, allow=("401", "net::"), color_scheme=scheme)
        shown.wait_text("#connection-text", "Needs a key")
        assert violations(shown) == []
        shown.page.keyboard.type("sesame")
        shown.page.keyboard.press("Enter")
        shown.wait_text("#tree-empty", "Nothing is cached")
        shown.page.get_by_role("button", name="Pause").click()
        assert violations(shown) == []
        dashboard.stop()
        shown.wait_text("#connection-text", "Offline")
        assert violations(shown) == []


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it, of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        levels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_canvas_colours_have_sufficient_contrast(scheme: str, dashboard: FakeDashboard, open_page: Open) -> None:
    """axe-core cannot see into a canvas: text has 4.5, marks and bars 3."""
    shown = open_page(dashboard.url, color_scheme=scheme).wait_live()
    tiers = [f"{tier}-{heat}" for tier, heat in itertools.product(("device", "host", "mixed"), range(4))]
    text = [*itertools.product(("ink", "ink-figure"), [*tiers, "structure", "panel"]), ("lease-ink", "panel")]
    text += [("ink-2", "panel"), ("on-bar", "bar-prefill"), ("on-bar", "bar-decode")]
    bars = [(f"bar-{kind}", "panel") for kind in ("queued", "loading", "prefill", "decode", "retracted", "leased")]
    marks = [
        *bars,
        ("line-1", "panel"),
        ("line-2", "panel"),
        ("line-3", "panel"),
        ("accent", "panel"),
        ("bad", "panel"),
    ]
    marks += [("control-line", "panel"), ("mark-locked", "device-0"), ("mark-locked", "host-0")]
    poor = {
        pair: round(found, 2)
        for pairs, least in ((text, 4.5), (marks, 3.0))
        for pair in pairs
        if (found := contrast(shown.colour(pair[0]), shown.colour(pair[1]))) < least
    }
    assert poor == {}


def test_theme_switch_overrides_system_theme_and_persists(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url, color_scheme="light").wait_live()
    light = shown.colour("ground")
    shown.page.get_by_label("Theme").select_option("dark")
    dark = shown.colour("ground")
    assert dark != light
    shown.wait_tree()
    shown.wait("document.querySelector('#tree-scene canvas').width > 0")
    shown.page.reload()
    shown.wait_live()
    assert shown.colour("ground") == dark and shown.page.get_by_label("Theme").input_value() == "dark"
    shown.page.get_by_label("Theme").select_option("auto")
    assert shown.colour("ground") == light
    shown.page.emulate_media(color_scheme="dark")
    assert shown.colour("ground") == dark
    shown.wait_tree()
    structure = shown.colour("structure")
    shown.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.has_colour("#tree-scene canvas", structure, 0, 20, least=5000), "canvases follow"


def test_tab_key_reaches_every_section(busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url).wait_live()
    shown.wait("document.querySelectorAll('.life').length > 5")
    press = shown.page.keyboard.press
    stops = []
    for _ in range(9):
        press("Tab")
        stops.append(shown.focused())
        visible = "getComputedStyle(document.activeElement).outlineStyle"
        assert shown.page.evaluate(visible) != "none", f"the focus cannot be seen on {stops[-1]}"
    expected = [
        "Skip to the cache",
        "Pause",
        "as the system",
        "all",
        "The whole cache",
        "Running and waiting",
        "minute",
    ]
    expected += ["stage-1", "Leases, jobs and misses"]
    assert [part in stop for part, stop in zip(expected, stops, strict=True)] == [True] * 9, stops


def test_timeline_is_navigable_by_keyboard(busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url).wait_live()
    shown.wait("document.querySelectorAll('.life').length > 5")
    press = shown.page.keyboard.press
    shown.page.locator(".life[tabindex='0']").focus()
    assert shown.focused().startswith("stage-1,")
    press("ArrowRight")
    assert shown.focused().startswith("stage-2,")
    press("ArrowLeft")
    assert shown.focused().startswith("stage-1,")
    press("End")
    last = shown.page.locator(".life:focus")
    count = int(last.get_attribute("aria-setsize") or 0)
    assert last.get_attribute("aria-posinset") == str(count) and count == 20, "16 requests, 4 jobs"
    press("Enter")
    shown.wait("!document.querySelector('#life-detail').hidden")
    assert last.get_attribute("aria-selected") == "true"
    # A newer request comes in above; the focus stays with its own.
    name = shown.focused()
    busy.send_update(scenes.life("newest", [["decode", 100.0, None, 1]]), t=100.2)
    shown.wait(f"document.querySelector('.life:focus')?.ariaPosInSet === '{count + 1}'")
    assert shown.focused() == name
    press("Escape")
    shown.wait("document.querySelector('#life-detail').hidden")
    press("Home")
    assert shown.focused().startswith("newest")


def test_focused_row_keeps_focus_when_its_family_moves(busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url).wait_live()
    shown.wait("document.querySelectorAll('.life').length > 5")
    shown.page.locator(".life >> nth=4").focus()
    name = shown.focused()
    rid = name.split(",")[0]
    busy.send_update(scenes.life("its child", [["decode", 100.1, None, 1]], parent=rid), t=100.2)
    shown.wait("[...document.querySelectorAll('.life')].some((row) => row.ariaLabel.startsWith('its child'))")
    assert shown.focused() == name
    assert int(shown.page.locator(".life:focus").get_attribute("aria-posinset") or 0) < 5


def still(shown: PageUnderTest) -> dict[str, Any]:
    return shown.page.evaluate(
        """async () => {
            const before = document.querySelector("#tree-scene canvas").toDataURL();
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return { same: before === document.querySelector("#tree-scene canvas").toDataURL() };
        }"""
    )


def test_reduced_motion_is_respected(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url, reduced_motion="reduce").wait_live()
    shown.wait_tree()
    used = scenes.small_tree()["spans"]
    dashboard.send_tree(scenes.tree([[*each[:9], each[9] + 5, *each[10:]] for each in used], t=102.0))
    dashboard.send("hello", scenes.hello(version="9.9.9"))
    shown.wait_text("#model", "9.9.9")
    assert still(shown)["same"], "spans that were used do not light up"
    shown.page.locator("#tree-scene canvas").click(position={"x": 20, "y": 75})
    shown.wait_text("#crumbs", "200–500")
    assert still(shown)["same"], "the view is there at once"


@pytest.mark.parametrize("width", [390, 1280])
def test_page_does_not_overflow_horizontally(width: int, busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url, viewport={"width": width, "height": 800}).wait_live()
    shown.wait("document.querySelectorAll('.life').length > 5")
    shown.page.locator(".life >> nth=0").click()
    shown.wait("!document.querySelector('#life-detail').hidden")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = """(width) => [...document.querySelectorAll("main *, header *")].filter((each) => {
        const { left, right } = each.getBoundingClientRect();
        return right > left && (right > width + 1 || left < -1) && !each.closest(".unseen");
    }).map((each) => each.outerHTML.slice(0, 80))"""
    assert shown.page.evaluate(wide, width) == []
    if width == 1280:
        assert shown.page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "all is in sight"
