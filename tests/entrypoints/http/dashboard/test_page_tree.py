"""The tree: large trees, foreign text, and a view that stays where the reader left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import PageUnderTest

pytestmark = pytest.mark.process

Open = Callable[..., PageUnderTest]
CANVAS = "#tree-scene canvas"
ROW = 21
ACTIVE = "[...document.querySelectorAll('.tree-item')].find((item) => item.tabIndex === 0)"


def point(shown: PageUnderTest, share: float, row: int) -> dict[str, Any]:
    """Where the mouse must go for a span in a row, at a share of the width."""
    width = shown.page.locator(CANVAS).bounding_box()["width"]
    return {"x": share * width, "y": row * ROW + ROW / 2}


def test_2000_spans_are_drawn(open_page: Open) -> None:
    seed = 3
    print(f"seed {seed}")
    with FakeDashboard(scenes.hello(), scenes.update(), scenes.large_tree(seed)) as dashboard:
        shown = open_page(dashboard.url).wait_live()
        shown.wait_tree()
        for tier in ("device-0", "device-3", "host-1", "lease", "mark-locked"):
            shown.wait(f"document.querySelector({CANVAS!r}).width > 0")
            assert shown.has_colour(CANVAS, shown.colour(tier), 0, 200), tier
        assert shown.elements() < 400
        shown.page.locator(CANVAS).click(position=point(shown, 0.1, 2))
        shown.wait("document.querySelectorAll('.crumb').length === 3")
        shown.wait_text("#announcer", "Zoomed to Tokens 0 to")


def test_tooltip_describes_hovered_span(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_tree("1,650 tokens in 43 nodes")
    shown.page.locator(CANVAS).hover(position=point(shown, 0.01, 3))
    shown.wait_text("#tip", "user: How many lines are in manual.md?")
    tip = " ".join(shown.text("#tip").split())
    assert "Tokens 300, from 200 to 500" in tip and "Including all below 500 (30 %)" in tip
    assert "on the device, locked" in tip and "1 time, last 2.0 s ago" in tip and "default namespace" in tip
    shown.page.keyboard.press("Escape")
    assert shown.page.locator("#tip").is_hidden()
    shown.page.locator(CANVAS).hover(position=point(shown, 0.97, 2))
    shown.wait_text("#tip", "37, each too small to show")


def test_tree_zooms_in_and_out(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_tree()
    shown.page.locator(CANVAS).click(position=point(shown, 0.01, 3))
    shown.wait_text("#crumbs", "200–500")
    crumbs = shown.page.locator(".crumb").all_inner_texts()
    assert [crumb.removeprefix("› ") for crumb in crumbs] == ["all", "default namespace", "0–200", "200–500"]
    # The zoomed span is as wide as the view: a click at its far end tells of it.
    shown.page.locator(CANVAS).hover(position=point(shown, 0.99, 3))
    shown.wait_text("#tip", "from 200 to 500")
    shown.page.get_by_role("button", name="0–200").click()
    shown.wait("document.querySelectorAll('.crumb').length === 3")
    shown.page.get_by_role("button", name="all").click()
    shown.wait("document.querySelectorAll('.crumb').length === 0")


def test_tree_is_navigable_by_keyboard(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_tree()
    shown.page.evaluate(f"{ACTIVE}.focus()")
    press = shown.page.keyboard.press
    assert shown.focused() == "The whole cache, 1,650 tokens, 2 children"
    press("ArrowDown")
    assert shown.focused() == "default namespace, 1,000 tokens, 1 child"
    press("ArrowRight")
    assert shown.focused().startswith("tenant-b, 650 tokens")
    press("ArrowDown")
    assert shown.focused() == "Tokens 0 to 400, 400 tokens including all below, on the host, being loaded"
    press("End")
    assert shown.focused() == "37 more siblings, too small to show, 250 tokens, on several tiers"
    press("ArrowRight")
    assert shown.focused().startswith("37 more"), "there is nothing further"
    press("Home")
    press("ArrowDown")
    press("ArrowDown")
    press("ArrowDown")
    assert shown.focused().startswith("Tokens 200 to 500")
    shown.wait_text("#tip", "user: How many lines")
    item = shown.page.locator(".tree-item:focus")
    told = {name: item.get_attribute(name) for name in ("role", "aria-level", "aria-setsize", "aria-posinset")}
    assert told == {"role": "treeitem", "aria-level": "4", "aria-setsize": "3", "aria-posinset": "1"}
    press("Enter")
    shown.wait_text("#crumbs", "200–500")
    assert shown.focused().startswith("Tokens 200 to 500"), "zooming keeps the focus"
    press("ArrowRight")
    assert shown.focused().startswith("Tokens 200 to 500"), "siblings are out of sight"
    press("ArrowUp")
    assert shown.focused().startswith("Tokens 0 to 200")
    shown.wait("document.querySelectorAll('.crumb').length === 3")
    press("Escape")
    shown.wait("document.querySelectorAll('.crumb').length === 2")
    assert shown.page.locator(".tree-item[tabindex='0']").count() == 1


def test_new_snapshot_keeps_zoom_and_focus(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_tree()
    shown.page.evaluate(f"{ACTIVE}.focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter", "ArrowDown"):
        shown.page.keyboard.press(key)
    assert shown.focused().startswith("Tokens 500 to 700")
    spans = scenes.small_tree()["spans"]
    # Everything has moved: another is the largest, and the one in focus has grown.
    larger = scenes.span(9, -1, 0, 5000, 5000)
    moved = [larger, *([each[0], each[1] + 1 if each[1] >= 0 else -1, *each[2:]] for each in spans)]
    moved[3] = scenes.span(3, 2, 500, 222, 222, flags="S")
    dashboard.send_tree(scenes.tree(moved))
    shown.wait_tree("6,650 tokens")
    shown.wait(f"{ACTIVE}.ariaLabel.startsWith('Tokens 500 to 722') && document.activeElement === {ACTIVE}")
    assert "200–500" in shown.text("#crumbs")
    # The focused one is evicted, then the zoomed one: the nearest above them takes their place.
    dashboard.send_tree(scenes.tree([*moved[:3], *(each for each in moved[4:])]))
    shown.wait(f"{ACTIVE}.ariaLabel.startsWith('Tokens 200 to 500') && document.activeElement === {ACTIVE}")
    dashboard.send_tree(scenes.tree([larger, scenes.span(1, -1, 0, 200, 200)]))
    shown.wait(f"{ACTIVE}.ariaLabel.startsWith('Tokens 0 to 200') && document.activeElement === {ACTIVE}")
    shown.wait("document.querySelector('.crumb[aria-current]').textContent === '0–200'")
    dashboard.send_tree(scenes.tree([]))
    shown.wait("document.querySelector('#tree-summary').textContent === ''")


def test_tree_is_filtered_by_namespace(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_tree()
    names = shown.page.locator("#namespace option").all_inner_texts()
    assert names == ["all", "default namespace", "tenant-b"]
    shown.page.locator("#namespace").select_option("tenant-b")
    shown.wait(f"{ACTIVE}.ariaLabel === 'The whole cache, 650 tokens, 2 children'")
    # Its last span is evicted: the choice stays, and is empty.
    dashboard.send_tree(scenes.tree([scenes.span(1, -1, 0, 200, 200)]))
    shown.wait(f"{ACTIVE}.ariaLabel.startsWith('The whole cache, 0 tokens')")
    assert shown.page.locator("#namespace").input_value() == "tenant-b"


def test_deep_trees_scroll(open_page: Open) -> None:
    depth = 1900
    chain = [scenes.span(each, each - 1, 10 * each, 10, 10 * (depth - each)) for each in range(depth)]
    with FakeDashboard(scenes.hello(), scenes.update(), scenes.tree(chain)) as dashboard:
        shown = open_page(dashboard.url).wait_live()
        shown.wait_tree("19K tokens")
        shown.page.evaluate(f"{ACTIVE}.focus()")
        for _ in range(40):
            shown.page.keyboard.press("ArrowDown")
        assert shown.focused().startswith("Tokens 390 to 400")
        box, item = (shown.page.locator(each).bounding_box() for each in ("#tree-scene", ".tree-item:focus"))
        assert box["y"] <= item["y"] and item["y"] + item["height"] <= box["y"] + box["height"] + 1
        assert shown.elements() < 400


def test_hostile_text_is_escaped(open_page: Open) -> None:
    seed = 5
    print(f"seed {seed}")
    shown_update, _ = scenes.busy(100.0)
    hostile = [text[:200] for text in scenes.HOSTILE]
    shown_update["running"] = [scenes.running(text, "decode", 1, 2, 1, job_id=text) for text in hostile]
    shown_update["jobs"] = [scenes.job(text, text, 1, 1, None) for text in hostile]
    tree = scenes.large_tree(seed, 400, hostile=True)
    tree["spans"][0][10] = "<b>\u202ename"
    with FakeDashboard(scenes.hello(model="/x/<i>\u202emodel</i>"), shown_update, tree) as dashboard:
        for place, text in enumerate(scenes.HOSTILE):
            phases = [["decode", 99.0, 99.5, 1], ["<u>", 99.5, None, 1]]
            life = scenes.life(text, phases, parent=hostile[place - 1], child=text, job_id=text, path="<x>", end="<e>")
            dashboard.lives[text, 0] = life
        shown = open_page(dashboard.url).wait_live()
        shown.wait_tree()
        assert shown.text("#model").startswith("i> ·") or "‹202E›" in shown.text("#model")
        names = shown.page.locator("#batch-lists tbody th bdi:first-child").all_inner_texts()
        assert names[0] == "<script>document.title='pwned'</script>"
        assert names[2] == "‹202E›exe.gnp" and names[4] == "a␀b␛c‹2028›d"
        for row in range(6):
            shown.page.locator(CANVAS).hover(position=point(shown, 0.02, row))
        shown.wait("!document.querySelector('#tip').hidden")
        shown.page.locator(".life >> nth=1").click()
        shown.wait("!document.querySelector('#life-detail').hidden")
        assert "pwned" not in shown.page.title()
        assert shown.page.evaluate("document.querySelectorAll('main script, main img, main b b, main u').length") == 0
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
