"""Continuations on their way to the worker, and what comes back with their ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from baton.entrypoints.http_statuses import status_of
from baton.runtime.answer import Output
from baton.runtime.clients import SOLE_CLIENT
from baton.runtime.messages import (
    ContinuationOutput,
    RequestError,
    RetainedOutput,
)
from baton.runtime.prompt import ModelLimits
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.token_buffer import pack_ids, unpack_ids
from tests.doubles.manager_rig import Backend, check, child, prompt
from tests.doubles.prompts import make_prompt
from tests.doubles.trained_tokenizers import CONFIG, byte_level, write_folder

LENGTH = FinishReason("length")


def test_continuation_sends_suffix_and_fallback_prompt(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        prompts = [
            child("a", suffix_text="é<eos>", index=3, at="now", keep_parent=True, retain_ttl=7.0),
            child("b", suffix_ids=[1, 2], text="ab"),
            child("c", input_ids=[5]),
            prompt("d"),
        ]
        call = await backend.manager.open_answer(SOLE_CLIENT, prompts, stream=True)
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
        call = await backend.manager.open_answer(SOLE_CLIENT, [child(suffix_text="fox", text="fox")], stream=False)
        (message,) = backend.received()
        assert isinstance(message, RequestSpec) and message.continuation is not None
        plain = adding.encode("fox", add_special_tokens=False)
        assert unpack_ids(message.input_ids).tolist() == plain
        assert message.continuation.fallback_ids == pack_ids([1, *plain])
        await backend.output("c", "x", LENGTH)
        call.close()

    check(adding, body)


def test_child_waits_for_tokenisation_of_its_parent(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        backend.manager._availability.mark_ready(ModelLimits(context_length=10**7, vocab_size=257))
        calls = await asyncio.gather(
            manager.open_answer(SOLE_CLIENT, [prompt("p", "word " * 200_000)], stream=False),
            manager.open_answer(SOLE_CLIENT, [child("c", "p")], stream=False),
            manager.open_answer(SOLE_CLIENT, [child("g", "c", suffix_text="x" * 30_000)], stream=False),
            manager.open_answer(SOLE_CLIENT, [prompt("other")], stream=False),
        )
        rids = [message.rid for message in backend.received() if isinstance(message, RequestSpec)]
        assert sorted(rids) == ["c", "g", "other", "p"]
        assert rids.index("p") < rids.index("c") < rids.index("g")
        assert rids[0] == "other", "no other call waits"
        assert manager._prompt_tokenizer.num_in_progress == 0
        for rid in rids:
            await backend.output(rid, "x", LENGTH)
        for call in calls:
            call.close()

    check(tokenizer, body)


def test_a_refused_parent_leaves_no_child_waiting(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        manager = backend.manager
        refused, opened = await asyncio.gather(
            manager.open_answer(SOLE_CLIENT, [prompt("p", "word " * 200_000)], stream=False),
            manager.open_answer(SOLE_CLIENT, [child("c", "p")], stream=False),
            return_exceptions=True,
        )
        assert isinstance(refused, RequestRefused) and not isinstance(opened, BaseException)
        assert [m.rid for m in backend.received() if isinstance(m, RequestSpec)] == ["c"]
        await backend.send(
            RequestError(rid="c", message="no such request", code="parent_not_found", param="continuation_of")
        )
        with pytest.raises(RequestRefused) as caught:
            await opened.outputs()
        assert (status_of(caught.value), caught.value.param) == (404, "continuation_of")
        assert manager._prompt_tokenizer.num_in_progress == 0

    check(tokenizer, body)


def test_worker_refusal_names_the_source_field_of_ids(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        cases = [
            (prompt("r"), "text"),
            (child("r", suffix_text="x"), "continuation_suffix"),
            (child("r", suffix_ids=[1]), "continuation_ids"),
            (make_prompt(rid="r", input_ids=[1]), "input_ids"),
        ]
        for asked, param in cases:
            call = await backend.manager.open_answer(SOLE_CLIENT, [asked], stream=True)
            await backend.send(RequestError(rid="r", message="too long", param="input_ids"))
            with pytest.raises(RequestRefused) as caught:
                await anext(call.updates())
            assert caught.value.param == param

    check(tokenizer, body)


def test_final_output_reports_inheritance_and_lease(tokenizer: Tokenizer) -> None:
    inherited = ContinuationOutput(path="handoff", inherited_tokens=9, recomputed_tokens=1, trimmed_tokens=0)

    async def ended(backend: Backend, retained: RetainedOutput | None) -> Output:
        with await backend.manager.open_answer(SOLE_CLIENT, [child(retain_ttl=5.0)], stream=False) as call:
            await backend.output("c", "x", LENGTH, prompt_tokens=10, continuation=inherited, retained=retained)
            return (await call.outputs())[0]

    async def body(backend: Backend) -> None:
        kept, full = RetainedOutput(tokens=10, ttl=4.5), RetainedOutput(refused="full")
        output = await ended(backend, kept)
        assert (output.continuation, output.retained) == (inherited, kept)
        assert (await ended(backend, full)).retained == full
        # Leased only for a child that waits: no client asked for it.
        assert (await ended(backend, RetainedOutput(tokens=10, ttl=0.0))).retained is None
        assert (await ended(backend, None)).retained is None

        registry = backend.manager.metrics.registry
        counted = registry.get_sample_value("baton:prompt_tokens_total", {"model_name": "m"})
        assert counted == 40, "the parent's tokens count as prompt tokens too"

    check(tokenizer, body)
