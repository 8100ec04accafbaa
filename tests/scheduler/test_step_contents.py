"""What a step says of its rows, field by field: prompts, running requests, and the beams of a search."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.batch import ForwardMode, ScheduleBatch, StepResult
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.beam_search_scene import add, search
from tests.doubles.scheduler_harness import Harness
from tests.doubles.specs import make_spec

DTYPES = {
    "serials": np.int64,
    "input_ids": np.int32,
    "out_cache_loc": np.int32,
    "req_pool_indices": np.int32,
    "prefix_lens": np.int32,
    "extend_lens": np.int32,
    "samples": np.bool_,
    "output_positions": np.int32,
    "logprob_starts": np.int32,
}


def next_batch(harness: Harness) -> ScheduleBatch:
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None
    assert {name: getattr(batch, name).dtype.type for name in DTYPES} == DTYPES
    rows = {name: len(getattr(batch, name)) for name in DTYPES if name not in ("input_ids", "out_cache_loc")}
    assert set(rows.values()) == {len(batch)}
    assert len(batch.input_ids) == len(batch.out_cache_loc) == batch.extend_lens.sum()
    return batch


def answer(harness: Harness, batch: ScheduleBatch) -> None:
    harness._take(harness.scheduler.process_result(harness.model.forward(batch), 0.0))
    harness.verify()


def lists(batch: ScheduleBatch, *names: str) -> list[list]:
    return [getattr(batch, name).tolist() for name in names]


def serial(harness: Harness, rid: str) -> int:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request.serial


@pytest.mark.parametrize("page_size", [1, 16])
def test_batch_rows_of_requests_and_search(page_size: int) -> None:
    harness = Harness(num_tokens=1024, page_size=page_size, chunk=64)
    harness.add("plain", [1, 2, 3], 8)
    add(harness, "find", list(range(37)), search(3, 4, n=3, min_new_tokens=2, stop=("x",)))
    batch = next_batch(harness)
    assert batch.mode is ForwardMode.EXTEND and batch.is_extend
    find, plain = serial(harness, "find"), serial(harness, "plain")
    assert [info.serial for info in batch.opened] == [plain, find] and batch.closed == []
    assert lists(batch, "serials", "prefix_lens", "extend_lens") == [[plain, find], [0, 0], [3, 37]]
    assert lists(batch, "samples", "output_positions", "logprob_starts") == [[True, True], [0, 0], [3, 37]]
    assert batch.input_ids.tolist() == [1, 2, 3, *range(37)] and batch.logprob_targets == []
    (beams,) = batch.beams
    assert (beams.serial, beams.start, beams.stop, beams.shared_len, beams.bans_ends) == (find, 1, 2, 0, True)
    assert beams.num_candidates == 6 and beams.scores.tolist() == [0.0] and beams.allowed is None
    assert beams.sequences is not None and beams.sequences.shape == (1, 0)
    answer(harness, batch)

    shared = 37 - 37 % page_size
    for known in (1, 2):
        group = harness.outcomes["find", 0].request.beams  # type: ignore[union-attr]
        assert group is not None
        tokens, scores = group.sequences(), group.scores
        batch = next_batch(harness)
        assert batch.mode is ForwardMode.DECODE and batch.opened == [] and batch.closed == []
        assert lists(batch, "serials", "prefix_lens") == [[plain, find, find, find], [2 + known] + [36 + known] * 3]
        assert lists(batch, "extend_lens", "logprob_starts") == [[1] * 4, [1] * 4]
        assert lists(batch, "samples", "output_positions") == [[True] * 4, [known] * 4]
        assert batch.input_ids[1:].tolist() == tokens[:, -1].tolist()
        (beams,) = batch.beams
        assert (beams.serial, beams.start, beams.stop) == (find, 1, 4)
        assert (beams.shared_len, beams.bans_ends, beams.num_candidates) == (shared, known < 2, 6)
        assert beams.scores.tolist() == scores.tolist()
        assert beams.sequences is not None and beams.sequences.tolist() == tokens.tolist()
        answer(harness, batch)


def test_search_without_stop_strings_sends_no_sequences() -> None:
    harness = Harness()
    trie = ItemTrie.build(np.array([[10, 11], [12, 13]], dtype=np.int32))
    add(harness, "find", [1, 2, 3], search(2, 4, n=2, item_trie="items"), trie=trie)
    batch = next_batch(harness)
    (beams,) = batch.beams
    assert beams.sequences is None and batch.allowed is None and beams.allowed is not None
    assert [array.tolist() for array in beams.allowed.unpack()] == [[0, 0], [10, 12]]
    assert not batch.opened[0].eos_ends


def test_only_repetition_penalties_send_the_prompt() -> None:
    harness = Harness()
    harness.add("plain", [1, 2, 3], 4)
    harness.add("counts", [4, 5, 6], 4, repetition_penalty=1.5)
    plain, counts = next_batch(harness).opened
    assert plain.prompt_ids.tolist() == [] and counts.prompt_ids.tolist() == [4, 5, 6]
    assert plain.eos_ends and counts.sampling.repetition_penalty == 1.5


def test_logprob_targets_of_chunked_prompt() -> None:
    """Token j of a step predicts the one after it; the last of the prompt predicts an output token."""
    harness = Harness(chunk=4)
    spec = make_spec("r", range(10, 20), SamplingParams(max_new_tokens=1), logprobs=LogprobOptions(start_len=3))
    harness.scheduler.add_request(spec, 0.0)
    starts, targets, samples, positions = [], [], [], []
    for _ in range(3):
        batch = next_batch(harness)
        starts += batch.logprob_starts.tolist()
        targets.append([part.tolist() for part in batch.logprob_targets])
        samples += batch.samples.tolist()
        positions += batch.output_positions.tolist()
        harness.scheduler.process_result(StepResult.of_rows([[5] if batch.samples[0] else []]), 0.0)
    assert starts == [2, 0, 0] and samples == [False, False, True] and positions == [0, 0, 0]
    assert targets == [[[13, 14]], [[15, 16, 17, 18]], [[19]]]
    assert harness.scheduler.is_idle


def test_ended_sequence_is_closed_in_next_step() -> None:
    harness = Harness()
    harness.add("short", [1, 2], 1)
    harness.add("long", [3, 4], 3)
    answer(harness, next_batch(harness))
    assert next_batch(harness).closed == [serial(harness, "short")]


def test_retracted_search_requests_no_candidates_until_caught_up() -> None:
    harness = Harness(num_tokens=1024)
    add(harness, "find", list(range(20)), search(3, 6, n=3))
    for _ in range(3):
        answer(harness, next_batch(harness))
    request = harness.outcomes["find", 0].request
    assert request is not None and request.beams is not None and request.beams.num_tokens == 3
    harness.scheduler._retract(request)
    asked, samples, positions = [], [], []
    for _ in range(4):
        batch = next_batch(harness)
        asked.append(batch.beams[0].num_candidates)
        samples.append(set(batch.samples[1:].tolist()) if len(batch) > 1 else set())
        positions.append(batch.output_positions.tolist()[-1])
        answer(harness, batch)
    assert asked == [0, 0, 0, 6] and samples == [set(), {False}, {False}, {True}] and positions == [0, 1, 2, 3]


@pytest.mark.parametrize(("chunk", "mixes"), [(4, True), (3, False)])
def test_running_requests_take_at_most_half_of_a_mixed_step(chunk: int, mixes: bool) -> None:
    harness = Harness(chunk=chunk, enable_mixed_chunk=True)
    for number in range(2):
        harness.add(f"r{number}", [1 + number], 9)
    answer(harness, next_batch(harness))
    harness.add("prompt", list(range(10, 19)), 2)
    assert next_batch(harness).extend_lens.tolist() == ([2, 1, 1] if mixes else [3])


def test_last_token_of_chunk_goes_to_next_prompt() -> None:
    harness = Harness(chunk=5)
    harness.add("a", [1, 2, 3, 4], 2)
    harness.add("b", [5, 6, 7], 2)
    harness.add("c", [8], 2)
    assert harness.scheduler.stats().num_queue_reqs == 3
    batch = next_batch(harness)
    assert batch.extend_lens.tolist() == [4, 1] and batch.samples.tolist() == [True, False]
    stats = harness.scheduler.stats()
    assert (stats.num_running_reqs, stats.num_queue_reqs) == (2, 1), "a prompt that is half computed runs"


def test_abort_all_requests_uses_given_message() -> None:
    harness = Harness()
    harness.add("runs", [1, 2], 9, retain_ttl=5.0)
    harness.add("leased", [3, 4], 1, retain_ttl=5.0)
    answer(harness, next_batch(harness))
    assert harness.scheduler.num_parked == 0
    harness.continue_from("leased", "child", [5], 2)
    harness.continue_from("runs", "parked", [5], 2)
    assert harness.scheduler.num_parked == 1
    harness.abort("parked")
    assert harness.scheduler.num_parked == 0
    harness.add("waits", [6], 2)
    events = harness.scheduler.abort_all_requests(3.0, "the server stops")
    assert {event.request.rid for event in events} == {"runs", "child", "waits"}
    assert {(event.finish.type, event.finish.message) for event in events if event.finish is not None} == {
        ("abort", "the server stops")
    }
    (lease,) = harness.scheduler.live_leases()
    assert lease.idle_since == 3.0, "the child gave it back then"
    assert harness.scheduler.is_idle


def test_sequences_closed_by_failed_step_are_closed_again() -> None:
    """If it failed before the step runner had it, the sampler would keep these sequences for good."""
    harness = Harness()
    harness.add("short", [1, 2], 1)
    harness.add("long", [3, 4], 3)
    answer(harness, next_batch(harness))
    closed = next_batch(harness).closed
    harness._take(harness.scheduler.fail_step(0.0, "what it reads was not ordered"))
    harness.add("late", [5, 6], 3)
    assert sorted(next_batch(harness).closed) == [*closed, serial(harness, "long")]
