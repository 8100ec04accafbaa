"""The registry of item tries, their way to it, and what its owner answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime.constraints.grammars import Grammars
from baton.runtime.constraints.item_tries import ItemTries, check_name, describe, pack_trie, unpack_trie
from baton.runtime.constraints.resolve import resolve_constraint
from baton.runtime.messages import ControlReply, ControlRequest, DeleteItemTrie, LoadItemTrie, ToWorker
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie, ItemTrieError
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.manager_rig import Backend, check

TRIE = ItemTrie.build(np.array([[1, 4], [1, 5], [2, -1]]))
OTHER = ItemTrie.build(np.array([[7, 8]]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


def resolve(tries: ItemTries, sampling: SamplingParams) -> Constraint | None:
    return resolve_constraint(sampling, tries, Grammars(cast(Any, None), 10, ()))


def found(tries: ItemTries, name: str) -> ItemTrie:
    constraint = resolve(tries, SamplingParams(item_trie=name))
    assert isinstance(constraint, ItemConstraint)
    return constraint.trie


def test_tries_are_found_by_name_until_replaced_or_deleted() -> None:
    tries = ItemTries(vocab_size=10)
    tries.put("a", TRIE)
    tries.put("b", OTHER)
    assert found(tries, "a") is TRIE and found(tries, "b") is OTHER
    tries.put("a", OTHER)
    assert found(tries, "a") is OTHER
    assert tries.delete("a") and not tries.delete("a")
    assert tries.describe() == [describe("b", OTHER)]


def test_a_constraint_has_its_name_and_no_name_gives_no_constraint() -> None:
    tries = ItemTries(vocab_size=10)
    tries.put("a", TRIE)
    constraint = resolve(tries, SamplingParams(item_trie="a"))
    assert constraint is not None and (constraint.name, constraint.output_name) == ("the item trie 'a'", "item of 'a'")
    assert (constraint.min_tokens, constraint.max_tokens, constraint.is_uniform) == (1, 2, False)
    assert (constraint.matched, constraint.eos_ends, constraint.must_complete) == ("item", False, True)
    assert resolve(tries, SamplingParams()) is None
    allowed = resolve(tries, SamplingParams(allowed_token_ids=(4, 2)))
    assert allowed is not None and allowed.start().allowed().unpack()[1].tolist() == [2, 4]


@pytest.mark.parametrize(("loaded", "named"), [([], "none"), (["a"], "'a'"), (["b", "a"], "'b', 'a'")])
def test_an_unknown_name_is_refused_with_the_known_names(loaded: list[str], named: str) -> None:
    tries = ItemTries(vocab_size=10)
    for name in loaded:
        tries.put(name, TRIE)
    with pytest.raises(RequestRefused) as refused:
        resolve(tries, SamplingParams(item_trie="x"))
    error = refused.value
    assert error.message == f"there is no item trie 'x'; loaded: {named}"
    assert (status_of(error), error.code, error.param) == (404, "item_trie_not_found", "sampling_params.item_trie")


def test_item_trie_token_beyond_vocabulary_is_refused() -> None:
    tries = ItemTries(vocab_size=8)
    tries.put("a", TRIE)
    with pytest.raises(ItemTrieError, match=r"item trie 'a': .* the token 8; the model has 8 tokens, 0 to 7"):
        tries.put("a", OTHER)
    assert found(tries, "a") is TRIE
    ItemTries(vocab_size=9).put("a", OTHER)


def test_number_and_size_of_item_tries_are_limited() -> None:
    tries = ItemTries(10, max_tries=2, max_bytes=TRIE.num_bytes + OTHER.num_bytes)
    tries.put("a", TRIE)
    tries.put("b", OTHER)
    tries.put("b", OTHER)  # in place of the other one, not beside it
    with pytest.raises(ItemTrieError, match=r"item trie 'c': 2 others are loaded already.*--max-item-tries"):
        tries.put("c", OTHER)
    with pytest.raises(
        ItemTrieError, match=f"item trie 'b' has {TRIE.num_bytes} bytes and the others have {TRIE.num_bytes}"
    ):
        tries.put("b", TRIE)
    assert found(tries, "a") is TRIE and found(tries, "b") is OTHER
    assert tries.delete("a")
    tries.put("c", TRIE)


def test_the_description_of_a_trie() -> None:
    sizes = {"num_items": 3, "min_depth": 1, "max_depth": 2, "num_bytes": 8 * 5}
    assert describe("a", TRIE) == {"name": "a", **sizes}


@pytest.mark.parametrize("name", ["a", "A-1_x.y", "...", "x" * 128])
def test_valid_item_trie_names_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "a\n", "é", "٣", "x" * 129])
def test_invalid_item_trie_names_are_refused(name: str) -> None:
    with pytest.raises(ItemTrieError, match="cannot be named"):
        check_name(name)


def test_item_trie_survives_message_round_trip() -> None:
    frame = msgspec.msgpack.encode(pack_trie(3, "a", TRIE))
    message = msgspec.msgpack.decode(frame, type=ToWorker)
    assert isinstance(message, LoadItemTrie) and (message.call_id, message.name) == (3, "a")
    trie = unpack_trie(message)
    assert trie.edges.dtype == np.int64 and trie.edges.tolist() == TRIE.edges.tolist()
    assert (trie.max_token, trie.num_nodes) == (5, 5)
    assert describe("a", trie) == describe("a", TRIE)
    root = np.zeros(1, dtype=np.int32)
    assert trie.advance(root, np.array([2])).tolist() == TRIE.advance(root, np.array([2])).tolist()


def test_item_trie_calls_are_sent_to_the_worker(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        async def answer(**reply: Any) -> ToWorker:
            while not (requests := backend.inbox.poll()):
                await asyncio.sleep(0.001)
            (request,) = requests
            assert isinstance(request, LoadItemTrie | DeleteItemTrie | ControlRequest)
            backend.outbox.send(ControlReply(call_id=request.call_id, **reply))
            return request

        manager = backend.manager
        _, sent = await asyncio.gather(manager.control.load_item_trie("a", TRIE), answer())
        assert isinstance(sent, LoadItemTrie) and sent.name == "a"
        with pytest.raises(RequestRefused, match="too large a token") as refused:
            await asyncio.gather(
                manager.control.load_item_trie("a", TRIE), answer(ok=False, payload=b'"too large a token"')
            )
        assert (status_of(refused.value), refused.value.code) == (400, "invalid_item_trie")
        for payload, found in ((b"true", True), (b"false", False)):
            got, sent = await asyncio.gather(manager.control.delete_item_trie("a"), answer(payload=payload))
            assert got is found and isinstance(sent, DeleteItemTrie) and sent.name == "a"
        entries = [describe("a", TRIE)]
        listed, sent = await asyncio.gather(
            manager.control.list_item_tries(), answer(payload=msgspec.json.encode(entries))
        )
        assert listed == entries and isinstance(sent, ControlRequest) and sent.verb == "item_tries"
        with pytest.raises(RequestRefused, match="cannot be named") as refused:
            await manager.control.load_item_trie("a/b", TRIE)
        assert refused.value.param == "name" and backend.received() == [], "the worker is not asked"

    check(tokenizer, body)


def test_item_trie_is_refused_while_model_is_loading(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with pytest.raises(RequestRefused, match="still loading") as refused:
            await backend.manager.control.load_item_trie("a", TRIE)
        assert status_of(refused.value) == 503 and backend.received() == []

    check(tokenizer, body, ready=False)
