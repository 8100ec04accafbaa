"""The page shows what the server sends: its state, what arrives, what passes from request to request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import PageUnderTest

pytestmark = pytest.mark.process

Open = Callable[..., PageUnderTest]
ROW, AXIS = 22, 22


def test_panels_show_server_state(busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url).wait_live()
    shown.wait_tree()
    assert "toy_model · 8,192 tokens" in shown.text("#model")
    assert "72 % of 8,192" in shown.text("#tile-kv")
    for words in ("locked 1,340", "private 692", "leased 1,160", "evictable 2,700", "free 2,300"):
        assert words in " ".join(shown.text("#tile-kv").split())
    assert "37 % of 16.4K" in shown.text("#tile-host")
    batch = shown.text("#batch-lists")
    assert "chat-41" in batch and "700 / 1,400" in batch and "beams" in batch and "for its parent" in batch
    held = shown.text("#held-lists")
    assert "stage-2" in held and "claimed" in held and "agent-1" in held
    assert shown.text("#held-lists h3 >> nth=0").split() == ["Leases", "3"]
    shown.page.locator(".life-job[aria-label^='job agent-3']").click()  # so that the others are in sight
    spoken = "agent-2/10, queued, prefill in 3 chunks, decoding, retracted"
    shown.wait(f"[...document.querySelectorAll('.life')].some((row) => row.ariaLabel.startsWith('{spoken}'))")


def test_empty_server_shows_first_steps(open_page: Open) -> None:
    with FakeDashboard(scenes.hello(), scenes.update()) as dashboard:
        shown = open_page(dashboard.url).wait_live()
        shown.wait_text("#tree-empty", "Nothing is cached yet")
        assert f"curl -s {dashboard.url.removesuffix('/dashboard')}/generate" in shown.text("#tree-empty")
        assert "Requests appear here" in shown.text("#lives-empty")
        dashboard.send_update(scenes.life("first", [["prefill", 100.0, None, 9]]), t=100.2)
        shown.wait("document.querySelector('#tree-empty').hidden")
        assert shown.wait_rows(1) == ["first, prefill in 1 chunk now"]


def test_misses_are_listed_with_their_place(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.wait_text("#held-lists", "No miss")
    evicted = ["evicted", 30, 60, 3.0, "<b>large</b>"]
    missed = [evicted, ["diverged", 90, 29, None, None], ["required", 119, 1, None, None]]
    old = scenes.life("old", [["prefill", 90.0, 91.0, 9]], missed=[["unseen", 0, 119, None, None]])
    new = scenes.life("new", [["prefill", 100.0, None, 9]], cached=30, missed=missed)
    dashboard.send_update(old, new, t=100.2)
    shown.wait_text("#held-lists", "89 / 120")
    held = " ".join(shown.text("#held-lists").split())
    assert "60 evicted from 30 on, 3.0 s before, for <b>large</b>; 29 diverged from 90 on" in held
    assert "old" not in held and "required" not in held
    marks = "[...document.querySelectorAll('.places i')].map((mark) => [mark.style.left, mark.style.width].join())"
    assert shown.page.evaluate(marks) == ["25%,50%", "75%,24.2%"]


def test_disabled_radix_cache_is_shown(open_page: Open) -> None:
    with FakeDashboard(scenes.hello(radix_cache=False), scenes.update()) as dashboard:
        shown = open_page(dashboard.url).wait_live()
        shown.wait_text("#tree-empty", "--disable-radix-cache")


def test_new_request_is_shown_through_its_phases(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    queued = scenes.waiting("r1", "queued", 120, 0.1)
    dashboard.send_update(scenes.life("r1", [["queued", 100.0, None, 0]]), t=100.1, waiting=[queued])
    assert shown.wait_rows(1) == ["r1, queued now"]
    assert "r1" in shown.text("#batch-lists")
    running = scenes.running("r1", "prefill", 64, 120, 0)
    phases = [["queued", 100.0, 100.2, 0], ["prefill", 100.2, 100.4, 64], ["prefill", 100.4, None, 56]]
    stats = scenes.stats(running=1)
    dashboard.send_update(scenes.life("r1", phases), t=100.5, waiting=[], running=[running], stats=stats)
    shown.wait_text("#batch-lists", "64 / 120")
    assert shown.rows() == ["r1, queued, prefill in 2 chunks now"]
    finished = [*phases[:2], ["prefill", 100.4, 100.5, 56], ["decode", 100.5, 101.0, 16]]
    dashboard.send_update(scenes.life("r1", finished, end="stop"), t=101.0, running=[], stats=scenes.stats())
    shown.wait_text("#batch-lists", "Nothing is computed")
    assert shown.rows() == ["r1, queued, prefill in 2 chunks, decoding, stopped"]
    assert shown.text(".life-state") == "done"


def test_handoff_is_shown_from_parent_to_child(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    before, after, child = scenes.handoff(107.0)
    lease = scenes.lease(1, "stage-1", 30.0)
    dashboard.send_update(before, t=106.0, leases=[lease], num_leases=1)
    assert shown.wait_rows(1) == ["stage-1, queued, prefill in 2 chunks, decoding, leased now, stopped"]
    assert "stage-1" in shown.text("#held-lists") and shown.text(".life-state") == "leased"
    violet, canvas = shown.colour("lease"), "#lives-scene canvas"
    under = AXIS + ROW - 3, AXIS + ROW  # where the line to a child comes down
    assert shown.has_colour(canvas, violet, AXIS + ROW / 2 - 3, AXIS + ROW / 2 + 3)
    assert not shown.has_colour(canvas, violet, *under)

    dashboard.send_update(after, child, t=107.3, leases=[], num_leases=0)
    parent_row, child_row = shown.wait_rows(2)
    assert parent_row.endswith("leased, stopped, handed off to stage-2")
    assert child_row == "stage-2, continues stage-1, queued, prefill in 1 chunk, decoding now"
    assert "No lease" in shown.text("#held-lists")
    shown.page.locator(".life >> nth=0").click()
    shown.wait_text("#life-detail", "Handed off to stage-2")
    # The chosen row is tinted; the line is drawn over it.
    assert shown.has_colour(canvas, violet, *under)
    shown.page.get_by_role("button", name="Handed off to stage-2").click()
    shown.wait_text("#life-detail", "KV handed over")
    assert shown.page.locator(".life[aria-selected=true]").get_attribute("aria-label") == child_row


def test_job_requests_fold_into_one_row(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    steps = [
        scenes.life(f"step-{number}", [["decode", 100.0 + number, 101.0 + number, 5]], job_id="agent-1", end="stop")
        for number in range(3)
    ]
    other = scenes.life("other", [["decode", 99.0, 100.0, 5]], job_id="agent-2", end="stop")
    dashboard.send_update(*steps, other, t=104.0)
    rows = shown.wait_rows(5)
    assert rows[0] == "job agent-1, 3 requests, unfolded" and rows[4] == "other, decoding, stopped, of job agent-2"
    assert shown.text("#lives-summary") == "4 requests"
    canvas, green = "#lives-scene canvas", shown.colour("bar-decode")
    assert not shown.has_colour(canvas, green, AXIS, AXIS + ROW), "each step in its own row"
    shown.page.locator(".life-job").click()
    assert shown.wait_rows(2) == ["job agent-1, 3 requests, folded", rows[4]]
    assert shown.has_colour(canvas, green, AXIS, AXIS + ROW), "all steps in one row"
    assert shown.text("#lives-summary") == "4 requests"
    shown.page.locator(".life-job").focus()
    shown.page.keyboard.press("ArrowRight")
    shown.wait_rows(5)
    shown.page.keyboard.press("ArrowRight")
    assert shown.focused().startswith("step-0")
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("Enter")
    shown.wait_rows(2)


def test_kv_cache_chart_scale_follows_the_data(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    for second in range(1, 5):
        dashboard.send_update(t=100.0 + second, stats=scenes.stats(free=7992, evictable=200))
    shown.wait_text("#tile-kv", "scale to 250")
    assert shown.has_colour("#tile-kv canvas", shown.colour("use-evictable"), 15, 46), "no line at the bottom"
    dashboard.send_update(t=106.0, stats=scenes.stats(free=100, evictable=8092))
    shown.wait_text("#tile-kv", "scale to 8,192")


def test_charts_of_states_and_windows_are_shown_for_models_with_them(dashboard: FakeDashboard, open_page: Open) -> None:
    optional = ("states", "host-states", "window", "host")
    shown = open_page(dashboard.url).wait_live()
    shown.wait("!document.querySelector('#tile-host').hidden")
    hidden = [name for name in optional if shown.page.locator(f"#tile-{name}").is_hidden()]
    assert hidden == ["states", "host-states", "window"]
    states = {"states_total": 16, "states_free": 4, "states_held": 11, "states_cached": 9, "states_kept": 6}
    host = {"host_states_total": 32, "host_states_used": 8, "host_states_evicted": 5}
    dashboard.send_update(t=101.0, stats=scenes.stats(**states, **host, states_evicted=1234, host_total=0))
    shown.wait_text("#tile-states", "75 % of 16")
    for words in ("in use 2", "kept 6", "optional 3", "free 4", "1,234 evicted"):
        assert words in " ".join(shown.text("#tile-states").split())
    assert shown.has_colour("#tile-states canvas", shown.colour("use-private"), 0, 46)
    assert "25 % of 32" in shown.text("#tile-host-states") and "5 evicted" in shown.text("#tile-host-states")
    assert [name for name in optional if shown.page.locator(f"#tile-{name}").is_hidden()] == ["window", "host"]
    windows = {"window_total": 4096, "window_free": 1024, "window_evictable": 2000, "window_evicted": 77}
    dashboard.send_update(t=102.0, stats=scenes.stats(**windows))
    shown.wait_text("#tile-window", "75 % of 4,096")
    for words in ("in use 1,072", "evictable 2,000", "free 1,024", "77 evicted"):
        assert words in " ".join(shown.text("#tile-window").split())
    assert [name for name in optional if shown.page.locator(f"#tile-{name}").is_hidden()] == ["states", "host-states"]


def test_rates_cover_the_last_minute(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    for second in range(1, 21):
        totals = {"queries": 1000, "hits": 600, "prompt_tokens": 400, "output_tokens": 50, "evicted": 20}
        stats = scenes.stats(**{name: each * second for name, each in totals.items()})
        dashboard.send_update(t=100.0 + second, stats=stats)
    shown.wait_text("#tile-hits", "60 %")
    assert "prompt 400/s" in shown.text("#tile-speed") and "output 50/s" in shown.text("#tile-speed")
    assert "20/s" in shown.text("#tile-evicted") and "400 tokens in total" in shown.text("#tile-evicted")
    assert shown.has_colour("#tile-speed canvas", shown.colour("line-1"), 0, 46)
    # Long after the last query there is no rate of hits.
    dashboard.send_update(t=200.0, stats=dashboard.update["stats"])
    shown.wait_text("#tile-hits .tile-now", "–")


def test_lease_deadlines_count_down(dashboard: FakeDashboard, open_page: Open) -> None:
    lease = scenes.lease(1, "r", 600.0)
    shown = open_page(dashboard.url).wait_live()
    dashboard.send_update(leases=[lease], num_leases=120)
    shown.wait_text("#held-lists", "and 119 more")
    assert shown.text("#held-lists td.bar") == "10 min 0 s"
    # Without another word from the server.
    shown.wait("/^9 min 5[789] s$/.test(document.querySelector('#held-lists td.bar span').textContent)")


def test_timeline_scrolls_between_updates(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.page.locator("#window").select_option("15")
    dashboard.send_update(scenes.life("r", [["decode", 98.0, 99.0, 1]], end="stop"))
    shown.wait_rows(1)
    drawn = "document.querySelector('#lives-scene canvas').toDataURL()"
    shown.wait(f"window.before = {drawn}")
    for _ in range(3):
        shown.wait(f"{drawn} !== window.before")
        shown.wait(f"window.before = {drawn}")


def test_paused_page_freezes_and_catches_up_on_resume(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    dashboard.send_update(scenes.life("before", [["decode", 100.0, None, 1]]))
    shown.wait_rows(1)
    shown.page.get_by_role("button", name="Pause").click()
    shown.wait_text("#announcer", "Paused")
    dashboard.send_update(scenes.life("meanwhile", [["decode", 100.1, None, 1]]), t=100.2)
    dashboard.send_update(scenes.life("also", [["decode", 100.2, None, 1]]), t=100.4)
    dashboard.send_tree(scenes.large_tree(seed=1, count=50))
    # The next hello is taken once all before it has been.
    dashboard.send("hello", scenes.hello(version="9.9.9"))
    shown.wait_text("#model", "9.9.9")
    assert len(shown.rows()) == 1 and "1,650 tokens" in shown.text("#tree-summary")
    shown.page.get_by_role("button", name="Resume").click()
    assert {row.split(",")[0] for row in shown.wait_rows(3)} == {"before", "meanwhile", "also"}
    shown.wait("!document.querySelector('#tree-summary').textContent.includes('1,650')")


def test_hidden_tab_draws_nothing(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    set_hidden = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    shown.page.evaluate(set_hidden, True)
    dashboard.send_update(scenes.life("unseen", [["decode", 100.0, None, 1]]))
    dashboard.send("hello", scenes.hello(version="9.9.9"))
    shown.wait_text("#model", "9.9.9")
    shown.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.rows() == []
    shown.page.evaluate(set_hidden, False)
    assert shown.wait_rows(1) == ["unseen, decoding now"]
