"""Prompts that are pooled: what of them the steps pool, and that they leave nothing behind but cached KV."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request_spec import ContinuationSpec, LogprobOptions, PoolingSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.kv_echo import Stage, expected_output, prompt_of
from tests.doubles.pooled_positions import CLS, LABELS, LAST, MEAN, POOLINGS, PooledPositions
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.specs import make_pooled_spec, make_spec

LENGTH = FinishReason(type="length")


def watched(harness: Harness) -> PooledPositions:
    """The positions that the harness's steps pool."""
    positions = PooledPositions()

    def note(batch: ScheduleBatch) -> Stage | None:
        positions.note_step(batch)
        return None

    harness.fault = note
    return positions


def check_pooled(harness: Harness, positions: PooledPositions, rid: str) -> None:
    request = harness.outcomes[rid, 0].request
    assert request is not None and harness.outcomes[rid, 0].finish == LENGTH and not harness.outcomes[rid, 0].tokens
    positions.check(request)


def add_pooled(harness: Harness, rid: str, ids: list[int], pooling: PoolingSpec, **fields) -> None:
    harness.add(rid, ids, 0, pooling=pooling, no_reuse_from=0, **fields)


@PAGES
@pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
@pytest.mark.parametrize("chunk", [1, 7, 500])
@pytest.mark.parametrize("disable_radix_cache", [False, True], ids=["cache", "no cache"])
def test_every_wanted_token_is_pooled_once(page_size: int, depth: int, chunk: int, disable_radix_cache: bool) -> None:
    """In the second round the prompts are in the cache."""
    harness = Harness(
        page_size=page_size, depth=depth, chunk=chunk, num_tokens=1024, disable_radix_cache=disable_radix_cache
    )
    positions = watched(harness)
    for turn in range(2):
        for pooling in POOLINGS:
            for length in (1, 16, 33):
                add_pooled(harness, f"{turn}-{pooling.kind}-{pooling.output}-{length}", prompt_of(length), pooling)
        harness.run()
        for pooling in POOLINGS:
            for length in (1, 16, 33):
                rid = f"{turn}-{pooling.kind}-{pooling.output}-{length}"
                check_pooled(harness, positions, rid)


@pytest.mark.parametrize("pooling, found", [(LAST, 39), (MEAN, 0), (CLS, 0), (LABELS, 39)], ids=str)
def test_only_last_token_may_follow_cached_prefix(pooling: PoolingSpec, found: int) -> None:
    harness = Harness()
    harness.add("warm", prompt_of(40), 0)
    harness.run()
    add_pooled(harness, "pooled", prompt_of(40), pooling)
    harness.run()
    request = harness.outcomes["pooled", 0].request
    assert request is not None and request.found.device == found
    if not found:
        assert request.cache_report is not None
        assert {span.reason for span in request.cache_report.missed} == {"required"}


def test_pooled_prompt_shares_no_cache_across_namespaces() -> None:
    harness = Harness()
    add_pooled(harness, "theirs", prompt_of(40), LAST, namespace="them")
    harness.run()
    for namespace, found in (("us", 0), ("them", 39)):
        add_pooled(harness, namespace, prompt_of(40), LAST, namespace=namespace)
        harness.run()
        request = harness.outcomes[namespace, 0].request
        assert request is not None and request.found.device == found


def test_pooled_prompts_leave_conversations_on_record_and_in_cache() -> None:
    """Their KV is evicted before any other, and none of them takes a place in the record."""
    harness = Harness(num_tokens=256, max_finished_requests=2)
    harness.add("turn", prompt_of(60, seed=1), 4)
    harness.run()
    for i in range(20):
        add_pooled(harness, f"p{i}", prompt_of(50, seed=10 + i), LAST)
        harness.run()
    assert harness.scheduler.is_on_record("turn") and not harness.scheduler.is_on_record("p19")
    harness.continue_from("turn", "next", [5], 4)
    harness.run()
    request = harness.outcomes["next", 0].request
    assert request is not None and request.found.device == 63, "all but the last token of the turn's output"


@pytest.mark.parametrize("policy", ["fcfs", "handoff"])
@pytest.mark.parametrize("pooling", [LAST, MEAN], ids=["last", "mean"])
def test_pooled_conversation_leaves_its_lease_and_job_alone(policy: str, pooling: PoolingSpec) -> None:
    """A client that embeds what its agent has said does not continue it."""
    harness = Harness(policy=policy)
    prompt = prompt_of(40)
    harness.add("turn", prompt, 4, retain_ttl=100.0, job_id="job" if policy == "handoff" else None)
    harness.run()
    said = [*prompt, *harness.outcomes["turn", 0].tokens]
    add_pooled(harness, "pooled", [*said, 5, 6], pooling)
    harness.run()
    pooled = harness.outcomes["pooled", 0].request
    assert pooled is not None and pooled.inheritance is None and pooled.job is None
    assert pooled.found.device == (0 if pooling is MEAN else len(said) - 1)
    harness.continue_from("turn", "child", [5], 4)
    harness.run()
    child = harness.outcomes["child", 0].request
    assert child is not None and child.inheritance is not None and child.inheritance.path == "handoff"


def test_child_of_pooled_prompt_is_refused_when_it_ends() -> None:
    """Nothing of it is inherited; a child may not wait for ever."""
    harness = Harness(chunk=8)
    add_pooled(harness, "pooled", prompt_of(40), LAST)
    harness.step()
    harness.continue_from("pooled", "child", [5], 4)
    harness.run()
    refusal = harness.outcomes["child", 0].refusal
    assert refusal is not None and harness.outcomes["pooled", 0].finish == LENGTH


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"sampling": SamplingParams(max_new_tokens=3)}, "max_new_tokens"),
        ({"sampling": SamplingParams(max_new_tokens=0, n=2)}, "n"),
        ({"logprobs": LogprobOptions(start_len=0)}, "logprobs"),
        ({"continuation": ContinuationSpec("parent")}, "continuation_of"),
        ({"retain_ttl": 5.0}, "retain_ttl"),
        ({"job_id": "job"}, "job_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_output_beside_vector_is_refused(fields: dict, name: str) -> None:
    harness = Harness()
    sampling = fields.pop("sampling", SamplingParams(max_new_tokens=0))
    with pytest.raises(RequestRefused, match=f"leave {name} out") as caught:
        harness.scheduler.add_request(make_spec("pooled", [1, 2], sampling, pooling=LAST, **fields), 0.0)
    assert caught.value.param == name and harness.scheduler.is_idle


@PAGES
@pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
def test_pooled_prompts_under_pressure_and_aborts(page_size: int, depth: int) -> None:
    """Beside requests that fill the pool: invariants hold after every step (the harness checks them), the others'
    tokens are right, each vector is of the whole prompt, and at the end every slot is free or cached."""
    for seed in range(6):
        rng = random.Random(seed)
        harness = Harness(
            page_size=page_size, depth=depth, chunk=rng.choice([5, 16, 64]), num_tokens=320, rows=6, context=200,
            enable_mixed_chunk=rng.random() < 0.5,
        )  # fmt: skip
        harness.allocator.should_fail = lambda call, rng=rng: rng.random() < 0.1
        positions = watched(harness)
        sent: dict[str, tuple[list[int], PoolingSpec | None]] = {}
        aborted = set()
        for i in range(40):
            stem = prompt_of(60, seed=rng.randrange(3))
            ids = stem[: rng.randrange(60)] + prompt_of(rng.randrange(1, 40), seed=100 + i)
            pooling = rng.choice([None, *POOLINGS])
            sent[f"r{i}"] = ids, pooling
            if pooling is None:
                harness.add(f"r{i}", ids, 10)
            else:
                add_pooled(harness, f"r{i}", ids, pooling)
            for _ in range(rng.randrange(4)):
                harness.step()
            victim = rng.choice([*sent])
            if rng.random() < 0.2 and harness.outcomes[victim, 0].finish is None:
                harness.abort(victim)
                aborted.add(victim)
        harness.run()
        for rid, (ids, pooling) in sent.items():
            if rid in aborted:
                continue
            assert harness.outcomes[rid, 0].finish == LENGTH, f"seed {seed}, {rid}"
            if pooling is None:
                assert harness.outcomes[rid, 0].tokens == expected_output(ids, 10), f"seed {seed}, {rid}"
            else:
                check_pooled(harness, positions, rid)
        assert harness.allocator.free_tokens + harness.cache.evictable_tokens == 320


def test_failed_step_ends_its_pooled_prompt_alone() -> None:
    harness = Harness(chunk=64)
    add_pooled(harness, "pooled", prompt_of(40), MEAN)
    harness.fault = lambda batch: "compute"
    harness.step()
    harness.fault = lambda batch: None
    add_pooled(harness, "next", prompt_of(40), MEAN)
    harness.run()
    refusal = harness.outcomes["pooled", 0].refusal
    assert refusal is not None and refusal.code == "forward_failed"
    assert harness.outcomes["next", 0].finish == LENGTH


def test_spec_of_pooled_prompt_survives_the_wire() -> None:
    spec = make_pooled_spec("r", [1], PoolingSpec(output="tokens", token_ids=(1, 5)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=RequestSpec) == spec
