"""Thoughts taken out of what is generated: the answer is the text, the thought a variable of its own."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.grammars import take_grammar
from baton.entrypoints.lang import (
    BackendError,
    ProgramError,
    ProgramState,
    assistant,
    function,
    gen,
    select,
    separate_reasoning,
    user,
)
from tests.doubles.byte_matcher import takes
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)

THINKS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"  # noqa: E501


def answers(*said: str) -> FakeBackend:
    left = list(said)
    return FakeBackend(lambda prompt, sampling: left.pop(0))


@function
def think(s: ProgramState) -> None:
    s += user("why?")
    s += assistant("So: " + separate_reasoning(gen("x", max_tokens=40), model_type="qwen3"))
    s += user("and?") + assistant(gen("y"))


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_excluded_from_the_text(stream: bool) -> None:
    backend = answers("<think>\nhm, 2\n</think>\n\nTwo.", "yes")
    state = think.run(backend=backend, stream=stream)
    assert state["x"] == "Two." and state["x_reasoning_content"] == "hm, 2"
    text = "<user>why?</user><assistant>So: Two.</assistant><user>and?</user><assistant>yes</assistant>"
    assert "".join(state.text_iter()) == state.text() == text
    assert state.messages()[1] == {"role": "assistant", "content": "So: Two."}
    # The second step's prompt has no thought in it: it is sent as a whole, and the server finds the rest in its cache.
    assert "".join(map(chr, backend.calls[1]["input_ids"])) == text.removesuffix("yes</assistant>")
    assert state.meta("x")["completion_tokens"] == state.meta("x_reasoning_content")["completion_tokens"] == 28
    assert not backend.leases


def test_answer_and_reasoning_are_streamed_separately() -> None:
    backend = answers("<think>\nhm, 2\n</think>\n\nTwo.", "yes")
    state = think.run(backend=backend, stream=True)
    thought, answer = list(state.text_iter("x_reasoning_content")), list(state.text_iter("x"))
    assert "".join(thought) == "hm, 2" and "".join(answer) == "Two."
    state.sync()
    assert not backend.leases


FORMS = [
    ({"regex": "[a-z]+!"}, "two!", "Two!"),
    ({"json_schema": {"enum": ["one", "two"]}}, '"two"', '"three"'),
    ({"ebnf": 'root ::= "(" [0-9] ")"'}, "(2)", "2"),
    ({"dtype": bool}, "True", "true"),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
@pytest.mark.parametrize("opens", [False, True])
def test_form_is_that_of_the_answer(form: dict[str, Any], right: str, wrong: str, opens: bool) -> None:
    """Behind the thought, whoever opened it; or without one, if the template opened none."""
    backend = answers("x")
    if opens:
        backend.template = THINKS

    @function
    def ask(s: ProgramState) -> None:
        s += user("why?")
        s += assistant(separate_reasoning(gen("x", max_tokens=40, **form), model_type="qwen3"))

    ask.run(backend=backend)
    sampling = dict(backend.calls[0]["sampling_params"])
    assert sampling.keys() & {"regex", "json_schema", "ebnf", "choice"} == set()
    grammar = take_grammar(sampling, "")
    thought = "hm, </b> 2\n</think>\n\n" if opens else "<think>\nhm, </b> 2\n</think>\n\n"
    assert takes(grammar, thought + right) and not takes(grammar, thought + wrong)
    assert takes(grammar, right) == (not opens) and not takes(grammar, wrong)


def test_answer_without_reasoning_is_continued() -> None:
    backend = answers("Two.", "yes")
    state = think.run(backend=backend)
    assert state["x"] == "Two." and state["x_reasoning_content"] == ""
    assert backend.calls[1]["continuation_of"] == backend.calls[0]["rid"]


def test_incomplete_think_tag_is_text_at_the_end() -> None:
    backend = answers("<thi", "yes")
    state = think.run(backend=backend, stream=True)
    assert state["x"] == "<thi" and state.text().startswith("<user>why?</user><assistant>So: <thi</assistant>")
    assert backend.calls[1]["continuation_of"] == backend.calls[0]["rid"]


def test_reasoning_opened_by_the_template_is_separated() -> None:
    backend = answers("hm\n</think>\n\nTwo.", "3</think>Four.", "yes")
    backend.template = THINKS

    @function
    def twice(s: ProgramState) -> None:
        s += user("why? <think>")
        s += assistant(separate_reasoning(gen("x") + " " + gen("z"), "qwen3"))

    state = twice.run(backend=backend)
    # Both are read from where the message begins: what the user wrote opens nothing.
    assert (state["x"], state["x_reasoning_content"]) == ("Two.", "hm")
    assert (state["z"], state["z_reasoning_content"]) == ("Four.", "3")
    assert state.messages()[1]["content"] == "Two. Four."

    backend = answers("Two.")
    state = think_about(backend, "<think>")
    assert (state["x"], state["x_reasoning_content"]) == ("Two.", "")


def think_about(backend: FakeBackend, question: str) -> ProgramState:
    @function
    def once(s: ProgramState) -> None:
        s += user(question) + assistant(separate_reasoning(gen("x"), "qwen3"))

    return once.run(backend=backend)


def test_reasoning_parser_receives_special_tokens() -> None:
    backend = answers("[THINK]hm[/THINK]Two.")

    @function
    def once(s: ProgramState) -> None:
        s += "a" + separate_reasoning(gen("x", skip_special_tokens=True), "mistral")

    state = once.run(backend=backend)
    assert backend.calls[0]["sampling_params"]["skip_special_tokens"] is False
    assert state["x"] == "Two." and state.text() == "aTwo."


def test_reasoning_is_separated_in_samples_choices_and_forks() -> None:
    backend = answers("<think>a</think>Two.")

    @function
    def several(s: ProgramState) -> None:
        s += "q" + separate_reasoning(gen("x", n=2) + select("y", ["left"]), "qwen3")
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks.join("concate_and_append")

    state = several.run(backend=backend)
    assert state["x"] == ["Two.0", "Two.1"] and state["x_reasoning_content"] == ["a", "a"]
    assert state["y"] == "left" and state.text() == "qTwo.0left01"
    assert len(state.meta("x")) == 2 and not backend.leases


def test_failed_step_raises_for_answer_and_reasoning() -> None:
    def script(prompt: str, sampling: dict) -> str:
        raise BackendError("no", status=500)

    with pytest.raises(ProgramError, match=r"gen\('x'\): no"):
        think.run(backend=FakeBackend(script))
    state = think.run(backend=FakeBackend(script), stream=True)
    for name in ("x", "x_reasoning_content"):
        with pytest.raises(ProgramError, match="no"):
            state[name]
