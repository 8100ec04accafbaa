"""Simulations of models with recurrent states, and with a pool for layers with a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.simulate.arms import Sender
from baton.entrypoints.simulate.cost_model import Linear
from baton.entrypoints.simulate.job_records import JobRecord, TurnRecord, summarize
from baton.entrypoints.simulate.simulation import GENERATION_PROMPT, Simulation, size_of
from baton.scheduler.batch import ScheduleBatch
from tests.doubles.simulated import USUAL, crowd, simulation, talk

CHUNK = 64
WINDOW = 20
LEAST_WINDOWS = 96
"""With which a request can run alone: a window, slack, a chunk and a padding token or two."""


def six_jobs(**options: Any) -> Simulation:
    """Six jobs whose second turns come when all first turns have ended. The KV pool has room for all."""
    jobs = [talk(str(number), 5.0 * number, (40, 3, 60.0), (4, 2, 0.0)) for number in range(6)]
    return simulation(jobs, chunked_prefill_size=CHUNK, **options)


def second_turns(records: Sequence[JobRecord]) -> list[TurnRecord]:
    return [record.turns[1] for record in records]


@pytest.mark.parametrize("sender", ["generate", "chat", "bare"])
def test_few_states_lose_tokens_and_enough_do_not(sender: Sender) -> None:
    options: dict[str, Any] = {"sender": sender}
    few, enough = (six_jobs(sizes={"states": count}, **options).run() for count in (3, 64))
    lost = [turn.no_state for turn in second_turns(few)]
    assert max(lost) == 42 and [turn.recomputed for turn in second_turns(few)] == lost
    assert all(turn.found == turn.kept == 42 and not turn.no_state for turn in second_turns(enough))
    figures = summarize(few, trim=0.0)
    assert figures["no_state_share"] == sum(lost) / figures["prompt_tokens"] > 0
    assert figures["no_window_share"] == 0 == summarize(enough, trim=0.0)["no_state_share"]


def test_a_small_window_pool_loses_tokens_and_a_larger_one_does_not() -> None:
    few, enough = (six_jobs(sizes={"window": WINDOW, "window_tokens": size}).run() for size in (LEAST_WINDOWS, 1000))
    lost = [turn.no_window for turn in second_turns(few)]
    assert max(lost) > 30 and [turn.recomputed for turn in second_turns(few)] == lost
    assert all(turn.found == turn.kept == 42 and not turn.no_window for turn in second_turns(enough))
    assert summarize(few, trim=0.0)["no_window_share"] > 0 == summarize(enough, trim=0.0)["no_window_share"]


def test_states_come_back_from_the_host_in_their_time() -> None:
    cost = Linear(fixed_s=1.0, prompt_token_s=0, decode_row_s=0, context_token_s=0, load_state_s=2.5, layers=4)
    played = six_jobs(cost=cost, host=400, sizes={"states": 3, "host_states": 32})
    turns = second_turns(played.run())
    assert all(turn.recomputed == turn.no_state == 0 for turn in turns)
    loaded = [turn for turn in turns if turn.from_host]
    assert loaded and all(turn.first_token - turn.sent == 2.5 + 1.0 for turn in loaded)
    assert played.engine.host is not None and played.engine.host.counts.loaded_states == len(loaded)


def test_chats_keep_the_state_before_the_generation_prompt() -> None:
    """A second attempt begins there; a prompt of /generate leaves one before its last token."""
    senders: list[tuple[Sender, bool]] = [("chat", True), ("generate", False)]
    for sender, states in senders:
        played = simulation([talk("a", 0.0, (40, 3, 0.0))], sender=sender, sizes={"states": 8})
        played.run()
        tree = played.engine.cache
        ids = played.records[0].job.first_id + np.arange(40, dtype=np.int32)
        match = tree.match_prefix("", ids[: 40 - GENERATION_PROMPT + 1])
        assert (match.device_len == 40 - GENERATION_PROMPT) is states


POOLS: list[dict[str, Any]] = [
    {"sizes": {"states": 64}},
    {"sizes": {"states": 64}, "page_size": 16},
    {"sizes": {"window": 32, "window_tokens": 1600}},
    {"sizes": {"window": 32, "window_tokens": 800}, "page_size": 16},
]
TIGHT: dict[str, Any] = {"sizes": {"window": 128, "window_tokens": 700}}
"""With twelve jobs it evicts windows all the time."""


@pytest.mark.parametrize(("options", "count"), [*((pools, 5) for pools in POOLS), (TIGHT, 12)], ids=str)
def test_bursts_change_nothing_without_waiting_requests(options: dict[str, Any], count: int) -> None:
    jobs = crowd(count, rate=1.0)
    plain, fast = (
        simulation(jobs, cost=USUAL, pool=20_000, burst=burst, check_every=40, chunked_prefill_size=256, **options)
        for burst in (1, 16)
    )
    for one, many in zip(plain.run(), fast.run()):
        for before, after in zip(one.turns, many.turns):
            assert (after.found, after.no_state, after.no_window) == (before.found, before.no_state, before.no_window)
            assert (after.first_token, after.end) == pytest.approx((before.first_token, before.end))
    has_bursts = not (options["sizes"].get("states") and options.get("page_size"))
    assert (fast.steps < plain.steps) == has_bursts


def test_steps_after_a_burst_name_what_they_write() -> None:
    played = simulation(crowd(4, rate=1.0), cost=USUAL, burst=4, check_every=1, sizes={"states": 32})
    lengths: set[int] = set()
    while played.step():
        if played._launched is not None:
            batch = played._launched.batch
            assert batch.states is not None
            is_last = np.diff(batch.states.rows, append=len(batch)) > 0
            assert (batch.states.ends[is_last] == batch.extend_lens).all()
            lengths |= set() if batch.is_extend else set(batch.extend_lens.tolist())
    assert {1, 4} <= lengths


@pytest.mark.parametrize("window", [0, 1, 4, 9, 100])
def test_step_size_counts_what_layers_with_a_window_see(window: int) -> None:
    before, new = np.array([0, 3, 20, 7], dtype=np.int32), np.array([5, 9, 1, 1], dtype=np.int32)
    batch = ScheduleBatch.__new__(ScheduleBatch)
    batch.prefix_lens, batch.extend_lens, batch.serials = before, new, np.arange(4)
    size = size_of(batch, window)
    assert (size.prompt_tokens, size.decode_rows, size.prompt_rows, size.context) == (14, 2, 2, 46)
    if not window:
        assert size.window_context == size.window_attended == 0
        return
    seen = [[range(max(0, at - window + 1), at + 1) for at in range(b, b + n)] for b, n in zip(before, new)]
    assert size.window_attended == sum(len(tokens) for row in seen for tokens in row)
    assert size.window_context == sum(len({token for tokens in row for token in tokens}) for row in seen)
