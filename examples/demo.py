"""The program of `baton demo` and `make demo`: a real server on the bundled toy model, real requests, and the radix
cache's reuse.

    baton demo [--model-path FOLDER] [--log FILE]

Standard library only: this is a client, and shows the calls that a client makes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOY_MODEL = Path(__file__).parent / "toy_model"
READY_TIMEOUT, STOP_TIMEOUT, REQUEST_TIMEOUT = 120.0, 30.0, 60.0
"""Seconds."""


class DemoError(Exception):
    """Something did not work; the text says what."""


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    """The server as its own process, started through the command line that a user would type."""

    def __init__(self, model_path: Path, log_path: Path) -> None:
        self.port = _free_port()
        self._log_path = log_path
        self.command = [sys.executable, "-m", "baton.entrypoints.launch_server", "--model-path", str(model_path)]
        self.command += ["--port", str(self.port), "--max-total-tokens", "16384"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> float:
        """Seconds it took. Raises DemoError when the server ends or the time is up."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) < READY_TIMEOUT:
            if self._process.poll() is not None:
                raise DemoError(f"the server ended with code {self._process.returncode} before it was ready")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5) as reply:
                if reply.status == 200:
                    return waited
            _progress(f"loading the model ... {waited:.0f} s")
            time.sleep(0.2)
        raise DemoError(f"the server was not ready after {READY_TIMEOUT:.0f} s")

    def stop(self) -> None:
        """Asks the server to end as an operator would. Raises DemoError when it does not end cleanly."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DemoError(f"the server did not end within {STOP_TIMEOUT:.0f} s of SIGTERM") from None
        if code != 0:
            raise DemoError(f"the server ended with code {code}")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- the client -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """One row of the table at the end. Counts are tokens."""

    label: str
    prompt: int
    cached: int
    generated: int


GREEDY = {"temperature": 0, "max_new_tokens": 160}


class Client:
    """Sends requests to `POST /generate` and keeps what each one cost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.usage: list[Usage] = []

    def generate(self, label: str, prompt: str) -> str:
        """The greedy answer to one prompt."""
        reply = json.load(self._post({"text": prompt, "sampling_params": GREEDY}))
        return self._record(label, reply)

    def generate_batch(self, labels: list[str], prompts: list[str]) -> list[str]:
        """The greedy answers to several prompts sent as one request."""
        replies = json.load(self._post({"text": prompts, "sampling_params": GREEDY}))
        return [self._record(label, reply) for label, reply in zip(labels, replies, strict=True)]

    def stream(self, label: str, prompt: str) -> Iterator[str]:
        """Pieces of the answer as the server sends them: server-sent events, each with the text so far."""
        seen, reply = "", None
        for line in self._post({"text": prompt, "sampling_params": GREEDY, "stream": True}):
            event = line.decode().strip().removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            reply = json.loads(event)
            if "error" in reply:
                raise DemoError(f"the stream broke: {reply['error']['message']}")
            yield reply["text"][len(seen) :]
            seen = reply["text"]
        if reply is None:
            raise DemoError("the stream ended without an event")
        self._record(label, reply)

    def _post(self, body: dict):
        request = urllib.request.Request(
            f"{self._url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT)
        except urllib.error.HTTPError as error:
            raise DemoError(f"/generate answered {error.code}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise DemoError(f"/generate did not answer: {error}") from error

    def _record(self, label: str, reply: dict) -> str:
        meta = reply["meta_info"]
        if meta["finish_reason"]["type"] != "stop":
            raise DemoError(f"{label!r} did not end by itself: {meta['finish_reason']}, text {reply['text']!r}")
        self.usage.append(Usage(label, meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]))
        return reply["text"]


# --- the scenes -------------------------------------------------------------------------------------------------------


def message(role: str, content: str) -> str:
    """One message in the toy model's chat format."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


ASSISTANT = "<|im_start|>assistant\n"


def agent(client: Client) -> None:
    """A job of several turns: the model asks for a command, the demo runs it, and the answer needs the output."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "src", "core", "app.conf")
        file.parent.mkdir(parents=True)
        file.write_text("set mode lemon\nset port 48\nset retry 12\n")
        text = message("system", "You are a shell agent. Think first.")
        text += message("user", "What is the value of port in app.conf?")
        show("prompt", text)
        answer = ""
        for turn in range(1, 5):
            answer = client.generate(f"agent, turn {turn}", text + ASSISTANT)
            show("assistant", answer)
            command = re.search(r"```bash\n(.+)\n```", answer)
            if command is None:
                break
            output = run_tool(command[1], folder)
            show("tool", output)
            text += message("assistant", answer) + message("tool", output)
    check("port 48 in ./src/core/app.conf" in answer, f"the final answer should name the port and its file: {answer!r}")
    check(client.usage[-1].cached > 0, "the last turn should reuse what the turns before it computed")


def run_tool(command: str, folder: str) -> str:
    """Runs what the model wrote, if it is one of the two read-only programs this scene needs; never through a shell."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "(not a command)"
    if not words or words[0] not in ("find", "cat"):
        return "(only find and cat can be run here)"
    if any(word.startswith(("-exec", "-delete", "-f", "-ok", "/")) or ".." in word for word in words):
        return "(refused)"
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=10).stdout.strip()


def shared_prompt(client: Client) -> None:
    """Four users, one system prompt, one batch: the prefix is computed once."""
    system = message(
        "system",
        "You are a careful assistant with a shell. Use one command at a time. Never delete a file. "
        "Keep answers short. Do not guess: look first. Finish with one sentence. Do not think aloud.",
    )
    tasks = [
        "How many lines are in poem.txt?",
        "Please grep lemon in notes.md.",
        "Please echo river candle into todo.txt.",
        "What is the sum of budget.csv and ledger.csv?",
    ]
    prompts = [system + message("user", task) + ASSISTANT for task in tasks]
    answers = client.generate_batch([f"batch, user {number}" for number in range(1, 5)], prompts)
    show("shared", system)
    commands = ("wc -l poem.txt", "grep lemon -n notes.md", "echo river candle > todo.txt", "cat budget.csv")
    for task, answer, wanted in zip(tasks, answers, commands):
        show("user", task)
        show("assistant", answer)
        check(wanted in answer, f"the answer to {task!r} should contain {wanted!r}: {answer!r}")


def streaming(client: Client) -> None:
    """Server-sent events: the text appears while it is generated."""
    text = message("system", "You help with files. Think first.")
    text += message("user", "What is the size of diary in photos?")
    command = "cd photos && stat -c '- %n %s' *"
    text += message("assistant", f"<think>I list the sizes in photos.</think>\n```bash\n{command}\n```")
    text += message("tool", "- speech 31\n- diary 64\n- index 77")
    show("prompt", text)
    print(f"  {'streamed':>9} | ", end="")
    pieces = []
    for piece in client.stream("stream", text + ASSISTANT):
        pieces.append(piece)
        print(piece.replace("\n", f"\n{' ' * 12}| "), end="", flush=True)
    print(f"\n  {'':>9} | ({len(pieces)} events)")
    check("diary 64" in "".join(pieces), f"the answer should name the size 64: {''.join(pieces)!r}")


def program(server: Server, module: str) -> None:
    """Another example on this server; its source is the thing to read."""
    arguments = ("-m", module, "--url", server.url)
    show("command", shlex.join(["python", *arguments]))
    sys.stdout.flush()
    try:
        code = subprocess.run([sys.executable, *arguments], timeout=REQUEST_TIMEOUT).returncode
    except subprocess.TimeoutExpired:
        raise DemoError(f"{shlex.join(arguments)} did not end within {REQUEST_TIMEOUT:.0f} s") from None
    check(code == 0, f"{shlex.join(arguments)} ended with code {code}")


def check(good: bool, message: str) -> None:
    if not good:
        raise DemoError(message)


# --- output -----------------------------------------------------------------------------------------------------------


def show(label: str, text: str) -> None:
    """A labelled block, wrapped and indented."""
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, 94) or [""]]
    for number, line in enumerate(lines or [""]):
        print(f"  {label if number == 0 else '':>9} | {line}")


def headline(text: str) -> None:
    print(f"\n--- {text} {'-' * max(0, 104 - len(text))}\n")


def table(usage: list[Usage]) -> None:
    print(f"  {'request':20} {'prompt tokens':>14} {'reused from cache':>18} {'computed':>9} {'generated':>10}")
    total = Usage("all", *(sum(getattr(row, name) for row in usage) for name in ("prompt", "cached", "generated")))
    for row in (*usage, total):
        share = f"{row.cached} ({row.cached / row.prompt:.0%})"
        print(f"  {row.label:20} {row.prompt:14} {share:>18} {row.prompt - row.cached:9} {row.generated:10}")


def _progress(text: str) -> None:
    """A line that overwrites itself; nothing where the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r  {text}", end="", flush=True)


SCENES = (
    ("An agent: three turns, each a continuation of the last", agent),
    ("A batch: four users behind one system prompt", shared_prompt),
    ("A stream: text as it is generated", streaming),
)


def run(server: Server) -> None:
    headline("The server")
    show("command", shlex.join(["python", *server.command[1:]]))
    waited = server.wait_until_ready()
    _progress(" " * 40 + "\r")
    show("ready", f"{server.url} after {waited:.1f} s")
    client = Client(server.url)
    for title, scene in SCENES:
        headline(title)
        scene(client)
    headline("What the radix cache reused")
    table(client.usage)
    headline("A program of two stages: think, then name an item; the second is handed the KV of the first")
    program(server, "baton.examples.two_stage")
    headline("A recommender: think, then search 32 items that exist; again the KV of the thought is handed on")
    program(server, "baton.examples.recommend")
    server.stop()
    print("\n  The server has shut down cleanly.")


def _interrupt(*_: object) -> None:
    """SIGTERM ends the demo as Ctrl-C does: with its server."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """argv: the flags; None takes those of the process. Returns the exit status."""
    parser = argparse.ArgumentParser("baton demo", description="Start a server on the toy model and send it work.")
    parser.add_argument("--model-path", type=Path, default=TOY_MODEL)
    parser.add_argument("--log", type=Path, help="keep the server's log in this file")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory() as folder:
        try:
            server = Server(args.model_path, args.log or Path(folder, "server.log"))
        except OSError as error:
            print(f"baton demo: the server cannot be started: {error}", file=sys.stderr)
            return 1
        try:
            run(server)
        except DemoError as error:
            print(f"\nDEMO FAILED: {error}", file=sys.stderr)
            print(f"Last lines of the server's log:\n{textwrap.indent(server.log_tail(), '  ')}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of the output, such as head, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        finally:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
