"""Programs on a trained model: the same tokens as a replay of the same ids, each of them computed once."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import (
    BackendError,
    EngineBackend,
    ProgramError,
    ProgramState,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"
HISTORY = "".join(f"<|sid_begin|><s_a_1><s_b_{i}><s_c_{i}><|sid_end|>" for i in range(1, 8))


class Recorder(EngineBackend):
    """The Engine, and all that programs asked of it and got."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: list[tuple[dict[str, Any], Any]] = []

    def generate(self, fields: dict[str, Any]) -> Any:
        answer = super().generate(fields)
        self.calls.append((fields, answer))
        return answer


def stats(engine: Engine) -> dict[str, int]:
    return engine.get_server_info()["stats"]


@pytest.fixture
def backend(toy_engine: Engine) -> Recorder:
    toy_engine.flush_cache()
    return Recorder(toy_engine)


@function
def recommend(s: ProgramState) -> None:
    s += system("You recommend items. Think first.")
    s += user(f"The user looked at: {HISTORY}\nWhat comes next?")
    s += "<|im_start|>assistant\n"
    s += gen("thought", max_tokens=60, stop="</think>")
    s += "</think>\n<|sid_begin|>"
    s += gen("item", max_tokens=3, ignore_eos=True)
    s += "<|sid_end|><|im_end|>\n"
    s += user("And after that?") + assistant(gen("more", max_tokens=12))


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 5}


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "seeded"])
def test_program_output_equals_replay_of_its_ids(backend: Recorder, options: dict[str, Any]) -> None:
    before = stats(backend.engine)
    state = recommend_run(backend, options)
    after = stats(backend.engine)
    engine = backend.engine
    for (fields, answer), name in zip(backend.calls, ("thought", "item", "more"), strict=True):
        # The ids a step stands on: its parent's without the stop that was matched, then its suffix.
        ids = prompt_ids(backend, fields)
        assert len(ids) == answer["meta_info"]["prompt_tokens"]
        engine.flush_cache()
        replay = engine.generate(input_ids=ids, sampling_params=fields["sampling_params"])
        assert replay["output_ids"] == answer["output_ids"] and replay["text"] == state[name]
    # Every token once: what was looked up and not found is the text itself, and the last sampled token per step.
    looked_up = after["prefix_cache_queries"] - before["prefix_cache_queries"]
    found = after["prefix_cache_hits"] - before["prefix_cache_hits"]
    own = sum(len(suffix_ids(engine, fields)) for fields, _ in backend.calls)
    assert looked_up - found <= own + 2
    for name in ("item", "more"):
        came = state.meta(name)["continuation"]
        assert came["path"] == "handoff" and came["recomputed_tokens"] <= 1, came
    assert stats(engine)["leased_tokens"] == 0


def recommend_run(backend: Recorder, options: dict[str, Any]) -> ProgramState:
    return recommend.run(backend=backend, **options)


def suffix_ids(engine: Engine, fields: dict[str, Any]) -> list[int]:
    if "input_ids" in fields:
        return fields["input_ids"]
    return engine.encode(fields.get("continuation_suffix", ""), add_special_tokens=False)


def prompt_ids(backend: Recorder, fields: dict[str, Any]) -> list[int]:
    """The expected prompt of a request, derived from the calls before it by the rules in docs/http_api.md."""
    suffix = suffix_ids(backend.engine, fields)
    if "continuation_of" not in fields:
        return suffix
    parent, answer = next((f, a) for f, a in backend.calls if f["rid"] == fields["continuation_of"])
    said, finish = answer["output_ids"], answer["meta_info"]["finish_reason"]
    if finish["type"] == "stop":
        said = said[:-1]
        if isinstance(finish["matched"], str):
            # The stop strings of these tests are tokens of their own.
            assert backend.engine.decode([answer["output_ids"][-1]]) == finish["matched"]
    return prompt_ids(backend, parent) + said + suffix


def test_select_scores_equal_full_prompt_scores(backend: Recorder) -> None:
    choices = ["```bash\n", "There is", "I"]

    @function
    def choose(s: ProgramState) -> None:
        s += "<|im_start|>user\nHow many lines are in poem.txt?<|im_end|>\n<|im_start|>assistant\n"
        s += select("way", choices) + gen("rest", temperature=0, max_tokens=8)

    state = choose.run(backend=backend)
    engine, meta = backend.engine, state.meta("way")
    prompt = engine.encode(backend.calls[0][0]["text"])
    scores = []
    for choice in choices:
        ids = engine.encode(choice, add_special_tokens=False)
        answer = engine.generate(
            input_ids=prompt + ids, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
        )
        rows = answer["meta_info"]["input_token_logprobs"][len(prompt) :]
        assert [row[1] for row in rows] == ids
        scores.append(sum(row[0] for row in rows) / len(ids))
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(scores, meta["normalized_prompt_logprobs"]))
    best = choices[scores.index(max(scores))]
    assert state["way"] == best
    replay = engine.generate(
        input_ids=prompt + engine.encode(best, add_special_tokens=False),
        sampling_params={"temperature": 0, "max_new_tokens": 8},
    )
    assert state["rest"] == replay["text"]
    assert state.meta("rest")["continuation"]["recomputed_tokens"] <= 1
    assert stats(engine)["leased_tokens"] == 0


def test_forks_equal_separate_programs(backend: Recorder) -> None:
    tasks = ["How many lines are in poem.txt?", "Count the lines of notes.md.", "How long is letter.csv?"]

    @function
    def forked(s: ProgramState) -> None:
        s += system("You are a shell agent. Do not think aloud.")
        forks = s.fork(len(tasks))
        forks += [user(task) + assistant(gen("command", temperature=0, max_tokens=30)) for task in tasks]
        forks.join()
        assert not any("input_ids" in fields for fields, _ in backend.calls[1:])

    state = forked.run(backend=backend)
    for task, command, meta in zip(tasks, state["command"], state.meta("command")):
        assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1

        @function
        def alone(s: ProgramState, task: str) -> None:
            s += system("You are a shell agent. Do not think aloud.") + user(task)
            s += assistant(gen("command", temperature=0, max_tokens=30))

        assert alone.run(task=task, backend=backend.engine)["command"] == command
    assert stats(backend.engine)["leased_tokens"] == 0


def test_streams_and_batches_give_equal_text(backend: Recorder) -> None:
    whole = recommend_run(backend, GREEDY)
    state = recommend.run(backend=backend, stream=True, **GREEDY)
    pieces = list(state.text_iter())
    assert "".join(pieces) == whole.text() and len(pieces) > 5
    states = recommend.run_batch([{}] * 8, backend=backend, **GREEDY)
    assert [state.text() for state in states] == [whole.text()] * 8
    assert stats(backend.engine)["leased_tokens"] == 0


def test_interrupted_program_leaves_no_lease_or_request(backend: Recorder) -> None:
    begun = threading.Event()

    @function
    def endless(s: ProgramState) -> None:
        s += "<|im_start|>user\n" + gen("a", max_tokens=5, ignore_eos=True, temperature=0)
        assert s["a"]
        s += gen("b", max_tokens=1900, ignore_eos=True)
        begun.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        endless.run(backend=backend)
    assert begun.is_set()
    assert stats(backend.engine)["leased_tokens"] == 0
    assert backend.engine.abort() == []


def test_program_errors_carry_the_server_message(backend: Recorder) -> None:
    @function
    def wrong(s: ProgramState) -> None:
        s += "a" + gen("x", temperature=-1.0)

    with pytest.raises(ProgramError, match=r"gen\('x'\): .*temperature is -1") as caught:
        wrong.run(backend=backend)
    assert caught.value.status == 400
    assert isinstance(caught.value.__cause__, BackendError)

    @function
    def long(s: ProgramState) -> None:
        s += "a" + gen("x", max_tokens=2)
        s += "word " * 3000 + gen("y")

    with pytest.raises(ProgramError, match=r"gen\('y'\): .*context") as caught:
        long.run(backend=backend)
    assert stats(backend.engine)["leased_tokens"] == 0


def test_forgotten_parent_is_replayed_with_equal_text(backend: Recorder) -> None:
    """As if the server had been started again between two steps, or had many others since."""
    whole = recommend_run(backend, GREEDY)

    class Forgetful(Recorder):
        def generate(self, fields: dict[str, Any]) -> Any:
            if "continuation_of" in fields:
                fields = {**fields, "continuation_of": "long ago"}
            return super().generate(fields)

    forgetful = Forgetful(backend.engine)
    state = recommend_run(forgetful, GREEDY)
    assert state.text() == whole.text()
    assert len(forgetful.calls) == 3 and all("input_ids" in fields for fields, _ in forgetful.calls)


def test_expired_lease_falls_back_to_match(backend: Recorder) -> None:
    whole = recommend_run(backend, GREEDY)

    @function
    def slow(s: ProgramState) -> None:
        s += "<|im_start|>user\n" + gen("a", max_tokens=5, ignore_eos=True)
        s.sync()
        time.sleep(0.05)
        s += " lines" + gen("b", max_tokens=5, ignore_eos=True)

    states = [slow.run(backend=backend, temperature=0, retain_ttl=ttl) for ttl in (0.01, 0, 5)]
    assert len({state.text() for state in states}) == 1
    assert [state.meta("b")["continuation"]["path"] for state in states] == ["match", "match", "handoff"]
    assert recommend_run(backend, GREEDY).text() == whole.text()


def test_page_size_does_not_change_results(backend: Recorder) -> None:
    @function
    def all_of_it(s: ProgramState) -> None:
        s += system("You are a shell agent. Think first.") + user("How many lines are in poem.txt?")
        s += "<|im_start|>assistant\n" + gen("thought", stop="</think>", max_tokens=40)
        s += "</think>\n" + select("way", ["```bash\n", "There is", "I"]) + gen("rest", max_tokens=10)
        with s.fork(3) as forks:
            forks += lambda i: user(f"And {i}?") + assistant(gen("again", max_tokens=10))

    small = all_of_it.run(backend=backend, temperature=0)
    with Engine(
        model_path=str(TOY_MODEL), max_total_tokens=8192, dtype="float32", device="cpu", page_size=16
    ) as engine:
        large = all_of_it.run(backend=engine, temperature=0)
        assert large.text() == small.text() and large["again"] == small["again"]
        for meta in (large.meta("way"), large.meta("rest"), *large.meta("again")):
            assert meta["continuation"]["path"] == "handoff" and meta["continuation"]["recomputed_tokens"] <= 1
        assert stats(engine)["leased_tokens"] == 0
