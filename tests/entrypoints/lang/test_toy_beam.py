"""Searches in programs on a trained model: the results of a plain call, and each token computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import (
    EngineBackend,
    ProgramError,
    ProgramState,
    beam,
    function,
    gen,
    select,
    system,
    user,
)

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"
HISTORY = "".join(f"<|sid_begin|><s_a_1><s_b_{i}><s_c_{i}><|sid_end|>" for i in range(1, 8))
CATALOGUE = [(a, b, (7 * a + 3 * b) % 32) for a in range(2) for b in range(20)]


def item(a: int, b: int, c: int) -> str:
    return f"<s_a_{a}><s_b_{b}><s_c_{c}>"


@function
def recommend(s: ProgramState, trie: str | None = None, n: int | None = None) -> None:
    s += system("You recommend items. Think first.")
    s += user(f"The user looked at: {HISTORY}\nWhat comes next?")
    s += "<|im_start|>assistant\n" + gen("thought", max_tokens=60, stop="</think>", temperature=0)
    s += "</think>\n<|sid_begin|>"
    s += beam("items", width=8, max_tokens=3, item_trie=trie, n=n)
    s += "<|sid_end|><|im_end|>\n" + gen("after", max_tokens=5, temperature=0)


class Recorder(EngineBackend):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: list[tuple[dict[str, Any], Any]] = []

    def generate(self, fields: dict[str, Any]) -> Any:
        answer = super().generate(fields)
        self.calls.append((fields, answer))
        return answer


@pytest.fixture(scope="module")
def trie(toy_engine: Engine) -> Iterator[str]:
    rows = [toy_engine.encode(item(*codes), add_special_tokens=False) for codes in CATALOGUE]
    toy_engine.load_item_trie("shop", np.array(rows, dtype=np.int32))
    yield "shop"
    toy_engine.delete_item_trie("shop")


def stats(engine: Engine) -> dict[str, int]:
    return engine.get_server_info()["stats"]


def stage_one_ids(engine: Engine, calls: list) -> list[int]:
    """The prompt of the search."""
    fields, answer = calls[0]
    said = answer["output_ids"]
    if answer["meta_info"]["finish_reason"]["type"] == "stop":
        said = said[:-1]
    suffix = engine.encode("</think>\n<|sid_begin|>", add_special_tokens=False)
    return [*fields["input_ids"], *said, *suffix]


@pytest.mark.parametrize("with_trie", [False, True])
def test_beam_in_a_program_equals_a_plain_beam_search(toy_engine: Engine, trie: str, with_trie: bool) -> None:
    name = trie if with_trie else None
    toy_engine.flush_cache()
    backend = Recorder(toy_engine)
    state = recommend.run(trie=name, backend=backend)
    params = {"beam_width": 8, "n": 8, "max_new_tokens": 3, "item_trie": name}
    toy_engine.flush_cache()
    ids = stage_one_ids(toy_engine, backend.calls)
    plain = toy_engine.generate(input_ids=ids, sampling_params=params)
    assert state["items"] == [answer["text"] for answer in plain]
    metas = state.meta("items")
    for meta, answer in zip(metas, plain, strict=True):
        assert meta["sequence_score"] == pytest.approx(answer["meta_info"]["sequence_score"], abs=1e-4)
        assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1
    if with_trie:
        assert set(state["items"]) <= {item(*codes) for codes in CATALOGUE}
        assert {meta["finish_reason"]["matched"] for meta in metas} == {"item"}
    # The state continued the best; at most its last token was computed again.
    best = plain[0]["output_ids"]
    suffix = toy_engine.encode("<|sid_end|><|im_end|>\n", add_special_tokens=False)
    after = toy_engine.generate(
        input_ids=[*ids, *best, *suffix], sampling_params={"temperature": 0, "max_new_tokens": 5}
    )
    assert state["after"] == after["text"] and f"{state['items'][0]}<|sid_end|>" in state.text()
    came = state.meta("after")["continuation"]
    assert came["path"] == "handoff" and came["recomputed_tokens"] <= 1
    assert came["inherited_tokens"] == len(ids) + 3
    assert stats(toy_engine)["leased_tokens"] == 0, "the leases of the other results are released"


def test_beam_streams_and_batches_give_equal_results(toy_engine: Engine, trie: str) -> None:
    whole = recommend.run(trie=trie, backend=toy_engine)
    streamed = recommend.run(trie=trie, backend=toy_engine, stream=True)
    assert "".join(streamed.text_iter()) == whole.text() and streamed["items"] == whole["items"]
    few = recommend.run(trie=trie, n=3, backend=toy_engine, temperature=0.6, top_p=0.9, seed=1)
    assert few["items"] == whole["items"][:3]
    states = recommend.run_batch([{"trie": trie}] * 6, backend=toy_engine)
    assert [state["items"] for state in states] == [whole["items"]] * 6
    assert stats(toy_engine)["leased_tokens"] == 0


def test_forks_continue_a_beam_search_by_handoff(toy_engine: Engine, trie: str) -> None:
    @function
    def forked(s: ProgramState) -> None:
        s += user(HISTORY) + "<|im_start|>assistant\n<|sid_begin|>" + beam("first", 4, max_tokens=3, item_trie=trie)
        with s.fork(3) as forks:
            forks += "<|sid_end|><|sid_begin|>" + beam("second", 4, max_tokens=3, item_trie=trie)
        s += "<|sid_end|>" + select("way", ["<|sid_begin|>", "<|im_end|>"])

    state = forked.run(backend=toy_engine)
    assert state["second"][0] == state["second"][1] == state["second"][2]
    for metas in state.meta("second"):
        for meta in metas:
            assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1
    assert stats(toy_engine)["leased_tokens"] == 0


def test_page_size_does_not_change_results(toy_engine: Engine) -> None:
    small = recommend.run(backend=toy_engine)
    with Engine(
        model_path=str(TOY_MODEL), max_total_tokens=8192, dtype="float32", device="cpu", page_size=16
    ) as engine:
        large = recommend.run(backend=engine)
        assert large["items"] == small["items"] and large.text() == small.text()
        for meta in (*large.meta("items"), large.meta("after")):
            assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1
        assert stats(engine)["leased_tokens"] == 0


def test_unknown_item_trie_raises_the_server_message(toy_engine: Engine) -> None:
    with pytest.raises(ProgramError, match=r"beam\('items'\): .*nothing-like-it") as caught:
        recommend.run(trie="nothing-like-it", backend=toy_engine)
    assert caught.value.status == 404
    assert stats(toy_engine)["leased_tokens"] == 0
