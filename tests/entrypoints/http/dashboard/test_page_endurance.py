"""A page that stays open: thousands of updates leave it no larger than the first hundred did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import PageUnderTest

pytestmark = pytest.mark.process

Open = Callable[..., PageUnderTest]
UPDATES = 3000


def work_for(dashboard: FakeDashboard, first: int, last: int) -> None:
    """Requests, leases, jobs and namespaces come and go; none has the name of another."""
    content = []
    for number in range(first, last):
        t = 100.0 + number
        phases = [["queued", t, t + 0.1, 0], ["decode", t + 0.1, t + 0.9, 9], ["leased", t + 0.9, t + 5, 99]]
        rid = f"request-{number}"
        parent = {"parent": f"request-{number - 1}", "path": "handoff"} if number % 3 else {}
        lease = scenes.lease(number, rid, 4.0)
        job = scenes.job(f"job-{number}", "tool", 1, 9, 3.0)
        dashboard.update = scenes.update(
            t=t,
            stats=scenes.stats(running=1, queries=10 * number, hits=number),
            running=[scenes.running(rid, "decode", 9, 9, number)],
            leases=[lease],
            jobs=[job],
            num_leases=1,
            num_jobs=1,
            lives=[scenes.life(rid, phases, **parent)],
        )
        content.append(("update", dashboard.update))
        if number % 20 == 0:
            spans = [scenes.span(number + each, -1, 0, 50, 50, namespace=f"n{number + each % 4}") for each in range(40)]
            content.append(("tree", scenes.tree(spans, t)))
    for name, data in content:
        dashboard.send(name, data)
    dashboard.send("hello", scenes.hello(version=f"after {last}", t=100.0 + last))


def test_page_size_stays_bounded_over_thousands_of_updates(open_page: Open) -> None:
    with FakeDashboard(scenes.hello(), scenes.update()) as dashboard:
        shown = open_page(dashboard.url).wait_live()
        shown.page.locator("#window").select_option("600")
        work_for(dashboard, 0, 400)
        shown.wait_text("#model", "after 400")
        shown.wait_text("#lives-summary", "200 requests")
        after_400 = shown.elements()
        work_for(dashboard, 400, UPDATES)
        shown.wait_text("#model", f"after {UPDATES}")
        shown.wait_text("#batch-lists", f"request-{UPDATES - 1}")
        assert "200 requests" in shown.text("#lives-summary")
        assert shown.elements() <= after_400 + 5
        assert shown.page.locator("#namespace option").count() == 5
        assert shown.rows()[0].startswith(f"request-{UPDATES - 3},"), "the newest family, its first request on top"


def test_paused_page_keeps_bounded_backlog(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.page.get_by_role("button", name="Pause").click()
    work_for(dashboard, 0, 1000)
    shown.wait_text("#model", "after 1000")
    assert shown.rows() == []
    shown.page.get_by_role("button", name="Resume").click()
    shown.wait_text("#lives-summary", "of the last 200 requests")


def test_long_lives_and_many_requests_are_truncated(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    chunks = [["prefill", 60 + each / 100, 60 + (each + 1) / 100, 8] for each in range(4000)]
    dashboard.send_update(scenes.life("long", chunks))
    assert shown.wait_rows(1) == ["long, prefill in 600 chunks"], "the last of them"
    crowd = [scenes.life(f"r{each}", chunks[-3:]) for each in range(500)]
    running = [scenes.running("same", "decode", 1, 1, 1) for _ in range(500)]
    dashboard.send_update(*crowd, running=running, stats=scenes.stats(running=500))
    shown.wait_text("#lives-summary", "200 requests")
    assert "and 400 more" in shown.text("#batch-lists")
    assert shown.elements() < 1250
