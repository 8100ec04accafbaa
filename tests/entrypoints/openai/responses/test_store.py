"""Stored responses are found by those who may, and bounded by number and by size."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.entrypoints.chat.conversations import Turn
from baton.entrypoints.openai.responses.items import read_input
from baton.entrypoints.openai.responses.store import ResponseStore, StoredResponse

CALL = {"type": "function_call", "call_id": "1", "name": "l", "arguments": "{}"}


def response(rid: str, scope: str = "", body: bytes = b"{}", **more: Any) -> StoredResponse:
    nothing: dict[str, Any] = {"items": [], "output": [], "item_bytes": 0, "messages": [], "turn": None}
    return StoredResponse(rid=rid, scope=scope, status="completed", background=False, body=body, **nothing | more)


def turn(text: str, tokens: int) -> Turn:
    ids = np.zeros(tokens, dtype=np.int32)
    return Turn(rid="t", index=0, scope="", num_messages=1, prompt_chars=0, text=text, ids=ids)


def test_responses_are_isolated_between_scopes() -> None:
    store = ResponseStore(8)
    mine, theirs = response("r", "mine"), response("r", "theirs")
    store.put_response(mine)
    assert store.find_response("theirs", "r") is None and store.pop_response("theirs", "r") is None
    store.put_response(theirs)
    assert store.find_response("mine", "r") is mine and store.find_response("theirs", "r") is theirs
    assert store.pop_response("mine", "r") is mine and store.find_response("mine", "r") is None


def test_oldest_responses_are_dropped_beyond_the_count_limit() -> None:
    store = ResponseStore(2)
    for rid in "abc":
        store.put_response(response(rid))
    assert [store.find_response("", rid) is not None for rid in "abc"] == [False, True, True] and len(store) == 2
    store.put_response(response("b"))
    store.put_response(response("d"))
    assert [store.find_response("", rid) is not None for rid in "bcd"] == [True, False, True], "b was stored anew"


def test_store_of_size_zero_keeps_nothing() -> None:
    store = ResponseStore(0)
    store.put_response(response("a"))
    assert len(store) == 0


def test_oldest_responses_are_dropped_beyond_the_size_limit() -> None:
    store = ResponseStore(8, max_bytes=1000)
    for rid in "abc":
        store.put_response(response(rid, body=b"x" * 400))
    assert len(store) == 2 and store.find_response("", "a") is None
    store.put_response(response("b", body=b"x" * 10))
    store.put_response(response("d", body=b"x" * 500))
    assert len(store) == 3, "what was replaced or taken no longer counts"
    store.pop_response("", "d")
    store.put_response(response("e", body=b"x" * 500))
    assert len(store) == 3
    store.put_response(response("large", body=b"x" * 5000))
    assert len(store) == 1 and store.find_response("", "large") is not None


def test_response_size_counts_body_items_and_turn() -> None:
    assert response("r", body=b"x" * 10).size == 10
    assert response("r", item_bytes=100).size - response("r").size == 200, "as items and as messages"
    grown = response("r", turn=turn("x" * 100, 50)).size - response("r", turn=turn("", 0)).size
    assert grown == 100 + 4 * 50
    assert response("r", turn=turn("漢" * 100, 0)).size >= response("r", turn=turn("x" * 100, 0)).size + 100


@pytest.mark.parametrize("item", [{"role": "user", "content": "a"}, CALL], ids=["message", "call"])
def test_small_items_are_counted_at_their_memory_size(item: dict[str, str]) -> None:
    """Their objects take several times the memory of their JSON."""
    given = [dict(item) for _ in range(2000)]
    tracemalloc.start()
    messages, items = read_input(given, "r" * 32)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = response("r", items=items, messages=messages, item_bytes=len(msgspec.json.encode(items))).size
    assert taken <= counted <= 2 * taken


def kept(store: ResponseStore, client: str, *rids: str) -> list[bool]:
    return [store.find_response(client, rid) is not None for rid in rids]


def test_client_flooding_the_store_evicts_only_its_own_responses() -> None:
    store = ResponseStore(4)
    store.put_response(response("1", "alice"), "alice")
    store.put_response(response("2", "alice"), "alice")
    for number in range(20):  # each under a salt of its own, which makes them no clients of their own
        store.put_response(response(str(number), f"bob/{number}"), "bob")
        assert len(store) <= 4
    assert kept(store, "alice", "1", "2") == [True, True]
    assert [number for number in range(20) if store.find_response(f"bob/{number}", str(number))] == [18, 19]


def test_single_client_may_use_the_whole_store() -> None:
    store = ResponseStore(4)
    for rid in "abcd":
        store.put_response(response(rid, "alice"), "alice")
    assert kept(store, "alice", *"abcd") == [True] * 4


def test_large_response_does_not_evict_other_clients_below_their_share() -> None:
    store = ResponseStore(100, max_bytes=1000)
    for rid in "abcd":
        store.put_response(response(rid, "alice", body=b"x" * 200), "alice")
    store.put_response(response("large", "bob", body=b"x" * 5000), "bob")
    assert kept(store, "bob", "large") == [True] and kept(store, "alice", *"abcd") == [False, False, True, True]
    store.put_response(response("larger", "bob", body=b"x" * 6000), "bob")
    assert kept(store, "bob", "large", "larger") == [False, True] and kept(store, "alice", *"cd") == [True, True]
