"""Sends requests to watch on the dashboard: agents with slow tools, two-stage programs, chats.

    python -m baton.examples.dashboard_work [--url URL] [--seconds 60]

The requests are those of ordinary clients; answers are long, so that they can be watched. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0

MANUAL = "".join(
    f"{number}. To {verb} the {thing}, open {thing}.conf and read the line of its {part}.\n"
    for number, (verb, thing, part) in enumerate(
        (verb, thing, part)
        for verb in ("start", "stop", "move")
        for thing in ("server", "notes", "plan")
        for part in ("port", "size", "name")
    )
)
AGENT = f"<|im_start|>system\nYou are an agent with a shell.\n{MANUAL}<|im_end|>\n"
TASKS = (
    "How many lines are in manual.md?",
    "What is the size of notes in docs?",
    "Which port does the server use?",
    "Where is the plan?",
)
THINK = (
    "<|im_start|>system\nYou recommend items. Think first.<|im_end|>\n<|im_start|>user\nThe user looked at: {items}\n"
    "What comes next?<|im_end|>\n<|im_start|>assistant\n"
)


class Work:
    """Threads that send requests until ``stop`` is called."""

    def __init__(self, url: str, seed: int = 1, *, agents: int = 3, programs: int = 2, chats: int = 3) -> None:
        """agents, programs, chats: how many of each there are at a time."""
        self._url = url
        self._kinds = ((self._agent, agents), (self._program, programs), (self._chat, chats))
        self._seed = seed
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.errors: list[str] = []
        """Errors of failed requests; each ends its thread."""
        self.answers = 0

    def start(self) -> Work:
        for kind, count in self._kinds:
            for number in range(1, count + 1):
                thread = threading.Thread(target=self._run, args=(kind, number, count), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: Callable[[int, random.Random], None], number: int, count: int) -> None:
        """One after the other: those of ``number``, ``number + count``, …"""
        draw = random.Random(f"{self._seed} {kind.__name__} {number}")
        try:
            self._pause(draw.uniform(0, 3))
            while not self._over.is_set():
                kind(number, draw)
                number += count
                self._pause(draw.uniform(0.5, 3))
        except (OSError, ValueError) as error:
            self.errors.append(f"{kind.__name__.strip('_')} {number}: {_reason(error)}")

    def _pause(self, seconds: float) -> None:
        self._over.wait(seconds)

    # -- the kinds of work ---------------------------------------------------------------------------------------------

    def _agent(self, number: int, draw: random.Random) -> None:
        """A job of some steps; its tool runs between them. Each step brings only what the tool said, and takes over the
        KV of the one before."""
        job = f"agent-{number}"
        begin = f"{AGENT}<|im_start|>user\n{draw.choice(TASKS)} ({job})<|im_end|>\n<|im_start|>assistant\n"
        prompt: dict[str, Any] = {"text": begin}
        steps = draw.randint(3, 5)
        for step in range(1, steps + 1):
            is_last = step == steps or self._over.is_set()
            fields = {"rid": f"{job}/{step}", "job_id": job, "is_last_step": is_last}
            self._generate(draw.randint(60, 160), **prompt, **fields, retain_ttl=0 if is_last else 20)
            if is_last:
                return
            self._pause(draw.uniform(0.6, 2.4))
            said = "".join(f"- {draw.randint(1, 99)} notes {draw.randint(1, 99)}\n" for _ in range(draw.randint(4, 20)))
            suffix = f"<|im_end|>\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n"
            prompt = {"continuation_of": fields["rid"], "continuation_suffix": suffix}

    def _program(self, number: int, draw: random.Random) -> None:
        self.two_stages(f"program-{number}", draw.uniform(1.0, 2.0), draw)

    def two_stages(self, name: str, pause_s: float, draw: random.Random) -> None:
        """A thought, then, after a look at it, what it led to, on the KV of the first."""
        items = "".join(_item(draw) for _ in range(draw.randint(40, 160)))
        first, second = f"{name}/think", f"{name}/name"
        self._generate(draw.randint(200, 350), text=THINK.format(items=items), rid=first, retain_ttl=20)
        self._pause(pause_s)
        suffix = f"</think>\n{_item(draw)}"
        length = draw.randint(100, 250)
        self._generate(length, rid=second, continuation_of=first, continuation_suffix=suffix)

    def _chat(self, number: int, draw: random.Random) -> None:
        """Turns of a conversation; each goes on from the KV of the one before by itself."""
        talk = []
        for question in range(1, draw.randint(2, 4) + 1):
            asked = f"{draw.choice(TASKS)} Chat {number}, question {question}."
            talk.append({"role": "user", "content": asked})
            fields = {"rid": f"chat-{number}/{question}", "ignore_eos": True, "temperature": 0.7}
            body = {"model": "toy", "messages": talk, "max_tokens": draw.randint(60, 140)} | fields
            answer = self._send("/v1/chat/completions", body)
            talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            if self._over.is_set():
                return
            self._pause(draw.uniform(0.8, 2.5))

    # -- sending -------------------------------------------------------------------------------------------------------

    def _generate(self, tokens: int, **fields: Any) -> None:
        sampling = {"temperature": 0.7, "max_new_tokens": tokens, "ignore_eos": True}
        self._send("/generate", {"sampling_params": sampling} | fields)

    def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer = json.load(reply)
        self.answers += 1
        return answer


def _item(draw: random.Random) -> str:
    codes = "".join(f"<s_{kind}_{draw.randrange(32)}>" for kind in "abc")
    return f"<|sid_begin|>{codes}<|sid_end|>"


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.read(500).decode(errors='replace')}"
    return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send work to a server, to watch it on its dashboard.")
    parser.add_argument("--url", default="http://localhost:30000", help="a server that serves the toy model")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    print(f"watch it at {arguments.url}/dashboard")
    work = Work(arguments.url).start()
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(arguments.seconds)
    work.stop()
    print(f"{work.answers} answers")
    for error in work.errors:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if work.errors else 0


if __name__ == "__main__":
    sys.exit(main())
