"""How much a turn finds of the one before on a model with recurrent states: all that whole pages hold."""

from __future__ import annotations

import pytest

from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


@PAGES
@DEPTHS
@pytest.mark.parametrize("new", [6, 12, 30])
def test_turn_that_ends_with_eos_is_found_in_whole_pages(page_size: int, depth: int, new: int) -> None:
    """Two steps in flight: the one behind the eos token writes no state over the one that is left in the tree."""
    for seed in range(4):
        prompt = prompt_of(59 + 7 * seed, seed)
        output = expected_output(prompt, new, stateful=True)
        assert output[-1] not in output[:-1]
        harness = Harness(page_size=page_size, depth=depth, num_tokens=1024, states=16, eos=(output[-1],))
        harness.add("turn", prompt, 40)
        harness.run()
        assert harness.outcomes["turn", 0].tokens == output
        harness.add("next", [*prompt, *output, 7], 3)
        harness.run()
        request, computed = harness.outcomes["next", 0].request, len(prompt) + new - 1
        assert request is not None
        assert request.found.total == computed - computed % page_size


@PAGES
@DEPTHS
def test_conversation_computes_every_token_once(page_size: int, depth: int) -> None:
    """But for the rest of a page at each turn's end."""
    harness = Harness(page_size=page_size, depth=depth, num_tokens=2048, context=1024, states=8, chunk=32)
    said = prompt_of(40)
    for turn in range(8):
        before = harness.model.computed_tokens
        harness.add(f"turn {turn}", said, 11)
        harness.run()
        output = harness.outcomes[f"turn {turn}", 0].tokens
        assert output == expected_output(said, 11, stateful=True)
        request = harness.outcomes[f"turn {turn}", 0].request
        assert request is not None
        known = 0 if turn == 0 else len(said) - 30 - 1  # the last token of a turn is computed by the next
        assert request.found.total == known - known % page_size, turn
        assert harness.model.computed_tokens - before == len(said) - request.found.total + 10
        said = [*said, *output, *prompt_of(30, seed=100 + turn)]
