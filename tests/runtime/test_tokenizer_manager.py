"""Open calls and their ends: every rid ends once, whoever leaves first."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from byte_tokenizer import write_byte_tokenizer
from manager_rig import Backend, check, prompt
from prompts import make_prompt
from tokenizers.processors import TemplateProcessing
from trained_tokenizers import CONFIG, byte_level, write_folder

from baton.runtime.answer import Answer, Output, TokenLogprob
from baton.runtime.messages import (
    AbortRequest,
    ContinuationOutput,
    ControlReply,
    ControlRequest,
    LogprobChunk,
    ReleaseRequest,
    RequestError,
    RetainedOutput,
    TextOutput,
    TextOutputs,
    TokenOutput,
    WorkerStats,
)
from baton.runtime.prompt import ModelLimits, Prompt
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids, unpack_ids

LENGTH = FinishReason("length")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


def test_a_call_from_prompt_to_answer(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        sampling = SamplingParams(max_new_tokens=7)
        with await backend.manager.open([prompt(sampling=sampling, namespace="n")], stream=True) as call:
            (request,) = backend.received()
            assert isinstance(request, RequestSpec)
            assert unpack_ids(request.input_ids).tolist() == [97, 98]
            assert (request.sampling, request.namespace, request.stream) == (sampling, "n", True)
            await backend.output("r", "x", prompt_tokens=2, completion_tokens=1, cached_tokens=1)
            await backend.output("r", "yz", LENGTH, prompt_tokens=2, completion_tokens=3, cached_tokens=1)
            (output,) = await call.outputs()
            assert output.text == "xyz" and output.token_ids == list(b"xyz")
            assert (output.finish, output.prompt_tokens, output.completion_tokens) == (LENGTH, 2, 3)
        assert backend.manager.num_open == 0
        assert backend.received() == [], "a finished call is not aborted"

    check(tokenizer, body)


def test_readers_that_fall_behind_find_the_newest_state(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open([prompt(sampling=SamplingParams(n=2))], stream=True) as call:
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
        with await backend.manager.open([prompt(return_logprob=True, logprob_start_len=0)], stream=True) as call:
            updates = call.updates()
            first = LogprobChunk(ids=ids, values=struct.pack("<f", float("nan")))
            await backend.output("r", "é", input_logprobs=first, output_logprobs=chunk)
            one = await anext(updates)
            await backend.output("r", "b", output_logprobs=chunk)
            await backend.output("r", "c", LENGTH, output_logprobs=chunk)
            (later,) = [output async for output in updates]
            assert (one.text, later.text) == ("é", "bc")
            assert (len(one.token_ids), len(later.token_ids)) == (2, 2)
            assert one.input_logprobs == [TokenLogprob(None, 97)]
            assert later.input_logprobs == []
            assert one.output_logprobs == [TokenLogprob(-0.5, 97)]
            assert later.output_logprobs == [TokenLogprob(-0.5, 97)] * 2

    check(tokenizer, body)


def test_a_reader_that_leaves_aborts_and_its_rid_stays_taken_until_the_end(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open([prompt()], stream=False):
            pass
        assert [type(message) for message in backend.received()] == [RequestSpec, AbortRequest]
        with pytest.raises(RequestRefused) as caught:
            await backend.manager.open([prompt()], stream=False)
        assert caught.value.status == 409
        # What the first still says is not taken for the second.
        await backend.output("r", "old", FinishReason("abort"))
        assert backend.manager.num_open == 0
        with await backend.manager.open([prompt()], stream=False) as call:
            await backend.output("r", "new", LENGTH)
            assert (await call.outputs())[0].text == "new"

    check(tokenizer, body)


def test_abort_by_rid_by_group_and_of_all(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        calls = [
            await manager.open([prompt("a")], stream=False),
            await manager.open([prompt("b_0", group="b"), prompt("b_1", group="b")], stream=False),
            await manager.open([prompt("c")], stream=False),
        ]
        backend.received()
        assert manager.abort("nobody") == []
        assert manager.abort("a") == ["a"]
        assert manager.abort("b") == ["b_0", "b_1"]
        assert [m.rid for m in backend.received() if isinstance(m, AbortRequest)] == ["a", "b_0", "b_1"]
        assert manager.abort(None) == ["a", "b_0", "b_1", "c"]
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
        with await backend.manager.open([prompt("x"), prompt("y")], stream=False) as call:
            await backend.send(RequestError(rid="x", status=400, message="too large", code="c", param="text"))
            with pytest.raises(RequestRefused) as caught:
                await call.outputs()
            assert (caught.value.status, caught.value.message, caught.value.param) == (400, "too large", "text")
        aborts = [message.rid for message in backend.received() if isinstance(message, AbortRequest)]
        assert aborts == ["y"]

    check(tokenizer, body)


def test_nothing_is_sent_when_one_prompt_is_bad(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        for bad in (prompt("y", ""), prompt("x"), prompt("y", "a" * 501), prompt("y", "\ud800")):
            with pytest.raises(RequestRefused):
                await backend.manager.open([prompt("x"), bad], stream=False)
        assert backend.received() == [] and backend.manager.num_open == 0

    check(tokenizer, body)


def test_calls_before_the_model_is_loaded(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        for work in (backend.manager.open([prompt()], stream=False), backend.manager.control.flush_cache()):
            with pytest.raises(RequestRefused) as caught:
                await work
            assert (caught.value.status, caught.value.code) == (503, "not_ready")
        assert not backend.manager.is_ready

    check(tokenizer, body, ready=False)


def test_fail_all_ends_what_is_open_and_what_comes(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        call = await manager.open([prompt()], stream=True)
        flushing = asyncio.create_task(manager.control.flush_cache())
        await asyncio.sleep(0)
        error = RequestRefused("the worker died", status=503)
        manager.fail_all(error)
        for work in (call.outputs(), anext(call.updates()), flushing, manager.open([prompt("s")], stream=False)):
            with pytest.raises(RequestRefused, match="the worker died"):
                await work
        await manager.wait_empty()
        call.close()
        assert not [message for message in backend.received() if isinstance(message, AbortRequest)]
        await backend.output("r", "too late", LENGTH)

    check(tokenizer, body)


def test_wait_empty(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        await backend.manager.wait_empty()
        call = await backend.manager.open([prompt()], stream=False)
        waiting = asyncio.create_task(backend.manager.wait_empty())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await backend.output("r", "x", LENGTH)
        await asyncio.wait_for(waiting, 5)
        call.close()

    check(tokenizer, body)


def child(rid: str = "c", parent: str = "p", **fields: Any) -> Prompt:
    own = {
        name: fields.pop(name)
        for name in ("text", "input_ids", "suffix_ids", "retain_ttl", "sampling")
        if name in fields
    }
    return make_prompt(rid=rid, group=rid, continuation=ContinuationSpec(parent, **fields), **own)


def test_a_continuation_sends_its_suffix_and_its_own_prompt(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        prompts = [
            child("a", suffix_text="é<eos>", index=3, at="now", keep_parent=True, retain_ttl=7.0),
            child("b", suffix_ids=[1, 2], text="ab"),
            child("c", input_ids=[5]),
            prompt("d"),
        ]
        call = await backend.manager.open(prompts, stream=True)
        got = [message for message in backend.received() if isinstance(message, RequestSpec)]
        # Special tokens that the text spells out are taken; none is added.
        assert [unpack_ids(m.input_ids).tolist() for m in got] == [[195, 169, 256], [1, 2], [], [97, 98]]
        assert [m.continuation for m in got] == [
            ContinuationSpec(parent_rid="p", index=3, at="now", keep_parent=True, suffix_text="é<eos>"),
            ContinuationSpec(parent_rid="p", fallback_ids=pack_ids([97, 98])),
            ContinuationSpec(parent_rid="p", fallback_ids=pack_ids([5])),
            None,
        ]
        assert [m.retain_ttl for m in got] == [7.0, None, None, None]
        for rid in "abcd":
            await backend.output(rid, "x", LENGTH)
        call.close()

    check(tokenizer, body)


def test_no_special_token_is_added_to_a_suffix(tmp_path: Path) -> None:
    trained = byte_level()
    trained.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    adding = Tokenizer.load(write_folder(tmp_path, trained, CONFIG))

    async def body(backend: Backend) -> None:
        call = await backend.manager.open([child(suffix_text="fox", text="fox")], stream=False)
        (message,) = backend.received()
        assert isinstance(message, RequestSpec) and message.continuation is not None
        plain = adding.encode("fox", add_special_tokens=False)
        assert unpack_ids(message.input_ids).tolist() == plain
        assert message.continuation.fallback_ids == pack_ids([1, *plain])
        await backend.output("c", "x", LENGTH)
        call.close()

    check(adding, body)


def test_a_child_never_overtakes_a_parent_that_is_still_tokenised(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        backend.manager._availability.open(ModelLimits(context_length=10**7, vocab_size=257))
        calls = await asyncio.gather(
            manager.open([prompt("p", "word " * 200_000)], stream=False),
            manager.open([child("c", "p")], stream=False),
            manager.open([child("g", "c", suffix_text="x" * 30_000)], stream=False),
            manager.open([prompt("other")], stream=False),
        )
        rids = [message.rid for message in backend.received() if isinstance(message, RequestSpec)]
        assert sorted(rids) == ["c", "g", "other", "p"]
        assert rids.index("p") < rids.index("c") < rids.index("g")
        assert rids[0] == "other", "nobody else waits"
        assert manager._prompt_tokenizer.num_in_progress == 0
        for rid in rids:
            await backend.output(rid, "x", LENGTH)
        for call in calls:
            call.close()

    check(tokenizer, body)


def test_a_parent_that_is_refused_leaves_nobody_waiting(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        refused, opened = await asyncio.gather(
            manager.open([prompt("p", "word " * 200_000)], stream=False),
            manager.open([child("c", "p")], stream=False),
            return_exceptions=True,
        )
        assert isinstance(refused, RequestRefused) and not isinstance(opened, BaseException)
        assert [m.rid for m in backend.received() if isinstance(m, RequestSpec)] == ["c"]
        await backend.send(RequestError(rid="c", status=404, message="no such request", param="continuation_of"))
        with pytest.raises(RequestRefused) as caught:
            await opened.outputs()
        assert (caught.value.status, caught.value.param) == (404, "continuation_of")
        assert manager._prompt_tokenizer.num_in_progress == 0

    check(tokenizer, body)


def test_a_refusal_by_the_worker_names_the_field_the_ids_came_from(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        cases = [
            (prompt("r"), "text"),
            (child("r", suffix_text="x"), "continuation_suffix"),
            (child("r", suffix_ids=[1]), "continuation_ids"),
            (make_prompt(rid="r", input_ids=[1]), "input_ids"),
        ]
        for asked, param in cases:
            call = await backend.manager.open([asked], stream=True)
            await backend.send(RequestError(rid="r", status=400, message="too long", param="input_ids"))
            with pytest.raises(RequestRefused) as caught:
                await anext(call.updates())
            assert caught.value.param == param

    check(tokenizer, body)


def test_what_was_inherited_and_what_is_retained_comes_with_the_end(tokenizer: Tokenizer) -> None:
    inherited = ContinuationOutput(path="handoff", inherited_tokens=9, recomputed_tokens=1, trimmed_tokens=0)

    async def ended(backend: Backend, retained: RetainedOutput | None) -> Output:
        with await backend.manager.open([child(retain_ttl=5.0)], stream=False) as call:
            await backend.output("c", "x", LENGTH, prompt_tokens=10, continuation=inherited, retained=retained)
            return (await call.outputs())[0]

    async def body(backend: Backend) -> None:
        kept, full = RetainedOutput(tokens=10, ttl=4.5), RetainedOutput(refused="full")
        output = await ended(backend, kept)
        assert (output.continuation, output.retained) == (inherited, kept)
        assert (await ended(backend, full)).retained == full
        # Leased only for a child that waits: nobody asked.
        assert (await ended(backend, RetainedOutput(tokens=10, ttl=0.0))).retained is None
        assert (await ended(backend, None)).retained is None

        registry = backend.manager.metrics.registry
        counted = registry.get_sample_value("baton:prompt_tokens_total", {"model_name": "m"})
        assert counted == 40, "the parent's tokens count as prompt tokens too"

    check(tokenizer, body)


def test_release(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        async def reply(payload: bytes) -> None:
            while not (requests := backend.inbox.poll()):
                await asyncio.sleep(0.001)
            (request,) = requests
            assert isinstance(request, ReleaseRequest) and request.rid == "p"
            backend.outbox.send(ControlReply(call_id=request.call_id, payload=payload))

        for payload, released in ((b"true", True), (b"false", False)):
            got, _ = await asyncio.gather(backend.manager.control.release("p"), reply(payload))
            assert got is released
        with pytest.raises(RequestRefused, match=r"did not answer release within 0.05 s"):
            await backend.manager.control.release("p", timeout_s=0.05)

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
        await asyncio.gather(backend.manager.control.flush_cache(), reply("flush_cache", True, b"null"))
        with pytest.raises(RequestRefused, match="requests run") as caught:
            await asyncio.gather(backend.manager.control.flush_cache(), reply("flush_cache", False, b'"requests run"'))
        assert caught.value.status == 409
        await asyncio.gather(backend.manager.control.start_profile(), reply("start_profile", True, b"null"))
        profile, _ = await asyncio.gather(
            backend.manager.control.stop_profile(), reply("stop_profile", True, b'{"steps": 3}')
        )
        assert profile == {"steps": 3}
        with pytest.raises(RequestRefused, match="not begun") as caught:
            await asyncio.gather(backend.manager.control.stop_profile(), reply("stop_profile", False, b'"not begun"'))
        assert caught.value.status == 409 and caught.value.code == "not_profiling"
        with pytest.raises(RequestRefused, match=r"did not answer info within 0.05 s") as caught:
            await backend.manager.control.info(timeout_s=0.05)
        assert caught.value.status == 504

    check(tokenizer, body)


def test_long_texts_do_not_stop_the_loop(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        text = "word " * 200_000
        ids = await backend.manager.tokenize([text])
        assert len(ids[0]) == 1_000_000
        assert ticks > 5
        ticks = 0
        with pytest.raises(RequestRefused, match="max_new_tokens is 128"):
            await backend.manager.open([child("c", suffix_text=text)], stream=False)
        assert ticks > 5
        ticking.cancel()

    check(tokenizer, body, context_length=1_000_050)


def test_the_logprobs_of_each_prompt_are_a_turn_of_their_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    feed = Answer.feed
    monkeypatch.setattr(Answer, "feed", lambda *given: seen.append("fed") or feed(*given))

    async def body(backend: Backend) -> None:
        async def others() -> None:
            while True:
                seen.append("turn")
                await asyncio.sleep(0)

        with await backend.manager.open([prompt("a"), prompt("b")], stream=False) as call:
            counting = asyncio.create_task(others())
            chunk = LogprobChunk(ids=pack_ids([97]), values=bytes(4))
            items = [
                TextOutput(output=TokenOutput(rid=rid, new_ids=b"", finish=LENGTH, input_logprobs=chunk), text="")
                for rid in "ab"
            ]
            await backend.send(TextOutputs(items=items))
            await call.outputs()
            counting.cancel()
        first = seen.index("fed")
        assert seen.index("turn", first) < seen.index("fed", first + 1)

    check(tokenizer, body)


def test_a_text_that_can_never_fit_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    encode_piece = Tokenizer.encode_piece
    monkeypatch.setattr(Tokenizer, "encode_piece", lambda self, text: pieces.append(text) or encode_piece(self, text))
    monkeypatch.setattr(Tokenizer, "encode_batch", None)

    async def body(backend: Backend) -> None:
        for opened in ([prompt("p", "x" * 3_000_000)], [child("g", "c", suffix_text="x" * 3_000_000)]):
            with pytest.raises(RequestRefused, match="has 3000000 characters") as caught:
                await backend.manager.open(opened, stream=False)
            assert caught.value.code == "context_length_exceeded"
        assert not pieces
        # This one could fit by its length, and is given up as soon as it shows that it does not.
        with pytest.raises(RequestRefused, match="more than 100000 tokens"):
            await backend.manager.open([prompt("p", "xy " * 600_000)], stream=False)
        assert 2 <= len(pieces) <= 8

    check(tokenizer, body, context_length=100_000)


def test_the_tokens_of_a_call_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.text.prompt_tokenizer.MAX_TOKENS_OF_CALL", 20_000)

    async def body(backend: Backend) -> None:
        assert [len(ids) for ids in await backend.manager.tokenize(["x" * 5_000] * 4)] == [5_000] * 4
        with pytest.raises(RequestRefused, match="more than 20000 tokens together"):
            await backend.manager.tokenize(["x" * 5_000] * 5)

    check(tokenizer, body, context_length=100_000)


def test_metrics_follow_the_calls(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        with await backend.manager.open([prompt()], stream=True) as call:
            await backend.output("r", "x")
            await backend.output("r", "yz", LENGTH, cached_tokens=1)
            await call.outputs()
        with await backend.manager.open([prompt()], stream=False):
            pass
        with pytest.raises(RequestRefused):
            await backend.manager.open([prompt("e", "")], stream=False)
        for total in (5, 7):
            stats = WorkerStats(steps=total, total_tokens=10, free_tokens=4, evictable_tokens=1, leased_tokens=3)
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
