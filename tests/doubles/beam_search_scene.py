"""What tests of beam searches in the scheduler add to a harness, and expect of it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.scheduler.beam.search import Hypothesis
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.kv_echo import VOCAB, expected_beams
from tests.doubles.scheduler_harness import Harness

EOS = tuple(range(0, VOCAB, 20))
PROMPT = list(range(1, 38))
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


def search(width: int, new: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=new, beam_width=width, **more)


def add(harness: Harness, rid: str, prompt: list[int], params: SamplingParams, **more) -> None:
    new, given = _given(params)
    harness.add(rid, prompt, new, **given, **more)


def add_child(harness: Harness, parent: str, rid: str, suffix: list[int], params: SamplingParams, **more) -> None:
    new, given = _given(params)
    harness.continue_from(parent, rid, suffix, new, **given, **more)


def _given(params: SamplingParams) -> tuple[int, dict[str, Any]]:
    """max_new_tokens, and the other fields a harness takes: it sets the temperature and the name of the trie itself."""
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    for name in ("temperature", "max_new_tokens", "item_trie"):
        given.pop(name)
    assert params.max_new_tokens is not None
    return params.max_new_tokens, given


def check(harness: Harness, rid: str, prompt: list[int], params: SamplingParams, trie: ItemTrie | None = None) -> None:
    expected = expected_beams(prompt, params, trie, frozenset(harness.eos), stateful=harness.slots is not None)
    assert said(harness.outcomes[rid, 0].results) == said(expected)


def said(results: list[Hypothesis]) -> list[tuple]:
    return [(r.ids.tolist(), r.score, r.cumulative_logprob, r.finish, r.kept_tokens) for r in results]
