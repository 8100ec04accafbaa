"""What is ignored is told to the client with each answer, and to the operator once."""

from __future__ import annotations

import logging

import pytest

from baton.entrypoints.fields.ignored import Ignored, IgnoredLog


def test_no_warning_header_without_ignored_fields() -> None:
    log = IgnoredLog()
    assert log.report(log.begin_request()) == {}


def test_ignored_field_is_logged_once_and_reported_each_time(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.WARNING):
        for name in ("keep_alive", "messages[3].mood", "messages[17].mood", "keep_alive", "provider"):
            ignored = log.begin_request()
            ignored.add_field(name, "a reason")
            assert log.report(ignored) == {"X-Baton-Warning": f"no effect: {name}: a reason"}
    logged = [record.getMessage().split(" has no effect")[0] for record in caplog.records]
    assert logged == ["a request's keep_alive", "a request's messages[3].mood", "a request's provider"]


def test_unsafe_field_names_are_escaped_in_the_header() -> None:
    log = IgnoredLog("warn")
    ignored = log.begin_request()
    ignored.add_field("a\r\nX-Other: 1", "unknown")
    ignored.add_field("größe\x7f", "unknown")
    ignored.add_field("n" * 10_000, "unknown")
    (header,) = log.report(ignored).values()
    assert header.isascii() and header.isprintable() and len(header) < 1_000
    assert "X-Other: 1" in header and "gr" in header
    header.encode("latin-1")


def test_warning_header_length_is_bounded() -> None:
    log = IgnoredLog("warn")
    ignored = log.begin_request()
    for number in range(5_000):
        ignored.add_field(f"{'x' * 128}{chr(97 + number % 26)}{number}", "unknown")
    (header,) = log.report(ignored).values()
    assert len(header) <= 2_000


def test_ignored_field_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog("warn")
    for number in range(1_100):
        ignored = log.begin_request()
        ignored.add_field("".join(chr(97 + int(digit)) for digit in str(number)), "unknown")
        log.report(ignored)
    assert len(caplog.records) == 1_000


def test_unknown_fields_are_refused_unless_set_to_warn() -> None:
    assert not Ignored().takes_unknown and Ignored("warn").takes_unknown
    assert IgnoredLog("warn").begin_request().takes_unknown
