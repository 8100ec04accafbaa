"""Names of clients: whatever two clients call their requests, inside the server they never share a name."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime.clients import SOLE_CLIENT, Client, is_client_name, split_name
from baton.runtime.messages import AbortRequest, RequestError
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request_spec import ContinuationSpec, Predecessor, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.manager_rig import Backend, check, child, prompt

ALICE, BOB = Client("alice"), Client("bob")


def test_qualified_names_of_clients_never_collide() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    clients = [Client(name) for name in ("a", "a.b", "a-", "A", "aa", "anonymous", "admin", "a@b")]
    owners: dict[str, tuple[str, str]] = {}
    for _ in range(20_000):
        client, name = rng.choice(clients), "".join(rng.choices("aAb/.-@\u0000é ", k=rng.randrange(6)))
        qualified = client.qualified(name)
        assert owners.setdefault(qualified, (client.name, name)) == (client.name, name)
        assert split_name(qualified) == (client.name, name) and client.stripped(qualified) == name
        assert [each for each in clients if each.owns(qualified)] == [client]


def test_sole_client_names_are_unchanged() -> None:
    spec = RequestSpec(rid="alice/r", sampling=SamplingParams(), namespace="n", job_id="j", client="user")
    assert SOLE_CLIENT.qualified_spec(spec) is spec and SOLE_CLIENT.owns("anything")
    assert SOLE_CLIENT.stripped("a/b") == "a/b" and SOLE_CLIENT.stripped_text("'a/b'", spec) == "'a/b'"
    assert [field.name for field in fields(Client)] == ["name", "isolated"]


def test_every_name_in_a_spec_is_qualified() -> None:
    spec = RequestSpec(
        rid="r", sampling=SamplingParams(), namespace="salt", job_id="j", parent_job_id="k", client="user",
        continuation=ContinuationSpec("p"), predecessor=Predecessor("q", 1),
    )  # fmt: skip
    found = ALICE.qualified_spec(spec)
    assert found.continuation is not None and found.predecessor is not None
    names = found.rid, found.job_id, found.continuation.parent_rid, found.predecessor.rid
    assert names == ("alice/r", "alice/j", "alice/p", "alice/q") and found.parent_job_id == "alice/k"
    assert (found.client, found.namespace) == ("alice", "salt"), "the budget is the client's, and KV is shared"
    assert Client("alice", isolated=True).qualified_spec(spec).namespace == "alice/salt"
    assert ALICE.stripped_text("continuation_of 'alice/p': 'alice/r'", found) == "continuation_of 'p': 'r'"


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "é", "a" * 65, "admin", "anonymous", "a\n"])
def test_invalid_client_names_are_rejected(name: str) -> None:
    assert not is_client_name(name) and is_client_name("a.B_c@d-1")


def test_two_clients_use_one_rid_at_the_same_time(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        hers = await manager.open_answer(ALICE, [prompt("same")], stream=False)
        his = await manager.open_answer(BOB, [prompt("same", group="call")], stream=False)
        with pytest.raises(RequestRefused) as refused:
            await manager.open_answer(ALICE, [prompt("same")], stream=False)
        assert status_of(refused.value) == 409 and "'same'" in refused.value.message
        assert [spec.rid for spec in backend.received() if isinstance(spec, RequestSpec)] == ["alice/same", "bob/same"]
        assert manager.abort_requests(BOB, "alice/same") == [] == manager.abort_requests(ALICE, "call")
        assert manager.abort_requests(BOB, "call") == ["same"]
        assert backend.received() == [AbortRequest(rid="bob/same")]
        await backend.output("alice/same", "x", FinishReason("stop"))
        await backend.output("bob/same", "y", FinishReason("abort"))
        assert [(each.prompt.rid, each.text) for each in await hers.outputs()] == [("same", "x")]
        assert [(each.prompt.rid, each.text) for each in await his.outputs()] == [("same", "y")]

    check(tokenizer, body)


def test_messages_of_the_worker_have_the_clients_names(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        opened = await backend.manager.open_answer(ALICE, [child("c", "alice/p", text="ab")], stream=False)
        (spec,) = backend.received()
        assert isinstance(spec, RequestSpec) and spec.continuation is not None
        assert spec.continuation.parent_rid == "alice/alice/p"
        said = f"continuation_of {spec.continuation.parent_rid!r}: no such request"
        await backend.send(RequestError(rid=spec.rid, message=said, code="parent_not_found"))
        with pytest.raises(RequestRefused) as refused:
            await opened.outputs()
        assert refused.value.message == "continuation_of 'alice/p': no such request"

    check(tokenizer, body)


def test_a_disconnected_caller_ends_only_its_own_requests(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        hers, his = [await manager.open_answer(client, [prompt("same")], stream=True) for client in (ALICE, BOB)]
        backend.received()
        his.close()
        assert backend.received() == [AbortRequest(rid="bob/same")] and not hers.finished
        assert sorted(manager.abort_all()) == ["alice/same", "bob/same"]

    check(tokenizer, body)
