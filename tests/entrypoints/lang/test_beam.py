"""Searches in programs, on a server that records its requests."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from baton.entrypoints.lang import BackendError, ProgramError, ProgramState, beam, function, gen, select
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


@function
def recommend(s: ProgramState, n: int | None = None) -> None:
    s += "u:" + gen("thought", max_tokens=4, stop="|") + "|"
    s += beam("items", width=3, max_tokens=5, n=n, item_trie="all")
    s += "." + gen("after")


def script(prompt: str, sampling: dict[str, Any]) -> str:
    return "hm|" if "stop" in sampling and "beam_width" not in sampling else "abcdef"


def test_beam_results_are_a_list_and_the_best_is_continued() -> None:
    backend = FakeBackend(script)
    state = recommend.run(backend=backend)
    assert state["items"] == ["abc0", "abc1", "abc2"]
    assert [meta["sequence_score"] for meta in state.meta("items")] == [0, -1, -2]
    assert state.text() == "u:hm|abc0.abcdef"
    assert "".join(state.text_iter("items")) == "abc0"
    first, second, third = backend.calls
    assert second["sampling_params"] == {"beam_width": 3, "n": 3, "max_new_tokens": 5, "item_trie": "all"}
    assert second["continuation_of"] == first["rid"] and second["continuation_suffix"] == "|"
    assert third["continuation_of"] == second["rid"] and third["continuation_index"] == 0
    assert backend.computed == ["^u:", "|", "."], "the best sequence is not sent again"
    # Only one of the search's leases was taken over.
    assert backend.released == [second["rid"], third["rid"]] and not backend.leases


def test_single_beam_result_is_a_list() -> None:
    state = recommend.run(n=1, backend=FakeBackend(script))
    assert state["items"] == ["abc"] and len(state.meta("items")) == 1


def test_fewer_beam_results_than_requested() -> None:
    state = recommend.run(backend=FakeBackend(script, found=2))
    assert state["items"] == ["abc0", "abc1"]


def test_sampling_defaults_of_the_run_do_not_apply_to_beam() -> None:
    backend = FakeBackend(script)
    drawing = {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 1}
    recommend.run(backend=backend, **drawing, max_new_tokens=9, ignore_eos=True, frequency_penalty=1, stop="|")
    assert backend.calls[1]["sampling_params"] == {
        "beam_width": 3, "n": 3, "max_new_tokens": 5, "item_trie": "all", "ignore_eos": True, "stop": "|",
    }  # fmt: skip
    assert backend.calls[0]["sampling_params"].items() >= drawing.items()


@pytest.mark.parametrize("stop", [None, "x", "item", ["x", "item"]])
def test_forgotten_beam_search_is_replayed_with_its_best_item(stop: Any) -> None:
    backend = FakeBackend(script)

    @function
    def forgetful(s: ProgramState) -> None:
        s += "u" + beam("items", 2, item_trie="all", stop=stop)
        assert s["items"] == ["abc0", "abc1"]
        backend.forget()
        s += "." + gen("after")

    forgetful.run(backend=backend)
    again = backend.calls[-1]
    assert "".join(map(chr, again["input_ids"])) == "^uabc0."


def test_select_follows_the_best_beam_result() -> None:
    backend = FakeBackend(script)

    @function
    def choosing(s: ProgramState) -> None:
        s += "u" + beam("items", 2, item_trie="all") + select("way", ["x", "y"])

    assert choosing.run(backend=backend).text() == "uabc0x"
    scored = [call for call in backend.calls if "return_logprob" in call]
    assert [call["logprob_start_len"] for call in scored] == [len("^uabc0")] * 2
    assert backend.computed == ["^u", "x", "y"], "the result's ids are known to be whole"
    assert not backend.leases


def test_forks_of_a_beam_search_search_in_parallel() -> None:
    backend = FakeBackend(lambda prompt, sampling: prompt[-2:])

    @function
    def forked(s: ProgramState) -> None:
        s += "u" + beam("base", 2, max_tokens=2)
        with s.fork(2) as forks:
            forks += lambda i: f"-{i}" + beam("more", 2)

    state = forked.run(backend=backend)
    assert state["base"] == ["^u0", "^u1"] and state["more"] == [["-00", "-01"], ["-10", "-11"]]
    parents = [call for call in backend.calls if "continuation_of" in call]
    assert {call["continuation_index"] for call in parents} == {0}
    assert not backend.leases


def test_beam_stream_yields_the_best_result_whole() -> None:
    ticks = threading.Semaphore(0)
    state = recommend.run(backend=FakeBackend(script, ticks=ticks), stream=True)
    for _ in range(20):
        ticks.release()
    assert list(state.text_iter("items")) == ["abc0"]
    assert "".join(state.text_iter()) == "u:hm|abc0.abcdef"


def test_failed_beam_search_is_an_error_with_its_name() -> None:
    def failing(prompt: str, sampling: dict[str, Any]) -> str:
        if "beam_width" in sampling:
            raise BackendError("item_trie 'all' is not loaded", status=404, code="item_trie_not_found")
        return "hm|"

    with pytest.raises(ProgramError, match=r"beam\('items'\): item_trie 'all' is not loaded") as caught:
        recommend.run(backend=FakeBackend(failing))
    assert (caught.value.status, caught.value.code) == (404, "item_trie_not_found")


def test_aborted_beam_search_is_an_error() -> None:
    backend = FakeBackend(script, hold=threading.Event())

    @function
    def endless(s: ProgramState) -> None:
        s += "u" + beam("items", 2)
        while not backend.calls:
            threading.Event().wait(0.001)
        backend.abort(backend.calls[0]["rid"])

    with pytest.raises(ProgramError, match=r"beam\('items'\): aborted: aborted by the client"):
        endless.run(backend=backend)
