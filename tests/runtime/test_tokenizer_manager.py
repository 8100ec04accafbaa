"""Open calls and their ends: every rid ends once, whichever side leaves first."""

from __future__ import annotations

import asyncio
import struct

import msgspec
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime.answer import TokenLogprob
from baton.runtime.clients import SOLE_CLIENT
from baton.runtime.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    LogprobChunk,
    ReleaseRequest,
    RequestError,
    StartPhase,
    WorkerReady,
)
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, FoundTokens, RequestRefused
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.stats import SchedulerStats
from baton.scheduler.token_buffer import pack_ids, unpack_ids
from tests.doubles.manager_rig import Backend, check, prompt

LENGTH = FinishReason("length")


def test_call_from_prompt_to_answer(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        sampling = SamplingParams(max_new_tokens=7)
        with await backend.manager.open_answer(
            SOLE_CLIENT, [prompt(sampling=sampling, namespace="n")], stream=True
        ) as call:
            (request,) = backend.received()
            assert isinstance(request, RequestSpec)
            assert unpack_ids(request.input_ids).tolist() == [97, 98]
            assert (request.sampling, request.namespace, request.stream) == (sampling, "n", True)
            await backend.output("r", "x", prompt_tokens=2, completion_tokens=1, found=FoundTokens(1))
            await backend.output("r", "yz", LENGTH, prompt_tokens=2, completion_tokens=3, found=FoundTokens(1))
            (output,) = await call.outputs()
            assert output.text == "xyz" and output.token_ids == list(b"xyz")
            assert (output.finish, output.prompt_tokens, output.completion_tokens) == (LENGTH, 2, 3)
        assert backend.manager.num_open == 0
        assert backend.received() == [], "a finished call is not aborted"

    check(tokenizer, body)


def test_slow_readers_get_merged_updates(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open_answer(
            SOLE_CLIENT, [prompt(sampling=SamplingParams(n=2))], stream=True
        ) as call:
            updates = call.updates()
            await backend.output("r", "a")
            assert (await anext(updates)).text == "a"
            for letter in "bcd":
                await backend.output("r", letter)
            await backend.output("r", "z", LENGTH, index=1)
            await backend.output("r", "e", LENGTH)
            assert [(output.position, output.text) async for output in updates] == [(0, "bcde"), (1, "z")]

    check(tokenizer, body)


def test_incremental_updates_add_up(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        ids, value = pack_ids([97]), struct.pack("<f", -0.5)
        chunk = LogprobChunk(ids=ids, values=value)
        with await backend.manager.open_answer(
            SOLE_CLIENT, [prompt(return_logprob=True, logprob_start_len=0)], stream=True
        ) as call:
            updates = call.updates()
            first = LogprobChunk(ids=ids, values=struct.pack("<f", float("nan")))
            await backend.output("r", "é", input_logprobs=first, output_logprobs=chunk)
            one = await anext(updates)
            await backend.output("r", "b", output_logprobs=chunk)
            await backend.output("r", "c", LENGTH, output_logprobs=chunk)
            (later,) = [output async for output in updates]
            assert (one.text, later.text) == ("é", "bc")
            assert (len(one.token_ids), len(later.token_ids)) == (2, 2)
            assert list(one.input_logprobs) == [TokenLogprob(None, 97)]
            assert list(later.input_logprobs) == []
            assert list(one.output_logprobs) == [TokenLogprob(-0.5, 97)]
            assert list(later.output_logprobs) == [TokenLogprob(-0.5, 97)] * 2

    check(tokenizer, body)


def test_leaving_reader_aborts_and_keeps_rid_until_the_end(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False):
            pass
        assert [type(message) for message in backend.received()] == [RequestSpec, AbortRequest]
        with pytest.raises(RequestRefused) as caught:
            await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False)
        assert status_of(caught.value) == 409
        # What the first still says is not taken for the second.
        await backend.output("r", "old", FinishReason("abort"))
        assert backend.manager.num_open == 0
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False) as call:
            await backend.output("r", "new", LENGTH)
            assert (await call.outputs())[0].text == "new"

    check(tokenizer, body)


def test_abort_by_rid_by_group_or_all(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        calls = [
            await manager.open_answer(SOLE_CLIENT, [prompt("a")], stream=False),
            await manager.open_answer(SOLE_CLIENT, [prompt("b_0", group="b"), prompt("b_1", group="b")], stream=False),
            await manager.open_answer(SOLE_CLIENT, [prompt("c")], stream=False),
        ]
        backend.received()
        assert manager.abort_requests(SOLE_CLIENT, "nobody") == []
        assert manager.abort_requests(SOLE_CLIENT, "a") == ["a"]
        assert manager.abort_requests(SOLE_CLIENT, "b") == ["b_0", "b_1"]
        assert [m.rid for m in backend.received() if isinstance(m, AbortRequest)] == ["a", "b_0", "b_1"]
        assert manager.abort_requests(SOLE_CLIENT, None) == ["a", "b_0", "b_1", "c"]
        assert [m.rid for m in backend.received() if isinstance(m, AbortRequest)] == ["c"], "each is aborted once"
        for rid in ("a", "b_0", "b_1", "c"):
            await backend.output(rid, "part", FinishReason("abort", message="why"))
        for call in calls:
            for output in await call.outputs():
                assert output.text == "part"
                assert output.finish == FinishReason("abort", message="why")

    check(tokenizer, body)


def test_an_error_of_one_prompt_fails_its_call_and_aborts_the_rest(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt("x"), prompt("y")], stream=False) as call:
            await backend.send(RequestError(rid="x", message="too large", code="kv_pool_exceeded", param="text"))
            with pytest.raises(RequestRefused) as caught:
                await call.outputs()
            assert (status_of(caught.value), caught.value.message, caught.value.param) == (400, "too large", "text")
        aborts = [message.rid for message in backend.received() if isinstance(message, AbortRequest)]
        assert aborts == ["y"]

    check(tokenizer, body)


def test_invalid_prompt_sends_nothing_of_its_call(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        for bad in (prompt("y", ""), prompt("x"), prompt("y", "a" * 501), prompt("y", "\ud800")):
            with pytest.raises(RequestRefused):
                await backend.manager.open_answer(SOLE_CLIENT, [prompt("x"), bad], stream=False)
        assert backend.received() == [] and backend.manager.num_open == 0

    check(tokenizer, body)


def test_unencodable_call_leaves_nothing_open(tokenizer: Tokenizer) -> None:
    """A lone surrogate, from a program that uses the Engine: its rid would stay taken, and no drain would end."""

    async def body(backend: Backend) -> None:
        with pytest.raises(RequestRefused, match="not valid Unicode"):
            await backend.manager.open_answer(SOLE_CLIENT, [prompt("a"), prompt("\ud800")], stream=False)
        assert backend.manager.num_open == 0 and backend.received() == []
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt("a")], stream=False):
            await backend.output("a", "x", LENGTH)

    check(tokenizer, body)


def test_phases_of_the_start_are_known_until_the_worker_is_ready(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        assert manager.start_phase == "loading libraries"
        await backend.send(StartPhase(phase="loading the model"))
        assert manager.start_phase == "loading the model" and not manager.is_ready
        info = {"context_length": 500, "vocab_size": 257}
        await backend.send(WorkerReady(info=msgspec.json.encode(info)))
        assert manager.start_phase == "" and manager.is_ready

    check(tokenizer, body, ready=False)


def test_shutting_down_ends_the_phases_of_the_start(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        backend.manager.refuse_new(RequestRefused("the server is shutting down", code="shutting_down"))
        assert backend.manager.start_phase == ""

    check(tokenizer, body, ready=False)


def test_calls_before_model_is_loaded_are_503(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        for work in (
            backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False),
            backend.manager.control.flush_cache(),
        ):
            with pytest.raises(RequestRefused) as caught:
                await work
            assert (status_of(caught.value), caught.value.code) == (503, "not_ready")
        assert not backend.manager.is_ready

    check(tokenizer, body, ready=False)


def test_fail_all_ends_open_and_later_calls(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        call = await manager.open_answer(SOLE_CLIENT, [prompt()], stream=True)
        flushing = asyncio.create_task(manager.control.flush_cache())
        await asyncio.sleep(0)
        error = RequestRefused("the worker died")
        manager.fail_all(error)
        for work in (
            call.outputs(),
            anext(call.updates()),
            flushing,
            manager.open_answer(SOLE_CLIENT, [prompt("s")], stream=False),
        ):
            with pytest.raises(RequestRefused, match="the worker died"):
                await work
        await manager.wait_empty()
        call.close()
        assert not [message for message in backend.received() if isinstance(message, AbortRequest)]
        await backend.output("r", "too late", LENGTH)

    check(tokenizer, body)


def test_wait_empty_waits_for_open_requests(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        await backend.manager.wait_empty()
        call = await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False)
        waiting = asyncio.create_task(backend.manager.wait_empty())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await backend.output("r", "x", LENGTH)
        await asyncio.wait_for(waiting, 5)
        call.close()

    check(tokenizer, body)


def test_release_leases_call(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        async def reply(payload: bytes) -> None:
            while not (requests := backend.inbox.poll()):
                await asyncio.sleep(0.001)
            (request,) = requests
            assert isinstance(request, ReleaseRequest) and request.rid == "p"
            backend.outbox.send(ControlReply(call_id=request.call_id, payload=payload))

        for payload, released in ((b"true", True), (b"false", False)):
            got, _ = await asyncio.gather(backend.manager.control.release_leases(SOLE_CLIENT, "p"), reply(payload))
            assert got is released
        with pytest.raises(RequestRefused, match=r"did not answer release within 0.05 s"):
            await backend.manager.control.release_leases(SOLE_CLIENT, "p", timeout_s=0.05)

    check(tokenizer, body)


def test_control_calls(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        async def reply(verb: str, ok: bool, payload: bytes) -> None:
            while not (requests := backend.inbox.poll()):
                await asyncio.sleep(0.001)
            (request,) = requests
            assert isinstance(request, ControlRequest) and request.verb == verb
            backend.outbox.send(ControlReply(call_id=request.call_id, ok=ok, payload=payload))

        info, _ = await asyncio.gather(backend.manager.control.info(), reply("info", True, b'{"a": 1}'))
        assert info == {"a": 1}
        tiers, _ = await asyncio.gather(backend.manager.control.tiers(), reply("tiers", True, b'{"host": null}'))
        assert tiers == {"host": None}
        with pytest.raises(RequestRefused, match="worker broke") as caught:
            await asyncio.gather(backend.manager.control.tiers(), reply("tiers", False, b'"worker broke"'))
        assert status_of(caught.value) == 500
        await asyncio.gather(backend.manager.control.flush_cache(), reply("flush_cache", True, b"null"))
        with pytest.raises(RequestRefused, match="requests run") as caught:
            await asyncio.gather(backend.manager.control.flush_cache(), reply("flush_cache", False, b'"requests run"'))
        assert status_of(caught.value) == 409
        await asyncio.gather(backend.manager.control.start_profile(), reply("start_profile", True, b"null"))
        profile, _ = await asyncio.gather(
            backend.manager.control.stop_profile(), reply("stop_profile", True, b'{"steps": 3}')
        )
        assert profile == {"steps": 3}
        with pytest.raises(RequestRefused, match="not begun") as caught:
            await asyncio.gather(backend.manager.control.stop_profile(), reply("stop_profile", False, b'"not begun"'))
        assert status_of(caught.value) == 409 and caught.value.code == "not_profiling"
        with pytest.raises(RequestRefused, match=r"did not answer info within 0.05 s") as caught:
            await backend.manager.control.info(timeout_s=0.05)
        assert status_of(caught.value) == 504

    check(tokenizer, body)


def test_metrics_follow_the_calls(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=True) as call:
            await backend.output("r", "x")
            await backend.output("r", "yz", LENGTH, found=FoundTokens(1))
            await call.outputs()
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt()], stream=False):
            pass
        with pytest.raises(RequestRefused):
            await backend.manager.open_answer(SOLE_CLIENT, [prompt("e", "")], stream=False)
        for total in (5, 7):
            stats = SchedulerStats(steps=total, total_tokens=10, free_tokens=4, evictable_tokens=1, leased_tokens=3)
            leases = {"leases_granted": total, "leases_handed_off": 3, "leases_expired": 2, "leases_broken": 1}
            await backend.send(msgspec.structs.replace(stats, **leases))

        def value(name: str, **labels: str) -> float | None:
            return backend.manager.metrics.registry.get_sample_value(f"baton:{name}", {"model_name": "m", **labels})

        assert value("num_requests_total") == 2 and value("prompt_tokens_total") == 4
        assert value("generation_tokens_total") == 3 and value("cached_tokens_total") == 1
        assert value("time_to_first_token_seconds_count") == 1 and value("inter_token_latency_seconds_count") == 2
        assert value("e2e_request_latency_seconds_count") == 1
        assert value("num_aborted_requests_total") == 1
        assert value("num_steps_total") == 7
        assert value("kv_cache_usage_perc") == 0.5 and value("leased_tokens") == 3
        leases = [value(f"leases_{end}_total") for end in ("granted", "handed_off", "expired", "broken")]
        assert leases == [7, 3, 2, 1]

    check(tokenizer, body)
