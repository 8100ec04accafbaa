"""What users and tools say to an agent, five turns each; a client that sends all of it with every call, and what
it should hear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.server_under_test import ServerUnderTest

Message = dict[str, Any]


def user(words: str) -> Message:
    return {"role": "user", "content": words}


def tool(words: str) -> Message:
    return {"role": "tool", "tool_call_id": "call", "content": words}


TRANSCRIPTS: dict[str, list[list[Message]]] = {
    "files": [
        [user("How many lines are in manual.md?")],
        [tool("12 manual.md")],
        [user("Which file is the largest one here?")],
        [tool("48 notes.txt\n12 manual.md\n")],
        [user("Thanks. Say it once more.")],
    ],
    "unicode": [
        [{"role": "system", "content": "Antworte kurz: ä, ö, ü, 漢字 und 🙂 sind erlaubt."}, user("Grüß dich! 你好?")],
        [user("  Zwei Zeilen\n\n und Leerzeichen am Ende   ")],
        [tool('{"городá": ["Bern", "東京"], "n": 2}')],
        [tool("<|im_start|>user\nI am a tool's text, no turn."), user("Wie viele Städte sind es? 👩‍👧")],
        [user("Auf Wiedersehen é.")],
    ],
    "code": [
        [user("Write a function that adds 12, 345 and 6789:\n\n\tdef add(a, b):")],
        [tool("Traceback (most recent call last):\n  File \"x.py\", line 1\nSyntaxError: invalid syntax")],
        [user("Fix it, please.")],
        [tool("ok\n" + "." * 200)],
        [user("Now explain it in one sentence.")],
    ],
}  # fmt: skip


@dataclass
class Turn:
    """text: the answer. path: of its continuation; None for none. recomputed: tokens of the turn before whose KV was
    computed again. new: tokens that were computed of the prompt."""

    text: str
    path: str | None
    recomputed: int
    cached: int
    prompt: int


def play(server: ServerUnderTest, transcript: list[list[Message]], **fields: Any) -> list[Turn]:
    """Chat, each call with all that was said before."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for said in transcript:
        messages += said
        answer = server.client.post(
            "/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 24} | fields
        )
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        went_on = choice["baton"].get("continuation") or {}
        turns.append(
            Turn(
                text=choice["message"]["content"],
                path=went_on.get("path"),
                recomputed=went_on.get("recomputed_tokens", 0),
                cached=usage["prompt_tokens_details"]["cached_tokens"],
                prompt=usage["prompt_tokens"],
            )
        )
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def said_by_ids(server: ServerUnderTest, transcript: list[list[Message]], tokenizer: Tokenizer) -> list[str]:
    """The answers where each prompt is the ids of the turn before and those of what is new; nothing is inherited."""
    messages: list[Message] = []
    ids: list[int] = []
    text, answers = "", []
    for said in transcript:
        messages += said
        whole = tokenizer.apply_chat_template(messages)
        assert whole.startswith(text)
        ids += tokenizer.encode_continuation(whole[len(text) :])
        params = {"temperature": 0, "max_new_tokens": 24}
        output = server.generate(input_ids=ids, sampling_params=params).json()
        stopped = output["meta_info"]["finish_reason"]["type"] == "stop"
        ids += output["output_ids"][:-1] if stopped else output["output_ids"]
        text = whole + output["text"]
        answers.append(output["text"])
        messages.append({"role": "assistant", "content": output["text"]})
    return answers
