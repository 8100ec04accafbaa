"""Whose entries a full table forgets."""

from __future__ import annotations

import random

from baton.scheduler import client_shares
from baton.scheduler.client_shares import ClientShares
from tests.doubles.counted_lines import lines_run


def shares_of(**keys: str) -> ClientShares[str]:
    shares: ClientShares[str] = ClientShares()
    for client, names in keys.items():
        for name in names.split():
            shares.put_key(client, name)
    return shares


def test_largest_client_forgets_its_oldest_keys_first() -> None:
    shares = shares_of(alice="a1 a2", bob="b1 b2 b3", carol="c1")
    assert list(shares.in_order_of_forgetting()) == ["b1", "b2", "b3", "a1", "a2", "c1"]
    shares.renew_key("b1")
    shares.put_key("bob", "b2")
    assert list(shares.in_order_of_forgetting())[:3] == ["b3", "b1", "b2"]


def test_equal_clients_forget_the_oldest_key_first() -> None:
    shares = shares_of(alice="a1", bob="b1", carol="c1")
    assert next(shares.in_order_of_forgetting()) == "a1"
    shares.put_key("alice", "a1")
    assert next(shares.in_order_of_forgetting()) == "b1"


def test_first_key_costs_the_same_for_a_thousand_clients() -> None:
    """Each user of an app may be a client: a full table would cost a look at thousands of them for each request."""

    def costs(clients: int) -> list[int]:
        shares = shares_of(**{f"c{number}": f"k{number}" for number in range(clients)})
        calls = [
            lambda: shares.put_key("new", "k"),
            lambda: shares.remove_key(next(shares.in_order_of_forgetting())),
        ]
        lines = [lines_run(call, client_shares) for call in calls]
        assert "k0" not in shares and "k" in shares
        return lines

    assert costs(2) == costs(1000)


def test_clients_can_be_compared_by_size() -> None:
    shares = shares_of(alice="a1 a2 a3")
    shares.put_key("bob", "b1", 10)
    assert next(shares.in_order_of_forgetting()) == "a1" and next(shares.in_order_of_forgetting(by_size=True)) == "b1"
    assert list(shares.in_order_of_forgetting(by_size=True, least=9)) == ["b1"]
    assert list(shares.in_order_of_forgetting(least=3)) == []
    shares.put_key("bob", "b1", 4)
    assert list(shares.in_order_of_forgetting(by_size=True, least=4)) == []


def test_moved_key_counts_for_its_new_client() -> None:
    shares = shares_of(alice="x", bob="b1")
    shares.put_key("bob", "x", 7)
    assert shares.num_clients == 1 and list(shares.in_order_of_forgetting()) == ["b1", "x"]
    shares.remove_key("x")
    shares.remove_key("b1")
    shares.remove_key("b1")
    assert not len(shares) and "b1" not in shares and not shares.num_clients
    assert list(shares.in_order_of_forgetting()) == []


def test_flooding_client_takes_none_below_equal_share() -> None:
    seed = 11
    print(f"seed {seed}")
    rng, bound = random.Random(seed), 12
    shares: ClientShares[str] = ClientShares()
    weights = {"flood": 20, "alice": 1, "bob": 1}
    held = dict.fromkeys(weights, 0)
    for number in range(2000):
        (client,) = rng.choices(list(weights), list(weights.values()))
        shares.put_key(client, f"{client} {number}")
        if len(shares) > bound:
            shares.remove_key(next(shares.in_order_of_forgetting()))
        now = {each: sum(key.startswith(each) for key in shares.in_order_of_forgetting()) for each in weights}
        assert sum(now.values()) <= bound
        assert all(now[each] >= min(held[each], bound // len(weights)) for each in weights)
        held = now
    assert held == dict.fromkeys(weights, bound // len(weights))
