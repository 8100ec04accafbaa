"""The share of first turns that are continued, by client."""

from __future__ import annotations

import pytest

from baton.scheduler.jobs.openings import MAX_CLIENTS, PRIOR_SHARE, WINDOW, Openings


def learn(openings: Openings, client: str, continued: int, ended: int) -> None:
    for number in range(ended):
        openings.record_opening(client, continued=number < continued)


def test_share_is_learned_by_client() -> None:
    openings = Openings()
    assert openings.share_continued("any") == PRIOR_SHARE
    learn(openings, "talks", 40, 40)
    learn(openings, "asks once", 0, 40)
    assert openings.share_continued("talks") > 0.9 and openings.share_continued("asks once") < 0.1
    assert openings.share_continued("new") == pytest.approx(41 / 84), "that of all clients"


def test_few_openings_say_little() -> None:
    openings = Openings()
    learn(openings, "other", 0, 100)
    learn(openings, "new", 1, 1)
    assert 0.2 < openings.share_continued("new") < 0.3


def test_old_openings_fade() -> None:
    openings = Openings()
    learn(openings, "a", 1000, 1000)
    learn(openings, "a", 0, WINDOW)
    assert openings.share_continued("a") < 0.45


def test_clients_are_bounded() -> None:
    openings = Openings()
    learn(openings, "first", 0, 50)
    for number in range(MAX_CLIENTS):
        learn(openings, f"client {number}", 1, 1)
    assert len(openings._by_client) == MAX_CLIENTS
    assert openings.share_continued("first") == openings.share_continued("never heard of")
