"""The connection: keys, refusals, restarts, cuts, and what the reader is told of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard
from tests.doubles.page_under_test import PageUnderTest

pytestmark = pytest.mark.process

Open = Callable[..., PageUnderTest]

# Chromium itself logs requests that fail.
UNAUTHORIZED, UNREACHABLE, REFUSED = ("status of 401",), ("net::ERR_",), ("status of 421",)


def test_page_resets_after_server_restart(busy: FakeDashboard, open_page: Open) -> None:
    shown = open_page(busy.url, allow=UNREACHABLE).wait_live()
    shown.wait("document.querySelectorAll('.life').length > 5")
    busy.stop()
    shown.wait_text("#connection-text", "Offline")
    assert shown.text("#retry") == "Try now"
    assert len(shown.rows()) > 5, "what was known stays, while nobody contradicts it"
    busy.hello = scenes.hello(instance="two", t=1.0)
    busy.update, busy.tree, busy.lives = scenes.update(t=1.0), None, {}
    busy.start()
    shown.wait_live()
    shown.wait_text("#announcer", "The server was restarted")
    assert shown.wait_rows(0) == []
    shown.wait_text("#tree-empty", "Nothing is cached yet")
    shown.wait_text("#batch-lists", "Nothing is computed")
    assert shown.text("#tree-summary") == "" and shown.text("#tile-hits .tile-now") == "–"
    busy.send_update(scenes.life("new", [["decode", 1.0, None, 1]]), t=1.5)
    assert shown.wait_rows(1) == ["new, decoding now"]


def test_page_resumes_after_connection_loss(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    dashboard.send_update(scenes.life("kept", [["decode", 100.0, 100.1, 1]], end="stop"))
    shown.wait_rows(1)
    dashboard.cut()
    while dashboard.connections < 2:
        shown.page.wait_for_timeout(20)
    shown.wait_live()
    dashboard.send_update(scenes.life("later", [["decode", 100.1, None, 1]]), t=100.2)
    assert shown.wait_rows(2) == ["later, decoding now", "kept, decoding, stopped"]
    assert "restarted" not in shown.text("#announcer")


def test_server_restart_resumes_a_paused_page(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    shown.page.get_by_role("button", name="Pause").click()
    dashboard.send("hello", scenes.hello(instance="two", t=1.0))
    shown.wait_text("#announcer", "restarted")
    assert shown.text("#pause") == "Pause"
    dashboard.send_update(scenes.life("new", [["decode", 1.0, None, 1]]), t=1.5)
    shown.wait_rows(1)


def test_wrong_key_is_rejected_and_right_key_opens_the_page(dashboard: FakeDashboard, open_page: Open) -> None:
    dashboard.key = "sesame"
    shown = open_page(dashboard.url, allow=UNAUTHORIZED)
    shown.wait_text("#connection-text", "Needs a key")
    assert shown.page.locator("#tree-panel").is_hidden()
    assert shown.page.evaluate("document.activeElement.id") == "key"
    shown.page.keyboard.type("wrong")
    shown.page.keyboard.press("Enter")
    shown.wait_text("#key-reason", "That key was not taken: this endpoint wants the admin key")
    assert shown.page.evaluate("sessionStorage.length") == 0
    shown.page.locator("#key").fill("with a space")
    shown.page.keyboard.press("Enter")
    shown.wait_text("#key-reason", "cannot be sent in a header")
    shown.page.locator("#key").fill("sesame")
    shown.page.get_by_role("button", name="Open").click()
    shown.wait_live()
    assert shown.page.locator("#key-form").is_hidden() and shown.page.locator("#tree-panel").is_visible()
    assert shown.page.locator("#key").input_value() == ""
    assert "sesame" not in shown.page.url and shown.page.evaluate("localStorage.length") == 0
    shown.page.reload()
    shown.wait_live()
    # The operator changes the key.
    dashboard.key = "other"
    dashboard.cut()
    shown.wait_text("#key-reason", "That key was not taken")


def test_first_steps_mention_the_key_when_required(open_page: Open) -> None:
    with FakeDashboard(scenes.hello(), scenes.update()) as dashboard:
        dashboard.key = "sesame"
        shown = open_page(dashboard.url, allow=UNAUTHORIZED)
        shown.wait_text("#connection-text", "Needs a key")
        shown.page.keyboard.type("sesame")
        shown.page.keyboard.press("Enter")
        shown.wait_text("#tree-empty", "Authorization: Bearer $KEY")
        assert "sesame" not in shown.text("#tree-empty")


def test_server_refusal_message_is_shown(dashboard: FakeDashboard, open_page: Open) -> None:
    dashboard.refuse = (421, "this server does not accept the host name 'x'; set --allowed-hosts <x>")
    shown = open_page(dashboard.url, allow=REFUSED)
    shown.wait_text("#trouble", "set --allowed-hosts <x>")
    assert shown.text("#connection-text") == "Refused"
    dashboard.refuse = None
    shown.page.get_by_role("button", name="Try now").click()
    shown.wait_live()
    assert shown.page.locator("#trouble").is_hidden()


def test_malformed_event_reconnects_the_stream(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url, allow=("TypeError",)).wait_live()
    for count, nonsense in enumerate((b"event: update\ndata: {\n\n", b'event: update\ndata: {"t": 1}\n\n'), 2):
        dashboard.send_raw(nonsense)
        while dashboard.connections < count:
            shown.page.wait_for_timeout(20)
        shown.wait_live()
    dashboard.send("news", {"of": "a later version"})
    dashboard.send_update(scenes.life("fine", [["decode", 100.0, None, 1]]))
    shown.wait_rows(1)
    assert dashboard.connections == 3


def test_repeated_reconnects_leave_one_reader(dashboard: FakeDashboard, open_page: Open) -> None:
    shown = open_page(dashboard.url).wait_live()
    for count in range(2, 6):
        dashboard.cut()
        shown.wait("document.querySelector('#connection').dataset.state === 'waiting'")
        shown.page.get_by_role("button", name="Try now").click()
        shown.wait_live()
        assert dashboard.connections == count
    assert dashboard.readers == 1
