"""The rest of SGLang's language on a trained model: the same tokens as plain calls, and the number computed."""

from __future__ import annotations

from math import isclose
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import (
    ProgramState,
    assistant,
    function,
    gen,
    select,
    separate_reasoning,
    system,
    unconditional_likelihood_normalized,
    user,
)

PROMPT = "<|im_start|>user\nHow many lines are in poem.txt?<|im_end|>\n<|im_start|>assistant\n"


def scored(engine: Engine, ids: list[int], start: int) -> list[float | None]:
    answer = engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=start
    )
    return [row[0] for row in answer["meta_info"]["input_token_logprobs"]]


def test_unconditional_scores_match_plain_calls(toy_engine: Engine) -> None:
    choices = ["There is", "```bash\n", "I"]

    @function
    def choose(s: ProgramState) -> None:
        s += PROMPT + select("way", choices, choices_method=unconditional_likelihood_normalized)
        s += gen("rest", max_tokens=8)

    toy_engine.flush_cache()
    state = choose.run(backend=toy_engine, temperature=0)
    prompt, expected = toy_engine.encode(PROMPT), []
    for choice in choices:
        ids = toy_engine.encode(choice, add_special_tokens=False)
        here, alone = scored(toy_engine, prompt + ids, len(prompt)), scored(toy_engine, ids, 0)
        assert alone[0] is None
        gains = [a - (b or 0.0) for a, b in zip(here, alone, strict=True) if a is not None]
        expected.append(sum(gains) / len(gains))
    found = state.meta("way")["normalized_unconditional_prompt_logprobs"]
    assert all(isclose(a, b, abs_tol=1e-3) for a, b in zip(found, expected, strict=True))
    rows = state.meta("way")["input_token_logprobs"]
    assert ["".join(row[2] for row in each) for each in rows] == choices, "with the text of each token"
    best = choices[expected.index(max(expected))]
    assert state["way"] == best
    ids = prompt + toy_engine.encode(best, add_special_tokens=False)
    rest = toy_engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert state["rest"] == rest["text"]
    assert toy_engine.get_server_info()["stats"]["leased_tokens"] == 0


def test_joined_state_continues_the_first_fork_by_handoff(toy_engine: Engine) -> None:
    @function
    def parts(s: ProgramState) -> None:
        s += system("You are a shell agent. Do not think aloud.")
        forks = s.fork(2)
        forks += lambda i: user(f"Count the lines of {'ab'[i]}.md.") + assistant(gen("command", max_tokens=16))
        forks.join("concate_and_append")
        lengths.extend(fork.meta("command")["prompt_tokens"] for fork in forks)
        lengths.append(forks[0].meta("command")["completion_tokens"] - 1)  # without the token it stopped at
        s += user("How long is manual.md?") + assistant(gen("last", max_tokens=16))

    lengths: list[int] = []
    toy_engine.flush_cache()
    state = parts.run(backend=toy_engine, temperature=0)
    came = state.meta("last")["continuation"]
    assert came["path"] == "handoff" and came["recomputed_tokens"] <= 1
    assert came["inherited_tokens"] == lengths[0] + lengths[2], "the first fork's prompt, and what it generated"
    assert toy_engine.get_server_info()["stats"]["leased_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_excluded_from_the_next_prompt(toy_engine: Engine, stream: bool) -> None:
    @function
    def think(s: ProgramState) -> None:
        s += system("You are a shell agent. Think first.")
        s += user("How many lines are in poem.txt?")
        s += assistant(separate_reasoning(gen("command", max_tokens=60), "qwen3"))
        s += user("Count the lines of notes.md.")
        s += assistant(gen("again", max_tokens=60))

    toy_engine.flush_cache()
    state = think.run(backend=toy_engine, temperature=0, stream=stream)
    prompt = "<|im_start|>system\nYou are a shell agent. Think first.<|im_end|>\n" + PROMPT
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": 60}
    whole = toy_engine.generate(prompt, greedy)["text"]
    assert whole == f"<think>{state['command_reasoning_content']}</think>\n{state['command']}"
    assert state["command_reasoning_content"] and "wc -l poem.txt" in state["command"]
    follows = "<|im_end|>\n<|im_start|>user\nCount the lines of notes.md.<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = []
    for piece in (prompt, state["command"], follows):
        ids += toy_engine.encode(piece, add_special_tokens=False)
    # The answer and what follows it were one piece of text to the program.
    joined = toy_engine.encode(prompt) + toy_engine.encode(state["command"] + follows, add_special_tokens=False)
    assert joined == ids
    assert state["again"] == toy_engine.generate(input_ids=ids, sampling_params=greedy)["text"]
    meta = state.meta("again")
    assert "continuation" not in meta and meta["cached_tokens"] == len(toy_engine.encode(prompt))
    assert toy_engine.get_server_info()["stats"]["leased_tokens"] == 0
