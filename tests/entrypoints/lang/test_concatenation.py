"""``join("concate_and_append")``: what forks have written becomes the text of the state they came from."""

from __future__ import annotations

import pytest

from baton.entrypoints.lang import (
    ProgramError,
    ProgramState,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    select,
    user,
)
from tests.doubles.fake_backend import FakeBackend

pytestmark = pytest.mark.timeout(30)


def test_joined_fork_texts_are_concatenated() -> None:
    backend = FakeBackend()

    @function
    def parts(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(3)
        forks += lambda i: f" {i}:" + gen("x") + ";"
        forks.join("concate_and_append")
        assert "x" not in s, "variables stay where they are"
        with pytest.raises(ProgramError, match="the state has ended"):
            forks[0] += "more"
        s += " end" + gen("y") + gen("z")

    state = parts.run(backend=backend)
    assert state.text() == "a 0:[5]; 1:[5]; 2:[5]; end[27][31]"
    # The first fork's tokens stand where they stood: only the others' are computed again, and what is new.
    assert sorted(backend.computed) == sorted(["^a", " 0:", " 1:", " 2:", "; 1:[5]; 2:[5]; end", ""])
    joined = backend.calls[4]
    assert joined["continuation_of"] == next(c["rid"] for c in backend.calls if c.get("continuation_suffix") == " 0:")
    assert "keep_parent" not in joined and "continuation_suffix" not in joined
    assert not backend.leases


def test_joined_generated_text_is_not_retokenised() -> None:
    class Wide(FakeBackend):
        """Tokenises every word into one token; what it generates are letters."""

        def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
            tokenised.append(text)
            return super().tokenize(text, add_special_tokens=add_special_tokens)

    tokenised: list[str] = []
    backend = Wide()

    @function
    def parts(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        forks += lambda i: f" {i}:" + gen("x")
        forks.join("concate_and_append")
        s += " end" + gen("y")

    parts.run(backend=backend)
    assert tokenised == [" 1:", " end"]


def test_join_keeps_text_appended_after_the_fork() -> None:
    backend = FakeBackend()

    @function
    def parts(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        s += "b" + gen("x")
        forks += lambda i: f" {i}:" + gen("y")
        forks.join("concate_and_append")
        s += gen("z")

    assert parts.run(backend=backend).text() == "ab[3] 0:[5] 1:[5][18]"
    assert backend.records[backend.calls[-1]["rid"]] == ["^ab[3] 0:[5] 1:[5][18]"]
    assert not backend.leases

    @function
    def waiting(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        s += "b"
        forks += ["c", "d" + gen("y")]
        forks.join("concate_and_append")
        s += gen("z")

    assert waiting.run(backend=backend).text() == "abcd[3][8]" and not backend.leases


def test_forks_of_an_empty_state_are_joined() -> None:
    backend = FakeBackend()

    @function
    def parts(s: ProgramState) -> None:
        forks = s.fork(3)
        forks += ["a" + gen("x"), "b" + gen("x"), "only text"]
        forks.join("concate_and_append")
        s += gen("y")

    state = parts.run(backend=backend)
    assert state.text() == "a[2]b[2]only text[18]"
    assert backend.records[backend.calls[-1]["rid"]] == ["^a[2]b[2]only text[18]"], "begun once"
    assert not backend.leases


@pytest.mark.parametrize("forgets", [False, True])
def test_joined_state_supports_select_fork_and_join(forgets: bool) -> None:
    """A choice, a fork, another join, and a server that has forgotten everything."""
    backend = FakeBackend()

    @function
    def parts(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + gen("x")
        forks.join("concate_and_append")
        if forgets:
            backend.forget()
        s += select("way", ["left", "right"])
        again = s.fork(2)
        again += lambda i: f"{i}" + gen("y")
        again.join("concate_and_append")
        if forgets:
            s.sync()
            backend.forget()
        inner = s.fork(1)
        inner += gen("z")
        inner.join()

    state = parts.run(backend=backend)
    assert state.text() == "a0[3]1[3]left0[15]1[15]" and state["z"] == ["[24]"]
    assert "^a0[3]1[3]left0[15]1[15][24]" in [text for texts in backend.records.values() for text in texts]
    assert not backend.leases


def test_messages_of_forks_are_joined() -> None:
    backend = FakeBackend()

    @function
    def talk(s: ProgramState) -> None:
        s += user("a")
        forks = s.fork(2)
        forks += lambda i: assistant(f"{i}") + user("next")
        forks.join("concate_and_append")
        s += assistant(gen("x"))

    state = talk.run(backend=backend)
    assert state.text().startswith("<user>a</user><assistant>0</assistant><user>next</user><assistant>1</assistant>")
    said = [message["content"] for message in state.messages()]
    assert said == ["a", "0", "next", "1", "next", state["x"]]

    # A template's text may depend on the messages before: the next one is the sixth.
    backend.template = (
        "{% for m in messages %}<{{ loop.index }}{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<{{ messages | length + 1 }}assistant>{% endif %}"
    )
    state = talk.run(backend=backend)
    assert state.text().endswith(f"<3user>next</user><6assistant>{state['x']}</assistant>")


def test_forks_inside_a_message_are_joined() -> None:
    backend = FakeBackend()

    @function
    def talk(s: ProgramState) -> None:
        s += user("a") + assistant_begin()
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks.join("concate_and_append")
        s += "!" + assistant_end()

    state = talk.run(backend=backend)
    assert state.messages()[-1] == {"role": "assistant", "content": "01!"}
    assert state.text() == "<user>a</user><assistant>01!</assistant>"


def test_forks_with_unbalanced_messages_cannot_be_concatenated() -> None:
    @function
    def opens(s: ProgramState) -> None:
        s += "a"
        forks = s.fork(2)
        forks += assistant_begin() + "b"
        forks.join("concate_and_append")

    @function
    def ends(s: ProgramState) -> None:
        s += user("a") + assistant_begin()
        forks = s.fork(2)
        forks += "b" + assistant_end()
        forks.join("concate_and_append")

    @function
    def mode(s: ProgramState) -> None:
        s.fork(1).join("gather")  # type: ignore[arg-type]

    for program, error, message in [
        (opens, ProgramError, "a fork ends inside a assistant message; end it before"),
        (ends, ProgramError, "a fork has ended the assistant message"),
        (mode, ValueError, "join: mode is 'gather'; use 'gather_variable' or 'concate_and_append'"),
    ]:
        backend = FakeBackend()
        with pytest.raises(error, match=message):
            program.run(backend=backend)
        assert not backend.leases
