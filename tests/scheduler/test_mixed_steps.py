"""--enable-mixed-chunk: steps of prompts that also compute a token for each running request."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request import RequestStatus
from tests.doubles.kv_echo import VOCAB, expected_beams, expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness, Outcome

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


class MixedHarness(Harness):
    """Keeps its batches. ``flood`` sends prompts without end."""

    def __init__(self, **options) -> None:
        super().__init__(**{"enable_mixed_chunk": True, **options})
        self.batches: list[ScheduleBatch] = []
        self.fault = self._keep
        self.flooded = 0

    def _keep(self, batch: ScheduleBatch) -> None:
        self.batches.append(batch)

    def flood(self, rid: str, tokens: int = 40, new: int = 1) -> tuple[Outcome, int]:
        """Send a prompt per step until ``rid`` has ended. Returns what it said, and the most steps without a token."""
        outcome, gap, longest = self.outcomes[rid, 0], 0, 0
        while outcome.finish is None:
            self.add(f"p{self.flooded}", prompt_of(tokens, self.flooded), new)
            self.flooded += 1
            assert self.flooded < 500, f"{rid} starves"
            before = len(outcome.tokens)
            self.step()
            gap = 0 if len(outcome.tokens) > before else gap + 1
            longest = max(longest, gap)
        return outcome, longest


def rows_of(batch: ScheduleBatch) -> list[int]:
    return batch.extend_lens.tolist()


@pytest.mark.parametrize("beam_width", [None, 2])
def test_mixed_steps_exclude_beam_searches(beam_width: int | None) -> None:
    harness = MixedHarness()
    harness.add("plain", prompt_of(5), 20)
    harness.add("runs", prompt_of(5, 1), 20, beam_width=beam_width)
    harness.step()
    before = harness.scheduler._extends_in_a_row
    harness.add("prompt", prompt_of(9, 2), 2)
    harness.step()
    assert len(harness.batches[-1]) == (3 if beam_width is None else 2)
    assert harness.scheduler._extends_in_a_row == (0 if beam_width is None else before + 1)


class TestRunningRequests:
    @PAGES
    @DEPTHS
    def test_running_requests_get_a_token_in_every_mixed_step(self, page_size: int, depth: int) -> None:
        harness = MixedHarness(num_tokens=8192, rows=64, chunk=64, depth=depth, page_size=page_size, check=False)
        harness.add("running", prompt_of(20), 60)
        for _ in range(depth):
            harness.step()
        outcome, gap = harness.flood("running")
        assert gap == 0 and harness.flooded >= 58
        assert outcome.tokens == expected_output(prompt_of(20), 60)
        assert all(batch.is_extend for batch in harness.batches[depth:])

    @DEPTHS
    def test_running_requests_get_a_token_with_every_chunk(self, depth: int) -> None:
        harness = MixedHarness(num_tokens=1024, chunk=8, depth=depth)
        harness.add("running", prompt_of(5), 40)
        harness.step()
        harness.add("long", prompt_of(200, 1), 2)
        for _ in range(20):
            harness.step()
        assert rows_of(harness.batches[5]) == [7, 1], "together no more than a chunk"
        assert len(harness.outcomes["running", 0].tokens) == 21 - (depth - 1)
        harness.run()
        assert harness.outcomes["long", 0].tokens == expected_output(prompt_of(200, 1), 2)
        assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(5), 40)

    def test_running_requests_leave_half_of_mixed_step_to_prompts(self) -> None:
        harness = MixedHarness(chunk=4)
        for number in range(3):
            harness.add(f"running{number}", [number], 30)
        harness.step()
        harness.add("long", prompt_of(40, 1), 2)
        harness.step()
        assert rows_of(harness.batches[-1]) == [4]
        harness.step()
        assert not harness.batches[-1].is_extend
        harness.abort("running0")
        harness.step()
        assert rows_of(harness.batches[-1]) == [2, 1, 1]
        harness.run()

    def test_steps_are_not_mixed_without_the_flag(self) -> None:
        harness = MixedHarness(enable_mixed_chunk=False)
        harness.add("running", prompt_of(5), 9)
        harness.step()
        harness.add("next", prompt_of(9, 1), 2)
        harness.step()
        assert rows_of(harness.batches[-1]) == [9]
        harness.run()

    def test_running_requests_without_prompts_get_decode_steps(self) -> None:
        harness = MixedHarness()
        harness.add("running", prompt_of(5), 9)
        harness.run()
        assert [batch.is_extend for batch in harness.batches] == [True] + [False] * 8

    def test_requests_with_item_trie_are_mixed(self) -> None:
        items = np.random.default_rng(0).integers(0, VOCAB, (60, 8), dtype=np.int32)
        trie = ItemTrie.build(items)
        for depth in (1, 2):
            harness = MixedHarness(num_tokens=2048, rows=16, depth=depth, check=False)
            harness.add("running", prompt_of(20), 8, trie=trie)
            harness.step()
            outcome, gap = harness.flood("running")
            assert outcome.tokens == expected_output(prompt_of(20), 8, trie=trie)
            assert gap == 0, "its masks are filled in once the token in flight is known"
            assert any(batch.is_extend and batch.allowed is not None and 0 not in batch.allowed.rows
                       for batch in harness.batches)  # fmt: skip
            harness.run()


class TestSearches:
    @pytest.mark.parametrize("interval", [1, 3])
    def test_searches_get_decode_steps_beside_endless_prompts(self, interval: int) -> None:
        harness = MixedHarness(num_tokens=4096, rows=64, decode_interval=interval, check=False)
        harness.add("running", prompt_of(20), 100)
        harness.add("search", prompt_of(30, 1), 6, beam_width=3, n=3)
        harness.step()
        harness.flood("search")
        search = harness.outcomes["search", 0]
        assert search.request is not None
        expected = expected_beams(prompt_of(30, 1), search.request.sampling)
        assert [found.ids.tolist() for found in search.results] == [found.ids.tolist() for found in expected]
        assert len(harness.batches) <= 1 + 5 * (interval + 1)
        assert len(harness.outcomes["running", 0].tokens) == len(harness.batches)
        harness.run()

    def test_search_with_prompt_in_mixed_steps_finds_its_results(self) -> None:
        harness = MixedHarness(chunk=16)
        harness.add("running", prompt_of(20), 30)
        harness.step()
        harness.step()
        harness.add("search", prompt_of(50, 1), 4, beam_width=3, n=3)
        harness.run()
        search = harness.outcomes["search", 0]
        assert search.request is not None
        expected = expected_beams(prompt_of(50, 1), search.request.sampling)
        assert [found.ids.tolist() for found in search.results] == [found.ids.tolist() for found in expected]
        assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(20), 30)


class TestMemory:
    @PAGES
    def test_step_is_not_mixed_without_memory(self, page_size: int) -> None:
        harness = MixedHarness(num_tokens=1024, page_size=page_size)
        harness.add("running", prompt_of(64), 20)
        harness.step()
        harness.add("next", prompt_of(30, 1), 9)
        rows = harness.allocator.calls + 1  # the prompt comes first
        harness.allocator.should_fail = lambda call: call == rows
        harness.step()
        assert rows_of(harness.batches[-1]) == [30]
        harness.step()
        assert len(harness.batches[-1]) == 2
        harness.run()
        assert harness.scheduler.stats().retractions == 0
        assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(64), 20)
        assert harness.outcomes["next", 0].tokens == expected_output(prompt_of(30, 1), 9)

    @PAGES
    @DEPTHS
    def test_retraction_changes_no_output(self, page_size: int, depth: int) -> None:
        harness = MixedHarness(num_tokens=320, rows=8, chunk=24, page_size=page_size, depth=depth)
        harness.scheduler._reserve._ratio = 0.0
        for number in range(10):
            harness.add(f"r{number}", prompt_of(40, number), 100)
            harness.step()
        harness.run()
        assert harness.scheduler.stats().retractions > 0
        for number in range(10):
            assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt_of(40, number), 100)

    def test_any_single_allocation_failure_is_survived(self) -> None:
        def run(fail_at: int | None) -> int:
            harness = MixedHarness(num_tokens=256, rows=4, chunk=16, page_size=16, depth=2)
            harness.allocator.should_fail = lambda call: call == fail_at
            for number in range(5):
                harness.add(f"r{number}", prompt_of(50, number), 12)
            harness.run()
            for number in range(5):
                assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt_of(50, number), 12)
            return harness.allocator.calls

        for fail_at in range(run(None)):
            run(fail_at)

    def test_reserve_ratio_decays_with_every_decoding_step(self) -> None:
        harness = MixedHarness(chunk=8)
        reserve = harness.scheduler._reserve
        harness.add("running", prompt_of(5), 30)
        harness.step()
        before = reserve._ratio
        harness.add("long", prompt_of(70, 1), 2)
        for _ in range(5):
            harness.step()
        assert reserve._ratio == pytest.approx(before - 5 * reserve.DECAY)
        harness.run()


class TestWhatCountsAsPrompt:
    def test_only_prompts_are_published_during_decoding(self) -> None:
        harness = MixedHarness()
        harness.add("running", prompt_of(20), 30)
        for number in range(10):
            harness.step()
            harness.add(f"p{number}", prompt_of(9, number), 1)
        said = [*prompt_of(20), *harness.outcomes["running", 0].tokens]
        assert len(said) == 30 and len(harness.batches[-1]) == 2
        assert harness.cache.match_len("", np.array(said, dtype=np.int32)) == 20
        harness.run()

    def test_output_of_running_request_is_not_waited_for(self) -> None:
        """It would not be found in the cache next time either: outputs are published at the end."""
        harness = MixedHarness(num_tokens=1024, depth=2)
        harness.add("running", prompt_of(5), 60)
        while len(harness.outcomes["running", 0].tokens) < 45:
            harness.step()
        harness.add("other", prompt_of(9, 1), 1)
        harness.step()  # a mixed step is in flight
        said = [*prompt_of(5), *harness.outcomes["running", 0].tokens]
        harness.add("same", said, 2)
        harness.step()
        request = harness.outcomes["same", 0].request
        assert request is not None and request.status is not RequestStatus.WAITING
        harness.run()

    def test_fill_time_counts_only_prompt_tokens_of_mixed_steps(self) -> None:
        harness = MixedHarness()
        for number in range(4):
            harness.add(f"running{number}", prompt_of(5, number), 9)
        harness.step()
        before = harness.scheduler._fill_time._tokens
        harness.add("next", prompt_of(30, 9), 1)
        harness.step()
        assert rows_of(harness.batches[-1]) == [30, 1, 1, 1, 1]
        assert harness.scheduler._fill_time._tokens == before + 30
        harness.run()
