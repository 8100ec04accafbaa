"""A chat goes on from the turn that its messages begin with, and from no other."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.chat import conversations
from baton.entrypoints.chat.messages import Conversation
from tests.doubles.chats import Recorder, conversation

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/", "all": true}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]


def message(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str = "ls", **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def then(asked: Conversation, *messages: dict[str, Any]) -> Conversation:
    """The next call: what was asked, then these messages."""
    return Conversation(messages=[*asked.messages, *messages], tools=asked.tools, variables=asked.variables)


def asks(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def test_next_turn_sends_only_the_rest():
    recorder = Recorder()
    asked = conversation("Hello")
    turn = recorder.answer(asked, "Good day é漢.")
    following = conversation("Hello", "Good day é漢.", "And now?")
    found = recorder.find_turn(following)
    assert found is not None and found.turn is turn
    assert found.rest == "<eos>\n[user]And now?<eos>\n[assistant]"
    assert turn.text + found.rest == recorder.renderer.render(following)


@pytest.mark.parametrize("words", [("Hello",), ("Hello", "Good day!", "And?"), ("Hallo", "Good day.", "And?"), ("H",)])
def test_different_messages_find_no_turn(words: tuple[str, ...]):
    recorder = Recorder()
    recorder.answer(conversation("Hello"), "Good day.")
    assert recorder.find_turn(conversation(*words)) is None


def test_longest_then_latest_matching_turn_wins():
    recorder = Recorder()
    recorder.answer(conversation("a"), "b", "first")
    recorder.answer(conversation("a", "b", "c"), "d", "second")
    recorder.answer(conversation("a", "b", "c"), "d", "again")
    recorder.answer(conversation("a", "b", "c"), "other", "other")
    found = recorder.find_turn(conversation("a", "b", "c", "d", "e"))
    assert found is not None and found.turn.rid == "again"
    found = recorder.find_turn(conversation("a", "b", "x"))
    assert found is not None and found.turn.rid == "first"


def test_conversations_with_the_same_words_continue_different_turns():
    recorder = Recorder()
    for number in range(4):
        recorder.answer(conversation("a"), "b", f"turn {number}")
    found = [recorder.find_turn(conversation("a", "b", f"c {number}")) for number in range(4)]
    assert {each.turn.rid for each in found if each is not None} == {f"turn {number}" for number in range(4)}
    recorder.answer(conversation("a"), "b", "new")
    found = recorder.find_turn(conversation("a", "b", "c"))
    assert found is not None and found.turn.rid == "new"


def test_turns_of_the_same_conversation_go_before_equal_ones():
    recorder = Recorder()
    for number, name in enumerate((None, "one", "two", None, "one")):
        recorder.answer(conversation("a"), "b", f"turn of {name} {number}", name=name)
    recorder.answer(conversation("a"), "b", "latest")
    for name in ("two", "one", "two", "one", None):
        found = recorder.find_turn(conversation("a", "b", "c"), name=name)
        assert found is not None and found.turn.conversation == name
    assert recorder.find_turn(conversation("a", "b", "c"), name="three") is not None


def test_samples_are_separate_turns():
    recorder = Recorder()
    for index, said in enumerate(("one", "two", "three")):
        recorder.answer(conversation("a"), said, index=index)
    found = recorder.find_turn(conversation("a", "two", "b"))
    assert found is not None and (found.turn.rid, found.turn.index) == ("turn", 1)


def test_reused_rid_replaces_the_turn():
    recorder = Recorder()
    recorder.answer(conversation("a"), "one")
    recorder.answer(conversation("b"), "two")
    assert recorder.find_turn(conversation("a", "one", "c")) is None and len(recorder.conversations) == 1
    assert recorder.find_turn(conversation("b", "two", "c")) is not None


def test_turns_of_other_namespaces_are_not_found():
    recorder = Recorder()
    recorder.answer(conversation("a"), "b", salt="mine")
    following = conversation("a", "b", "c")
    assert recorder.find_turn(following) is None and recorder.find_turn(following, "theirs") is None
    assert recorder.find_turn(following, "mine") is not None


def test_different_tools_find_no_turn():
    recorder = Recorder()
    asked = Conversation(messages=[asks("a")], tools=TOOLS)
    recorder.answer(asked, "b")
    assert recorder.find_turn(conversation("a", "b", "c")) is None
    assert recorder.find_turn(then(asked, message("b"), asks("c"))) is not None


def test_cut_off_answer_is_continued():
    recorder = Recorder()
    recorder.answer(conversation("Count"), "1, 2, 3")
    found = recorder.find_turn(conversation("Count", "1, 2, 3", goes_on=True))
    assert found is not None and found.rest == ""
    recorder.answer(conversation("Count", "1, 2, 3", goes_on=True), ", 4", "more")
    found = recorder.find_turn(conversation("Count", "1, 2, 3, 4", "Thanks"))
    assert found is not None and (found.turn.rid, found.rest[:12]) == ("more", "<eos>\n[user]")


def test_only_latest_answers_to_a_prompt_are_compared():
    """Reading takes time: a thousand may have asked the same."""
    recorder, read = Recorder(), []
    recorder.conversations._says_the_same = lambda words, said: read.append(said) or False
    for number in range(20):
        recorder.answer(conversation("a"), str(number), f"turn {number}")
    assert recorder.find_turn(conversation("a", "x", "c")) is None
    assert read == [str(number) for number in range(19, 11, -1)]
    assert recorder.find_turn(conversation("a", "0", "c")) is not None, "the same words are found in all of them"


def test_much_longer_messages_are_not_compared():
    recorder, read = Recorder(), []
    recorder.conversations._says_the_same = lambda words, said: read.append(said) or False
    recorder.answer(conversation("a"), "b")
    assert recorder.find_turn(conversation("a", "x" * 1500, "c")) is None and not read
    assert recorder.find_turn(conversation("a", "x" * 900, "c")) is None and read == ["b"]


def test_turn_replaced_during_comparison_is_still_found():
    recorder = Recorder()
    turn = recorder.answer(conversation("a"), " b")
    recorder.conversations._says_the_same = lambda *_: bool(recorder.answer(conversation("z"), "y"))
    found = recorder.find_turn(conversation("a", "b", "c"))
    assert found is not None and found.turn is turn and len(recorder.conversations) == 1


# -- the template writes it another way -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "came_back"),
    [
        ("  Good day.\n\n", message("  Good day.\n\n")),
        (CALL, message(tool_calls=[call(path="/", all=True)])),
        ('<tool_call>\n{"arguments":{"all":true,"path":"/"},"name":"ls"}\n</tool_call>\n',
         message(tool_calls=[call(path="/", all=True)])),
        ("Let me look.\n\n" + CALL + "\n" + CALL, message("Let me look.", tool_calls=[call(path="/", all=True)] * 2)),
        ("<think>\nHm.\n</think>\n\n" + CALL, message(reasoning_content="Hm.", tool_calls=[call(path="/", all=True)])),
        ("<think>Hm.</think>Yes", message("Yes", reasoning_content="Hm.")),
    ],
)  # fmt: skip
def test_equivalent_answer_is_continued(said: str, came_back: dict[str, Any]):
    recorder = Recorder()
    asked = Conversation(messages=[asks("List /")], tools=TOOLS)
    turn = recorder.answer(asked, said)
    following = then(asked, came_back, {"role": "tool", "tool_call_id": "1", "content": "etc"})
    found = recorder.find_turn(following)
    assert found is not None and found.turn is turn
    assert found.rest == "<eos>\n[tool]etc<eos>\n[assistant]"


@pytest.mark.parametrize(
    ("said", "came_back"),
    [
        (CALL, message(tool_calls=[call(path="/etc", all=True)])),
        (CALL, message(tool_calls=[call("rm", path="/", all=True)])),
        (CALL, message(tool_calls=[call(path="/", all=True)] * 2)),
        (CALL, message("I call.", tool_calls=[call(path="/", all=True)])),
        (CALL + CALL, message(tool_calls=[call(path="/", all=True)])),
        ("<think>\nHm.\n</think>\n\nYes", message("Yes")),
        ("<think>\nHm.\n</think>\n\nYes", message("Yes", reasoning_content="Ha.")),
        ("<think>\nHm, yes", message("Hm, yes")),
        ("Yes", message("Yes, but")),
        ("Yes", message("Yes <eos")),
        ("Yes", message("")),
    ],
)
def test_different_answer_is_not_continued(said: str, came_back: dict[str, Any]):
    recorder = Recorder()
    asked = Conversation(messages=[asks("List /")], tools=TOOLS)
    recorder.answer(asked, said)
    assert recorder.find_turn(then(asked, came_back, asks("And?"))) is None
    assert recorder.find_turn(then(asked, {"role": "user", "content": said}, asks("And?"))) is None


def test_template_dropping_reasoning_matches_only_plain_turns():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}[assistant]"
    recorder = Recorder(template)
    recorder.answer(conversation("a"), "<think>Hm.</think>b", "thought")
    recorder.answer(conversation("a"), "b", "plain")
    found = recorder.find_turn(then(conversation("a"), message("b", reasoning_content="Hm."), asks("c")))
    assert found is not None and found.turn.rid == "plain"


def test_template_rewriting_earlier_text_prevents_continuation():
    """It numbers the messages that are to come: no text of an earlier call is the beginning of a later one's."""
    template = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}[assistant]"
    recorder = Recorder(template)
    recorder.answer(conversation("a"), "b")
    assert recorder.find_turn(conversation("a", "b", "c")) is None


def test_reasoning_opened_by_the_prompt_is_continued():
    recorder = Recorder()
    asked = Conversation(messages=[asks("a")], variables={"enable_thinking": True})
    recorder.answer(asked, "Hm.\n</think>\n\nYes")
    found = recorder.find_turn(then(asked, message("Yes", reasoning_content="Hm."), asks("b")))
    assert found is not None and found.rest.startswith("<eos>\n[user]b")


def test_template_renders_per_lookup_are_bounded():
    """A long chat begins with the prompts of many turns that said something else; only their texts are compared."""
    recorder = Recorder()
    words = [word for number in range(20) for word in (f"ask {number}", "b")]
    first = recorder.answer(conversation(words[0]), "b", "first")
    for number in range(1, 20):
        recorder.answer(conversation(*words[: 2 * number + 1]), "other", f"turn {number}")
    asked = conversation(*words, "end")
    renders: list[int] = []
    render = recorder.renderer.render
    recorder.renderer.render = lambda each: renders.append(1) or render(each)  # type: ignore[method-assign]
    found = recorder.conversations.find_turn(asked, render(asked), "")
    assert found is not None and found.turn is first
    assert len(renders) == conversations.MAX_TEMPLATES_ASKED


def test_template_with_special_final_message_prevents_continuation():
    """What it writes behind the last answer is not what it writes behind the answer once there is more."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}"
        "{% if loop.last and m.role == 'assistant' %}(last){% endif %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    recorder = Recorder(template)
    recorder.answer(conversation("a"), " b")
    assert recorder.find_turn(conversation("a", " b", "c")) is None


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_least_recently_used_turns_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """One that was gone on from counts as new."""
    monkeypatch.setattr(conversations, "MAX_TURNS", 3)
    recorder = Recorder()
    for number in range(3):
        recorder.answer(conversation(f"ask {number}"), "b", f"turn {number}")
    assert recorder.find_turn(conversation("ask 0", "b", "c")) is not None
    recorder.answer(conversation("ask 3"), "b", "turn 3")
    known = [recorder.find_turn(conversation(f"ask {number}", "b", "c")) is not None for number in range(4)]
    assert known == [True, False, True, True] and len(recorder.conversations) == 3


def test_long_turn_evicts_others_but_not_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_CHARS", 300)
    recorder = Recorder()
    recorder.answer(conversation("a"), "b" * 100, "one")
    recorder.answer(conversation("b"), "b" * 100, "two")
    assert len(recorder.conversations) == 2
    recorder.answer(conversation("c"), "b" * 400, "three")
    assert len(recorder.conversations) == 1
    assert recorder.find_turn(conversation("c", "b" * 400, "d")) is not None
    recorder.answer(conversation("d"), "b", "four")
    assert len(recorder.conversations) == 1 and recorder.find_turn(conversation("d", "b", "e")) is not None


def test_client_flooding_turns_evicts_only_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_TURNS", 4)
    recorder = Recorder()
    for number in range(2):
        recorder.answer(conversation(f"ask {number}"), "b", f"turn {number}", salt="alice/", client="alice")
    for number in range(12):  # under many salts, which make it no other client
        recorder.answer(conversation("flood"), "b", f"turn {number}", salt=f"bob/{number}", client="bob")
        assert len(recorder.conversations) <= 4
    hers = [recorder.find_turn(conversation(f"ask {number}", "b", "c"), "alice/") is not None for number in range(2)]
    his = [recorder.find_turn(conversation("flood", "b", "c"), f"bob/{number}") is not None for number in range(12)]
    assert hers == [True, True] and his == [False] * 10 + [True, True]


def test_long_turns_do_not_evict_turns_of_other_clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_CHARS", 300)
    recorder = Recorder()
    recorder.answer(conversation("a"), "b", "hers", salt="alice/", client="alice")
    for number in range(8):
        recorder.answer(conversation(f"{number}"), "b" * 100, f"turn {number}", salt="bob/", client="bob")
        assert sum(len(turn.text) for _, turn in recorder.conversations._turns.values()) <= 300
    assert recorder.find_turn(conversation("a", "b", "c"), "alice/") is not None
    assert recorder.find_turn(conversation("7", "b" * 100, "c"), "bob/") is not None


def test_forgotten_turns_leave_no_bookkeeping():
    recorder = Recorder()
    for number in range(20):
        recorder.answer(conversation("a" * number), "b", "one name")
    kept = recorder.conversations
    assert len(kept._turns) == len(kept._by_prompt) == len(kept._lengths) == 1 and sum(kept._lengths.values()) == 1
    (turn,) = kept._by_prompt.popitem()[1]
    assert kept._chars == len(turn.text)
