"""The share of turns that are continued, by client and kind."""

from __future__ import annotations

import pytest

from baton.scheduler.jobs.returns import MAX_CLIENTS, PRIOR_SHARE, WINDOW, Returns, TurnKind

KINDS = pytest.mark.parametrize("kind", list(TurnKind))


def learn(returns: Returns, kind: TurnKind, client: str, continued: int, ended: int) -> None:
    for number in range(ended):
        returns.record_turn(client, kind, continued=number < continued)


@KINDS
def test_share_is_learned_by_client_and_kind(kind: TurnKind) -> None:
    returns = Returns()
    assert [returns.share_continued("any", each) for each in TurnKind] == list(PRIOR_SHARE.values())
    learn(returns, kind, "talks", 40, 40)
    learn(returns, kind, "asks once", 0, 40)
    assert returns.share_continued("talks", kind) > 0.9 and returns.share_continued("asks once", kind) < 0.1
    of_all = (40 + 4 * PRIOR_SHARE[kind]) / 84
    assert returns.share_continued("new", kind) == pytest.approx(of_all), "that of all clients"
    others = [returns.share_continued("talks", each) == PRIOR_SHARE[each] for each in TurnKind if each is not kind]
    assert all(others), "one kind says nothing about another"


@KINDS
def test_other_clients_only_raise_the_share_that_is_shown(kind: TurnKind) -> None:
    returns = Returns()
    learn(returns, kind, "floods", 0, 200)
    assert returns.share_continued("new", kind) < 0.1 and returns.share_shown("new", kind) == PRIOR_SHARE[kind]
    assert returns.share_shown("floods", kind) == returns.share_continued("floods", kind) < 0.1
    learn(returns, kind, "others", 200, 200)
    assert returns.share_shown("new", kind) >= returns.share_continued("new", kind) > 0.4


@KINDS
def test_sole_client_shows_what_is_continued(kind: TurnKind) -> None:
    returns = Returns()
    for number in range(60):
        assert returns.share_shown("a", kind) == pytest.approx(returns.share_continued("a", kind))
        learn(returns, kind, "a", number % 3 == 0, 1)


def test_few_turns_say_little() -> None:
    returns = Returns()
    learn(returns, TurnKind.OPENING, "other", 0, 100)
    learn(returns, TurnKind.OPENING, "new", 1, 1)
    assert 0.2 < returns.share_continued("new", TurnKind.OPENING) < 0.3


def test_few_agents_that_never_return_are_enough() -> None:
    returns = Returns()
    for _ in range(5):
        assert returns.share_continued("agents", TurnKind.ANSWER) > 0.1
        learn(returns, TurnKind.ANSWER, "agents", 0, 1)
    assert returns.share_continued("agents", TurnKind.ANSWER) < 0.1


def test_old_turns_fade() -> None:
    returns = Returns()
    learn(returns, TurnKind.TALK, "a", 1000, 1000)
    learn(returns, TurnKind.TALK, "a", 0, WINDOW)
    assert returns.share_continued("a", TurnKind.TALK) < 0.45


def test_late_returns_are_corrected() -> None:
    corrected, returned = Returns(), Returns()
    learn(corrected, TurnKind.ANSWER, "a", 0, 10)
    for _ in range(3):
        corrected.correct_turn("a", TurnKind.ANSWER)
    learn(returned, TurnKind.ANSWER, "a", 3, 10)
    for client in ("a", "new"):
        shares = [returns.share_continued(client, TurnKind.ANSWER) for returns in (corrected, returned)]
        assert shares[0] == shares[1]
    for _ in range(50):
        corrected.correct_turn("a", TurnKind.ANSWER)
    assert corrected.share_continued("a", TurnKind.ANSWER) <= 1.0, "counts that were halved cannot be overdrawn"
    corrected.correct_turn("forgotten", TurnKind.ANSWER)


def test_clients_are_bounded() -> None:
    returns, kind = Returns(), TurnKind.OPENING
    learn(returns, kind, "first", 0, 50)
    for number in range(MAX_CLIENTS):
        learn(returns, kind, f"client {number}", 1, 1)
    assert len(returns._by_client) == MAX_CLIENTS
    assert returns.share_continued("first", kind) == returns.share_continued("never heard of", kind)
