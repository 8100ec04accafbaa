"""A chat from its call to its recorded end: what is sent, and what the next goes on from. The manager is a double."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from baton.entrypoints.chat import conversations
from baton.entrypoints.chat.chats import ChatAnswer, Chats, ChatUpdate, Comparison
from baton.entrypoints.chat.conversations import Turn
from baton.entrypoints.chat.divergence import Divergence
from baton.entrypoints.chat.setup import ChatSetup
from baton.entrypoints.fields.conversation_names import read_names
from baton.entrypoints.fields.output_details import stage_details
from baton.entrypoints.openai.chat import parse_chat
from baton.entrypoints.server_config import ChatConfig
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Reasoning, Text
from baton.runtime.answer import Output
from baton.runtime.clients import SOLE_CLIENT, Client
from baton.runtime.metrics import ServerMetrics
from baton.runtime.prompt import ModelLimits, Prompt
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, FoundTokens, RequestRefused
from baton.scheduler.request_spec import Predecessor
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, write_byte_tokenizer

HI = {"role": "user", "content": "Hi"}
LS = {"type": "function", "function": {"name": "ls"}}
STOP = FinishReason("stop", matched=EOS_ID)


class Manager:
    """Tokenises as the real one, and answers with what it is told: (sample, text, tokens, finish)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = ModelLimits(context_length=4096, vocab_size=257)
        self.metrics = ServerMetrics("m")
        self.prompts: list[Prompt] = []
        self.prepared: list[tuple[str, int, list[int]]] = []
        """Rid, index, and the ids that the next prompt will begin with."""
        self.says: list[tuple[int, str, list[int], FinishReason | None]] = []

    async def tokenize(self, texts: list[str], *, goes_on: bool = False, **_: Any) -> list[list[int]]:
        encode = self.tokenizer.encode_continuation if goes_on else lambda text: self.tokenizer.encode(text, False)
        return [encode(text) for text in texts]

    def prepare_turn(self, client: Client, rid: str, index: int, ids: np.ndarray) -> None:
        self.prepared.append((client.qualified(rid), index, ids.tolist()))

    async def open_answer(self, client: Client, prompts: list[Prompt], *, stream: bool) -> Manager:
        self.prompts += prompts
        return self

    async def updates(self) -> AsyncIterator[Output]:
        for sample, text, ids, finish in self.says:
            yield Output(self.prompts[-1], sample, sample, text, ids, 1, 1, FoundTokens(), finish=finish)

    async def outputs(self) -> list[Output]:
        return [output async for output in self.updates()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


class Scene:
    def __init__(self, tokenizer: Tokenizer, **config: Any) -> None:
        self.manager = Manager(tokenizer)
        settings: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"} | config
        self.divergence: Divergence | None = None
        """Divergence of the latest chat."""
        self.compared: dict[str, Comparison | None] = {}
        """The latest chat with the turns of these rids."""
        self.chats: Chats = ChatSetup(ChatConfig(**settings), tokenizer).chats(cast(Any, self.manager))

    def chat(self, *messages: dict, says: str = "Ho", stream: bool = False, **fields: Any) -> list[ChatUpdate]:
        return self.run(*messages, says=[(0, says, [*says.encode(), EOS_ID], STOP)], stream=stream, **fields)

    def run(self, *messages: dict, says: list[Any], stream: bool = False, **fields: Any) -> list[ChatUpdate]:
        self.manager.says = says

        async def ask() -> list[ChatUpdate]:
            answer: ChatAnswer = await self.chats.open_chat(
                SOLE_CLIENT, parse_chat({"messages": list(messages)} | fields, names=read_names(fields, {})).call
            )
            self.divergence = answer.divergence
            for rid in self.compared:
                self.compared[rid] = await self.chats.compare(SOLE_CLIENT, answer, rid)
            updates = [update async for update in answer.updates()] if stream else await answer.outputs()
            await asyncio.gather(*self.chats._preparing)
            return updates

        return asyncio.run(ask())

    @property
    def sent(self) -> Prompt:
        return self.manager.prompts[-1]

    @property
    def text(self) -> str:
        return self.manager.tokenizer.decode(self.sent.input_ids or [], False)


@pytest.fixture
def scene(tokenizer: Tokenizer) -> Scene:
    return Scene(tokenizer)


def said(words: str) -> dict[str, str]:
    return {"role": "assistant", "content": words}


def test_first_turn_has_no_predecessor_and_is_retained(scene: Scene) -> None:
    (update,) = scene.chat(HI)
    assert update.pieces == [Text("Ho")]
    assert scene.text == "[user]Hi<eos>\n[assistant]" and scene.sent.spec.predecessor is None
    assert scene.sent.spec.retain_ttl == 60.0


@pytest.mark.parametrize("stream", [False, True])
def test_next_turn_names_its_predecessor(scene: Scene, stream: bool) -> None:
    scene.chat(HI, rid="one", stream=stream)
    scene.chat(HI, said("Ho"), HI, rid="two")
    assert scene.sent.spec.predecessor == Predecessor("one")
    assert scene.text == "[user]Hi<eos>\n[assistant]Ho<eos>\n[user]Hi<eos>\n[assistant]"


def job_of(scene: Scene, *messages: dict, **fields: Any) -> str | None:
    scene.chat(*messages, **fields)
    return scene.sent.spec.job_id


def test_job_of_a_turn_goes_before_a_shared_name(scene: Scene) -> None:
    unnamed = job_of(scene, HI, rid="one")
    assert unnamed == "chat-one"
    assert job_of(scene, HI, said("Ho"), HI, prompt_cache_key="k") == unnamed
    assert job_of(scene, HI, said("Ho"), HI, conversation_id="c") == "conversation-id:c"
    named = job_of(scene, HI, prompt_cache_key="k")
    assert named is not None and named.startswith("prompt-cache-key:k:") and named != unnamed
    assert job_of(scene, HI, prompt_cache_key="l") != named != job_of(scene, HI, prompt_cache_key="k")


def test_shared_name_finds_the_job_of_a_chat_that_continues_no_turn(scene: Scene) -> None:
    dated = {"role": "system", "content": "Monday"}
    named = job_of(scene, dated, HI, user="u")
    assert scene.sent.spec.unasked, "its client asked for nothing to be kept"
    assert job_of(scene, {**dated, "content": "Tuesday"}, HI, said("Ho"), HI, user="u") == named
    assert scene.sent.spec.predecessor is None
    assert job_of(scene, HI, said("Hm"), HI, user="u") == named
    assert job_of(scene, HI, said("Hm"), HI, user="v") != named


ANSWER = "There are three files, and all of them are empty."


def test_chat_with_a_changed_first_line_stays_in_its_job(scene: Scene) -> None:
    def at(minute: int) -> dict[str, str]:
        return {"role": "system", "content": f"It is 10:{minute:02}."}

    unnamed = job_of(scene, at(1), HI, says=ANSWER)
    assert job_of(scene, at(2), HI, said(ANSWER), HI) == unnamed
    assert scene.sent.spec.predecessor is None
    assert job_of(scene, at(3), HI, said(ANSWER), HI, said("Ho"), HI) == unnamed, "two messages stand where they stood"


def test_short_answer_or_other_messages_do_not_make_a_chat_of_the_same_job(scene: Scene) -> None:
    unnamed = job_of(scene, {"role": "system", "content": "One"}, HI)
    assert job_of(scene, {"role": "system", "content": "Two"}, HI, said("Ho"), HI) != unnamed
    long = job_of(scene, HI, said("Ho"), {"role": "user", "content": "1"}, said("Hm"), HI, says=ANSWER)
    assert job_of(scene, HI, said("Ho"), {"role": "user", "content": "1"}) != long
    assert job_of(scene, HI) not in (job_of(scene, HI), unnamed, long), (
        "the same question again is a conversation of its own"
    )
    other = {"role": "user", "content": "Well"}
    assert job_of(scene, other, said("So"), other, said("Oh"), HI, said(ANSWER), HI) != long


@pytest.mark.parametrize("fields", [{}, {"prompt_cache_key": "k"}], ids=["unnamed", "shared name"])
def test_edited_chat_stays_in_its_job_beside_one_that_began_alike(scene: Scene, fields: dict[str, Any]) -> None:
    """Both continue turns with the same words, so an edited chat does, too. What it has more tells whose it is."""
    begun = [HI, said("Ho")]
    jobs = {job_of(scene, HI, rid="one", **fields), job_of(scene, HI, rid="two", **fields)}
    first = job_of(scene, *begun, user("alpha"), says="Aha", **fields)
    second = job_of(scene, *begun, user("beta"), says="So", **fields)
    assert first != second and {first, second} == jobs
    for words, says, job in (("alpha", "Aha", first), ("beta", "So", second), ("alpha", "Aha", first)):
        edited = [*begun, user(f"edited {words}"), said(says), user("go")]
        assert job_of(scene, *edited, says=f"{words} done", **fields) == job
        assert scene.divergence is not None and words[1:] in scene.divergence.was


def test_chats_that_say_the_same_for_long_keep_their_jobs(scene: Scene) -> None:
    """Agents with the same task get the same results. Each continues a turn that none has continued."""
    begun, results = [HI, said("Ho")], [user("1"), user("2"), user("go")]
    jobs = {job_of(scene, HI), job_of(scene, HI)}
    assert {job_of(scene, *begun, *results), job_of(scene, *begun, *results)} == jobs
    later = [*begun, *results, said("Ho"), user("on")]
    assert {job_of(scene, *later), job_of(scene, *later)} == jobs


def test_chat_with_another_first_line_stays_in_its_job_beside_one_with_the_same_results(scene: Scene) -> None:
    """Even where it continues a turn for the second time: its own conversation alone began with that line."""
    rest = [HI, said("Ho"), user("1"), user("2"), user("go")]
    one, two = ({"role": "system", "content": words} for words in ("Be brief.", "Be kind."))
    first, second = job_of(scene, one, HI, says="Ho"), job_of(scene, two, HI, says="Ho")
    assert job_of(scene, one, *rest) == first and job_of(scene, two, *rest[:-1]) == second != first
    assert job_of(scene, one, *rest) == first
    assert job_of(scene, two, *rest) == second


EXAMPLES = (
    {"role": "system", "content": "Answer as the examples do."},
    {"role": "user", "content": "Is the first file empty?"},
    {"role": "assistant", "content": "Yes, the first of the files has no bytes at all."},
    {"role": "user", "content": "And the second?"},
    {"role": "assistant", "content": "No, the second of the files has forty bytes."},
)
"""Messages that all conversations of a program begin with."""


def user(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


def test_conversations_that_begin_with_the_same_examples_have_jobs_of_their_own(scene: Scene) -> None:
    first = job_of(scene, *EXAMPLES, user("one"), says=ANSWER)
    assert scene.divergence is None
    as_example = EXAMPLES[2]["content"]
    scene.chat(*EXAMPLES, user("zero"), says=as_example)
    other = job_of(scene, *EXAMPLES, user("two"), says="Two it is, says the server.")
    assert other != first and scene.divergence is None, "it does not part from a conversation of which it is none"
    assert job_of(scene, *EXAMPLES, user("one"), said(ANSWER), user("more"), says="Hm") == first
    assert job_of(scene, *EXAMPLES, user("one"), says=ANSWER) not in (first, other), "the same question again"
    third = job_of(scene, *EXAMPLES, user("three"), says=ANSWER)
    assert third not in (first, other) and scene.divergence is None
    assert job_of(scene, *EXAMPLES, user("three"), said(ANSWER), user("more")) == third


def test_conversation_with_examples_and_a_changed_line_stays_in_its_job(scene: Scene) -> None:
    first = job_of(scene, *EXAMPLES, user("one"), says=ANSWER)
    job_of(scene, *EXAMPLES, user("two"), says=ANSWER)
    changed = ({"role": "system", "content": "Answer as these do."}, *EXAMPLES[1:])
    assert job_of(scene, *changed, user("one"), said(ANSWER), user("more"), says="Hm") == first
    assert scene.divergence is not None and scene.divergence.message == 0
    assert job_of(scene, *EXAMPLES, user("one"), said(ANSWER), user("more"), said("Hm"), user("and")) == first


def test_first_turn_with_examples_that_is_sent_again_is_recognised(scene: Scene) -> None:
    scene.chat(*EXAMPLES, user("one"), says=ANSWER)
    scene.chat(*EXAMPLES[:-1], {**EXAMPLES[-1], "content": "No."}, user("one"), says=ANSWER)
    scene.chat(*EXAMPLES, user("one"), {"role": "system", "content": "Be brief."})
    assert scene.divergence is not None


def test_no_shared_name_has_a_job_where_turns_are_not_recorded(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, no_auto_continue=True)
    assert job_of(scene, HI, prompt_cache_key="k") is None
    assert job_of(scene, HI, conversation_id="c") == "conversation-id:c"


@pytest.mark.parametrize(
    ("begun", "said_ids"),
    [("", [*b"a<eos>"]), ("a<eo", [*b"s>"]), ("", [*b"a<eos>", EOS_ID, ord("b")])],
    ids=["spelled", "completed", "one of two"],
)
def test_spelled_out_special_token_is_not_continued(scene: Scene, begun: str, said_ids: list[int]) -> None:
    """Whoever sends its text means the token: a model that sees letters reads on in the same message."""
    text = bytes(each for each in said_ids if each != EOS_ID).decode()
    goes_on = {"continue_final_message": True, "skip_special_tokens": False}
    length = FinishReason("length")
    scene.run(HI, said(begun), says=[(0, text, said_ids, length)], **goes_on)
    whole = begun + "".join("<eos>" if each == EOS_ID else chr(each) for each in said_ids)
    scene.run(HI, said(whole), says=[(0, "x", [ord("x")], length)], **goes_on)
    assert scene.sent.spec.predecessor is None
    assert (scene.sent.input_ids or []).count(EOS_ID) == 1 + whole.count("<eos>")


def test_generated_special_tokens_are_continued(scene: Scene) -> None:
    length = FinishReason("length")
    goes_on = {"continue_final_message": True}
    scene.run(HI, said("<eos>"), says=[(0, "a", [ord("a"), EOS_ID, ord("b")], length)], rid="one", **goes_on)
    scene.run(HI, said("<eos>a<eos>b"), says=[(0, "x", [ord("x")], length)], **goes_on)
    assert scene.sent.spec.predecessor == Predecessor("one")


def test_descendants_of_spelled_out_special_tokens_are_not_continued(scene: Scene) -> None:
    """A turn that is named is gone on from as it was said, and so its letters are in the next one."""
    length = FinishReason("length")

    async def turn_after(content: str, ids: list[int], after: Turn | None) -> Turn:
        scene.manager.says = [(0, bytes(ids).decode(), ids, length)]
        fields = {"messages": [HI, said(content)], "continue_final_message": True}
        call = dataclasses.replace(parse_chat(fields).call, after=after)
        answer = await scene.chats.open_chat(SOLE_CLIENT, call)
        await answer.outputs()
        return answer.turns[0]

    spelled = asyncio.run(turn_after("", [*b"a<eos>"], None))
    asyncio.run(turn_after("a<eos>", [*b"b"], spelled))
    assert scene.sent.spec.predecessor is not None and scene.sent.input_ids == spelled.ids.tolist()
    scene.run(HI, said("a<eos>b"), says=[(0, "x", [ord("x")], length)], continue_final_message=True)
    assert scene.sent.spec.predecessor is None


@pytest.mark.parametrize("long", [False, True])
def test_long_chats_are_rendered_off_the_event_loop(scene: Scene, long: bool) -> None:
    """Nobody waits until a long one is rendered, its opening found, and its answer compared with what was said."""
    threads: set[threading.Thread] = set()

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: [threads.add(threading.current_thread()), work(*given)][1]

    asked = {"role": "user", "content": "Hi" * (20_000 if long else 1)}
    scene.chat(asked, says=" Ho")
    conversations = scene.chats._conversations
    scene.chats.renderer.render = watched(scene.chats.renderer.render)  # type: ignore[method-assign]
    conversations._says_the_same = watched(conversations._says_the_same)
    scene.manager.limits = ModelLimits(context_length=100_000, vocab_size=257)
    scene.chat(asked, said("Ho"), HI)
    assert scene.sent.spec.predecessor is not None
    assert threads and (threading.current_thread() not in threads if long else threads == {threading.current_thread()})


def test_continuation_keeps_generated_token_ids(scene: Scene, tokenizer: Tokenizer) -> None:
    """The ids of the turn are taken, not those of its text."""
    scene.run(HI, says=[(0, "Ho", [*b"Ho", EOS_ID], STOP)], rid="one")
    odd = [7, 7, 7]
    ((_, turn),) = scene.chats._conversations._turns.values()  # type: ignore[union-attr]
    turn.ids[:3] = odd
    scene.chat(HI, said("Ho"), HI)
    assert (scene.sent.input_ids or [])[:3] == odd and scene.text.endswith("Ho<eos>\n[user]Hi<eos>\n[assistant]")


def test_streamed_samples_are_separate_turns(scene: Scene) -> None:
    says = [
        (1, "Hal", [*b"Hal"], None), (0, "H", [*b"H"], None), (1, "lo", [*b"lo", EOS_ID], STOP),
        (0, "o", [*b"o", EOS_ID], STOP),
    ]  # fmt: skip
    scene.run(HI, says=says, rid="one", n=2, stream=True)
    scene.chat(HI, said("Hallo"), HI)
    assert scene.sent.spec.predecessor == Predecessor("one", 1)
    scene.chat(HI, said("Ho"), HI)
    assert scene.sent.spec.predecessor == Predecessor("one", 0)


def test_aborted_answer_is_not_continued(scene: Scene) -> None:
    scene.run(HI, says=[(0, "Ho", [*b"Ho"], FinishReason("abort"))])
    scene.chat(HI, said("Ho"), HI)
    assert scene.sent.spec.predecessor is None


def test_stop_string_is_not_part_of_the_turn(scene: Scene) -> None:
    scene.run(HI, says=[(0, "Ho", [*b"Ho#end"], FinishReason("stop", matched="#end"))], rid="one", stop="#end")
    scene.chat(HI, said("Ho"), HI)
    assert scene.sent.spec.predecessor == Predecessor("one")
    assert scene.text == "[user]Hi<eos>\n[assistant]Ho<eos>\n[user]Hi<eos>\n[assistant]"


def test_continued_final_message_becomes_one_turn(scene: Scene) -> None:
    """The whole message is what the next turn brings."""
    scene.chat(HI, said("Ho"), says=" ho", rid="one", continue_final_message=True)
    assert scene.text == "[user]Hi<eos>\n[assistant]Ho"
    scene.chat(HI, said("Ho ho"), HI)
    assert scene.sent.spec.predecessor == Predecessor("one")

    scene.chat(HI, said("Ha"), says=" ha ", rid="stripped", continue_final_message=True)
    scene.chat(HI, said("Ha ha "), HI)
    assert scene.sent.spec.predecessor == Predecessor("stripped")


def test_explicit_retain_ttl_overrides_the_default(scene: Scene) -> None:
    scene.chat(HI, retain_ttl=0)
    assert scene.sent.spec.retain_ttl == 0.0


def test_no_auto_continue_disables_continuation(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, no_auto_continue=True)
    scene.chat(HI)
    scene.chat(HI, said("Ho"), HI)
    assert scene.sent.spec.predecessor is None and scene.sent.spec.retain_ttl is None


@pytest.mark.parametrize(("choice", "forced"), [
    ("required", '<tool_call>\n{"name": "'),
    ({"type": "function", "function": {"name": "ls"}}, '<tool_call>\n{"name": "ls", "arguments":'),
])  # fmt: skip
def test_forced_call_is_part_of_the_answer(scene: Scene, choice: Any, forced: str) -> None:
    rest = ('ls", "arguments": ' if choice == "required" else "") + '{"a": 1}}\n</tool_call>'
    tools = [LS, {"type": "function", "function": {"name": "pwd"}}]
    (update,) = scene.chat(HI, says=rest, tools=tools, tool_choice=choice, rid="one")
    assert scene.text.endswith("[assistant]" + forced)
    assert update.pieces[0] == CallBegins(0, "ls")
    assert "".join(piece.delta for piece in update.pieces if isinstance(piece, CallArguments)) == '{"a": 1}'
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call]}
    scene.chat(HI, answered, {"role": "tool", "tool_call_id": "1", "content": "etc"}, tools=tools)
    assert scene.sent.spec.predecessor == Predecessor("one")


def test_forced_call_is_continued_despite_template_spacing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tight.jinja"
    file.write_text(CHAT_TEMPLATE.replace('{"name": "', '{"name":"'))
    scene = Scene(tokenizer, chat_template=str(file))
    scene.chat(HI, says="{}}\n</tool_call>", tools=[LS], tool_choice={"function": {"name": "ls"}}, rid="one")
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    scene.chat(HI, {"role": "assistant", "tool_calls": [call]}, HI, tools=[LS])
    assert scene.sent.spec.predecessor == Predecessor("one")


def test_incomplete_call_mark_is_returned_as_text(scene: Scene) -> None:
    (update,) = scene.chat(HI, says="a <tool_", tools=[LS])
    assert "".join(piece.text for piece in update.pieces if isinstance(piece, Text)) == "a <tool_"


def test_think_tag_in_user_message_opens_no_reasoning(scene: Scene) -> None:
    (update,) = scene.chat({"role": "user", "content": "What is <think>?"}, says="A tag.")
    assert update.pieces == [Text("A tag.")]


def test_forced_call_closes_reasoning_opened_by_the_prompt(scene: Scene) -> None:
    named = {"type": "function", "function": {"name": "ls"}}
    thinks: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    (update,) = scene.chat(HI, says="{}}\n</tool_call>", tools=[LS], tool_choice=named, **thinks)
    assert scene.text.endswith('[assistant]<think>\n\n</think>\n\n<tool_call>\n{"name": "ls", "arguments":')
    assert CallBegins(0, "ls") in update.pieces
    (update,) = scene.chat(HI, says="Hm.\n</think>\n\nYes", **thinks)
    assert update.pieces == [Reasoning("Hm."), Text("Yes")]


def test_parallel_tool_calls_false_keeps_only_the_first_call(scene: Scene) -> None:
    calls = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>' * 2
    (update,) = scene.chat(HI, says=calls, tools=[LS], parallel_tool_calls=False)
    assert [piece.index for piece in update.pieces if isinstance(piece, CallBegins)] == [0]


def test_special_tokens_are_kept_for_parsers_that_need_them(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, tool_call_parser="mistral")
    scene.chat(HI, tools=[LS])
    assert not scene.sent.sampling.skip_special_tokens
    scene.chat(HI)
    assert scene.sent.sampling.skip_special_tokens


def test_tools_unsupported_by_the_template_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(CHAT_TEMPLATE.replace("tools", "x").replace("tool ", "y "))
    scene = Scene(tokenizer, chat_template=str(file))
    with pytest.raises(RequestRefused, match="no place for tools") as refused:
        scene.chat(HI, tools=[LS])
    assert refused.value.code == "no_tools_in_template"
    scene.chat(HI, tools=[LS], tool_choice="none")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chatml(tmp_path: Path) -> Scene:
    """A model whose template has no place for tools, in a format for which a template is bundled."""
    folder = write_byte_tokenizer(tmp_path / "model")
    config = {
        "eos_token": "<eos>",
        "chat_template": CHATML,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Scene(Tokenizer.load(folder), tool_call_parser="auto", reasoning_parser="auto")


CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'


def test_bundled_tool_template_renders_tools(chatml: Scene) -> None:
    (update,) = chatml.chat(HI, says=CALL, tools=[LS])
    assert [type(piece) for piece in update.pieces] == [CallBegins, CallArguments]
    assert '"name": "ls"' in chatml.text and chatml.text.endswith("<|im_start|>assistant\n")
    chatml.chat(HI)
    assert chatml.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "the model's own"
    chatml.chat(HI, tools=[LS], tool_choice="none")
    assert "ls" not in chatml.text


def test_turns_with_equal_tools_are_continued(chatml: Scene) -> None:
    chatml.chat(HI, says=CALL, tools=[LS], rid="one")
    called = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"a"}'}}
    talk = [HI, {"role": "assistant", "content": None, "tool_calls": [called]}]
    talk += [{"role": "tool", "tool_call_id": "1", "content": "b"}]
    chatml.chat(*talk, tools=[LS], rid="two")
    assert chatml.sent.spec.predecessor == Predecessor("one")
    chatml.chat(*talk, said("Ho"), HI, tools=[LS])
    assert chatml.sent.spec.predecessor == Predecessor("two")


def test_turn_continues_the_latest_turn_with_equal_tools(chatml: Scene) -> None:
    """A turn goes on from the last one that had the same tools: with others, the prompt begins with other text."""
    chatml.chat(HI, rid="plain")
    chatml.chat(HI, said("Ho"), HI, tools=[LS], rid="tools")
    assert chatml.sent.spec.predecessor is None
    chatml.chat(HI, said("Ho"), HI, said("Ho"), HI, rid="plain again")
    assert chatml.sent.spec.predecessor == Predecessor("plain")
    chatml.chat(HI, said("Ho"), HI, said("Ho"), HI, said("Ho"), HI, tools=[LS])
    assert chatml.sent.spec.predecessor == Predecessor("tools")


def test_earlier_calls_are_rendered_without_tools(chatml: Scene) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    chatml.chat(
        HI, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "1", "content": "b"}
    )
    assert '<tool_call>\n{"name": "ls", "arguments": {}}' in chatml.text and "<tool_response>\nb\n" in chatml.text
    assert "You can call functions" not in chatml.text


def test_chat_that_cannot_fit_is_refused_before_rendering(scene: Scene) -> None:
    scene.manager.limits = ModelLimits(context_length=3, vocab_size=257)
    scene.chat(HI, HI, HI)
    with pytest.raises(RequestRefused, match=r"at least 4 tokens\) is longer than the model's context length"):
        scene.chat(HI, HI, HI, HI)
    with pytest.raises(RequestRefused, match="at least 4 tokens"):
        scene.chat({"role": "user", "content": "x" * 2_000_000})
    with pytest.raises(RequestRefused, match="at least 4 tokens"):
        asyncio.run(scene.chats.render(parse_chat({"messages": [HI] * 4}).call))


def test_counting_renders_the_prompt_without_sending_it(scene: Scene) -> None:
    ids = asyncio.run(scene.chats.render(parse_chat({"messages": [HI]}).call))
    assert bytes(token for token in ids if token != EOS_ID) == b"[user]Hi\n[assistant]" and not scene.manager.prompts


@pytest.mark.parametrize(
    ("fields", "retain_ttl", "unasked"),
    [
        ({}, 7.0, True),
        ({"job_id": "a"}, 7.0, False),
        ({"job_id": "a", "is_last_step": True}, None, False),
        ({"retain_ttl": 3.0}, 3.0, False),
        ({"job_id": "a", "retain_ttl": 0}, 0.0, False),
    ],
)
def test_chat_is_retained_for_its_next_turn_with_or_without_job_id(
    tokenizer: Tokenizer, fields: dict[str, Any], retain_ttl: float | None, unasked: bool
) -> None:
    scene = Scene(tokenizer, conversation_ttl=7.0)
    scene.chat(HI, **fields)
    spec = scene.manager.prompts[-1].spec
    assert (spec.retain_ttl, spec.unasked) == (retain_ttl, unasked)
    assert spec.job_id == fields.get("job_id", f"chat-{spec.rid}")


# -- prefixes that change, and the last turn of a conversation ---------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.2a7; cch=%s;"
LEFT = "<total_tokens>%d tokens left</total_tokens>"


def system(words: str) -> dict[str, str]:
    return {"role": "system", "content": words}


def test_dropped_line_costs_nothing_and_is_reported(tokenizer: Tokenizer) -> None:
    scene, plain = Scene(tokenizer, normalize_prefix="claude-code-billing"), Scene(tokenizer)
    plain.chat(system("Be brief."), HI)
    (update,) = scene.chat(system(BILLING % 1 + "\nBe brief."), HI)
    assert scene.sent.input_ids == plain.sent.input_ids, "the same chat without the line"
    count = len(BILLING % 1)
    assert stage_details(update.output)["normalized_prefix"] == {"claude-code-billing": count}
    assert f'rule="claude-code-billing"}} {float(count)}' in scene.manager.metrics.render().decode()
    (other,) = scene.chat(HI)
    assert "normalized_prefix" not in stage_details(other.output)
    scene.chat(system(BILLING % 2 + "\nBe brief."), HI, said("Ho"), {"role": "user", "content": "And?"})
    assert scene.sent.spec.predecessor is not None and scene.divergence is None


def test_moved_line_is_behind_all_that_the_first_turn_had(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, normalize_prefix="claude-code-tokens-left")
    scene.chat(system(f"Be brief.\n{LEFT % 900}"), HI)
    first = scene.sent.input_ids or []
    scene.chat(system(f"Be brief.\n{LEFT % 700}"), HI, said("Ho"), {"role": "user", "content": "And?"})
    second = scene.sent.input_ids or []
    by_hand = Scene(tokenizer)
    by_hand.chat(system("Be brief.\n"), HI, said("Ho"), {"role": "user", "content": f"And?\n{LEFT % 700}"})
    assert second == by_hand.sent.input_ids
    stable = next(n for n, (a, b) in enumerate(zip(first, second)) if a != b)
    assert tokenizer.decode(first[stable:], False) == f"\n{LEFT % 900}<eos>\n[assistant]"


def test_fixed_date_keeps_the_conversation_and_no_other(tokenizer: Tokenizer) -> None:
    def told(day: int) -> dict[str, str]:
        return system(f"<env>\n  Today's date: Tue Nov {day} 2026\n</env>")

    scene = Scene(tokenizer, normalize_prefix="dates")
    scene.chat(told(24), HI)
    scene.chat(told(25), HI, said("Ho"), {"role": "user", "content": "And?"})
    assert "Nov 24" in scene.text and "Nov 25" not in scene.text and scene.sent.spec.predecessor is not None
    scene.chat(told(26), HI, said("Ho"), {"role": "user", "content": "And?"}, said("Ho"), HI)
    assert "Nov 24" in scene.text
    scene.chat(told(25), HI)
    assert "Nov 25" in scene.text, "a new conversation"
    scene.chat(told(27), HI, job_id="j")
    scene.chat(told(28), HI, said("Ho"), HI, job_id="j")
    assert "Nov 27" in scene.text
    scene.chat(told(29), HI, said("Ho"), HI, cache_salt="s")
    assert "Nov 29" in scene.text, "another namespace's conversation is none of its own"


def test_fixed_date_is_found_in_the_first_message_of_the_user(tokenizer: Tokenizer) -> None:
    def told(day: int) -> dict[str, str]:
        return {"role": "user", "content": f"# currentDate\nToday's date is 2026-11-{day}.\n\nHi"}

    scene = Scene(tokenizer, normalize_prefix="dates")
    scene.chat(told(24))
    scene.chat(told(25), said("Ho"), HI)
    assert "2026-11-24" in scene.text and scene.sent.spec.predecessor is not None


def test_conversations_of_two_days_keep_their_dates(tokenizer: Tokenizer) -> None:
    """They differ in nothing else, and the later one was recorded last."""
    scene = Scene(tokenizer, normalize_prefix="dates")

    def told(day: int) -> dict[str, str]:
        return {"role": "user", "content": f"# currentDate\nToday's date is 2026-11-{day}.\nHello"}

    for day in (24, 25):
        scene.chat(told(day), rid=f"day-{day}")
    for day in (24, 25):
        scene.chat(told(day), said("Ho"), HI)
        assert f"2026-11-{day}" in scene.text and scene.sent.spec.predecessor == Predecessor(f"day-{day}", 0)
    scene.chat(told(26), said("Ho"), HI, said("Ho"), HI)
    assert "2026-11-25" in scene.text, "the latest of those that it may be"


@pytest.mark.parametrize("named", [False, True])
def test_changed_first_line_is_located_with_no_rule_on(
    tokenizer: Tokenizer, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scene = Scene(tokenizer)
    job: dict[str, Any] = {"job_id": "j"} if named else {}
    scene.chat(system(BILLING % "a1" + "\nBe brief."), HI, **job)
    assert scene.divergence is None
    first = scene.sent.input_ids or []
    scene.chat(system(BILLING % "b2" + "\nBe brief."), HI, said("Ho"), {"role": "user", "content": "And?"}, **job)
    found, second = scene.divergence, scene.sent.input_ids or []
    assert found is not None and (found.kind, found.message, found.role) == ("system", 0, "system")
    assert found.char == found.message_token == BILLING.index("%s") and (found.removed_chars, found.inserted_chars) == (
        2,
        2,
    )
    assert "cch=a1" in found.was and "cch=b2" in found.now
    assert found.token == next(n for n, (a, b) in enumerate(zip(first, second)) if a != b)
    assert "claude-code-billing" in caplog.text and "cch=" not in caplog.text.replace("cch=…", "")
    assert 'kind="system",model_name="m"} 1.0' in scene.manager.metrics.render().decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [True, False])
def test_conversation_is_recognised_by_the_calls_of_its_answer(
    tokenizer: Tokenizer, stream: bool, parallel: bool
) -> None:
    scene, fields = Scene(tokenizer), {"tools": [LS], "parallel_tool_calls": parallel}
    calls = '<tool_call>\n{"name": "ls", "arguments": {"a": "é"}}\n</tool_call>' * 2
    scene.chat(system("One."), HI, says=f"<think>Hm.</think>So: {calls}", stream=stream, **fields)
    sent = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a":"\\u00e9"}'}}
    answer = {"role": "assistant", "content": "So:", "tool_calls": [sent] * (1 + parallel)}
    result = {"role": "tool", "tool_call_id": "1", "content": "a"}
    scene.chat(system("Two."), HI, answer, result, **fields)
    found = scene.divergence
    assert found is not None and (found.kind, found.message, found.char) == ("system", 0, 0)


@pytest.mark.parametrize("number", range(3))
def test_each_sample_of_an_answer_is_recognised(tokenizer: Tokenizer, number: int) -> None:
    scene = Scene(tokenizer)
    says = [(n, f"answer {n}", [*f"answer {n}".encode(), EOS_ID], STOP) for n in range(3)]
    scene.run(system("One."), HI, says=says, n=3)
    scene.chat(system("Two."), HI, said(f"answer {number}"), HI)
    assert scene.divergence is not None and scene.divergence.kind == "system"


FORGETS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""As Qwen3's template, it drops the thoughts of earlier answers."""


def test_template_that_drops_thoughts_is_the_cause(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    scene = Scene(tokenizer, chat_template=str(tmp_path / "forgets.jinja"))
    scene.chat(HI, says="<think>Hm.</think>Ho")
    old = scene.sent.input_ids or []
    scene.chat(HI, said("Ho") | {"reasoning_content": "Hm."}, {"role": "user", "content": "And?"})
    found = scene.divergence
    assert found is not None and (found.kind, found.message, found.token) == ("template", 1, len(old))
    assert found.was.startswith("sistant]<think>Hm.") and found.now.startswith("sistant]Ho<eos>")
    scene = Scene(tokenizer)
    scene.chat(HI, says="<think>Hm.</think>Ho")
    scene.chat(HI, said("Ho"), {"role": "user", "content": "And?"})
    assert scene.divergence is not None and scene.divergence.kind == "thoughts_unsent"


def test_edited_beginning_of_an_answer_is_located(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer)
    scene.chat(HI, says="One two three", job_id="j")
    scene.chat(HI, said("One six"), continue_final_message=True, job_id="j")
    found = scene.divergence
    assert found is not None and (found.kind, found.message, found.char) == ("answer", 1, 4)


def test_rules_are_logged_at_the_start(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ChatSetup(ChatConfig(normalize_prefix="dates"), tokenizer).log()
    assert "--normalize-prefix dates: text such as" in caplog.text and "claude" not in caplog.text


def test_divergence_is_for_the_owner_of_the_conversation(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer)
    scene.chat(system("One."), HI, job_id="j")
    scene.chat(system("Two."), HI, said("Ho"), HI, job_id="j", cache_salt="other")
    assert scene.divergence is None
    scene.chat(system("Two."), HI, said("Ho"), HI, job_id="other")
    assert scene.divergence is None, "another job"
    scene.chat(system("Two."), HI, said("Ho"), HI, job_id="j")
    assert scene.divergence is not None


@pytest.mark.parametrize("name", ["user", "prompt_cache_key", "session_id", "job_id"])
def test_divergence_is_for_the_user_and_name_of_the_conversation(tokenizer: Tokenizer, name: str) -> None:
    """A greeting is answered alike, so both know the answer; it must not show one what the other wrote next."""
    scene, greeting = Scene(tokenizer), "Hello! How can I help you today?"
    hers: dict[str, Any] = {name: "alice"}
    others: list[dict[str, Any]] = [{name: "bob"}, {}, {name: "alice", "user": "carol"}]
    scene.chat(HI, says=greeting, **hers)
    scene.chat(HI, said(greeting), {"role": "user", "content": "My secret."}, **hers)
    for other in others[: 2 if name == "user" else 3]:
        scene.chat(HI, said(greeting), {"role": "user", "content": "Go on."}, **other)
        assert scene.divergence is None, other
    scene.chat(HI, said(greeting), {"role": "user", "content": "My password."}, **hers)
    assert scene.divergence is not None and "secret" in scene.divergence.was


def test_nothing_is_compared_without_recorded_turns(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, no_auto_continue=True, normalize_prefix="dates,claude-code-billing")
    scene.chat(system("One."), HI)
    scene.chat(system(BILLING % 1 + "\nTwo."), HI, said("Ho"), HI)
    assert scene.divergence is None and "x-anthropic" not in scene.text


def test_branches_of_a_conversation_are_compared_with_the_latest(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer)
    ask = {"role": "user", "content": "And?"}
    scene.chat(HI)
    scene.chat(HI, said("Ho"), ask)
    assert scene.divergence is None
    scene.chat(HI, said("Ho"), ask)
    found = scene.divergence
    assert found is not None and found.kind == "regenerated" and scene.sent.spec.predecessor is not None
    scene.chat(HI, said("Ho"), {"role": "user", "content": "But?"})
    found = scene.divergence
    assert found is not None and (found.kind, found.message, found.char, found.message_token) == ("messages", 2, 0, 0)
    scene.chat(HI, said("Ho"), ask, said("Ho"), HI)
    assert scene.divergence is None, "back to the first branch"


def test_chat_is_compared_with_any_turn_of_its_client(tokenizer: Tokenizer) -> None:
    """Whether or not the chat's conversation is that turn's, and which turn of that the chat continues, if any."""
    scene = Scene(tokenizer)
    scene.compared = dict.fromkeys(["one", "two", "nobody's"])

    def kinds(*messages: dict, **fields: Any) -> list[str | None]:
        scene.chat(*messages, **fields)
        told = [scene.compared[rid] for rid in ("one", "two")]
        assert scene.compared["nobody's"] is None
        found: list[str | None] = []
        for each in told:
            kind = each.divergence.kind if each is not None and each.divergence is not None else None
            found.append(kind if each is None or kind is not None else str(each.continues))
        return found

    first = [HI, said("Ho"), user("And?")]
    assert kinds(HI, rid="one") == [None, None]
    assert kinds(*first, rid="two") == ["True", None]
    assert kinds(*first, said("Ho"), user("third"), rid="three") == ["True", "True"]
    assert kinds(user("completely other words")) == ["messages", "history"]
    assert kinds(user("Edited"), *first[1:], said("Ho"), user("third")) == ["messages", "messages"]
    assert kinds(HI, said("Ho"), user("But?"), said("Ho"), user("third")) == ["True", "messages"]
    assert kinds(*first) == ["True", "regenerated"]
    assert kinds(system("Be brief."), *first) == ["system", "system"]
    assert kinds(user("other"), user="somebody else") == ["False", "False"], "their texts are not compared"
    assert kinds(*first, user="somebody else") == ["True", "False"]


def test_forgotten_turns_are_not_compared(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_TURNS", 2)
    scene = Scene(tokenizer)
    scene.chat(system("One."), HI)
    for number in range(2):
        scene.chat({"role": "user", "content": f"{number}"})
    scene.chat(system("Two."), HI, said("Ho"), HI)
    assert scene.divergence is None
    kept = scene.chats._conversations
    assert {turn.rid for turn in kept._by_message.values()} | {turn.rid for turn in kept._by_job.values()} <= {
        name[1] for name in kept._turns
    }


def test_a_model_with_states_leaves_one_behind_the_last_message(scene: Scene) -> None:
    scene.chat(HI)
    assert scene.sent.spec.state_points == ()
    scene.manager.limits = ModelLimits(context_length=4096, vocab_size=257, keeps_states=True)
    for messages in ((HI,), (HI, said("Ho"), HI)):
        scene.chat(*messages)
        (point,) = scene.sent.spec.state_points
        ids = scene.sent.input_ids or []
        assert scene.manager.tokenizer.decode(ids[point:], False) == "[assistant]"
    scene.chat(HI, {"role": "assistant", "content": "Ho"}, continue_final_message=True, add_generation_prompt=False)
    assert scene.sent.spec.state_points == ()  # the answer goes on: there is no place behind the messages
    scene.chat(HI, truncate_prompt_tokens=5)
    assert scene.sent.spec.state_points == ()
