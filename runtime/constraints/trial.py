"""Compiles each new grammar in a process of its own first, so that a hostile one ends that process and not the server.

A kilobyte of a grammar can take minutes and gigabytes to compile, or recurse until a thread's stack overflows. Nothing
in the compiler bounds these, and nothing in a process can end a thread. So the worker sends the source here; what is
compiled within the limits is compiled again in the worker, with twice the stack and the model's vocabulary.

    worker   ──{"source"}──▶ python -m baton.runtime.constraints.trial ──{"error", "bytes"}──▶ worker

The vocabulary of a trial has every byte and the model's special tokens, which is all that compiling depends on.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_CPU_S = 2.0
"""Seconds of one processor for one grammar. Schemas of tools take milliseconds."""

MAX_BYTES = 512 * 2**20
"""Memory for one grammar, beyond what the process has at its start."""

STACK_BYTES = 4 * 2**20
"""Stack of the thread that compiles on trial; the worker's threads have `WORKER_STACK_BYTES`."""

WORKER_STACK_BYTES = 16 * 2**20

MAX_WALL_S = 60.0
"""A trial that takes longer is ended, however little of a processor it gets."""

POLL_S = 0.05
"""Seconds between checks of whether a request still waits for the grammar."""

LIMITS = LLParserLimits(max_lexer_states=60_000, verbose_errors=False)
"""States of one grammar's lexer, some 2 kB each; the rest as llguidance has it: a mask takes at most some 15 ms."""

NO_WAY_ON = "NoExtension"
"""Begins the reason of a matcher that stops where nothing may follow."""

_TOO_DEEP = "it is nested too deeply to compile; shorten its chains of rules or references"


class TrialFailed(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class TrialBroken(Exception):
    """The process could not be started, or ended, for a reason that says nothing of the grammar."""


class NotWanted(Exception):
    """The trial was given up, because no request waits for the grammar any more."""


class Trial:
    """The process, for one thread. It is started when it is needed, and again after it has been ended."""

    def __init__(
        self,
        vocab_size: int,
        special: Mapping[int, str],
        eos_token_ids: Sequence[int],
        max_cpu_s: float = MAX_CPU_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """special: id -> text of the model's special tokens."""
        self._setup: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special": list(special.items()),
            "eos": list(eos_token_ids),
            "max_cpu_s": max_cpu_s,
            "max_bytes": max_bytes,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def try_grammar(self, source: str, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """Compile a grammar in llguidance's form. Returns the bytes that it takes, about. Raises TrialFailed,
        TrialBroken, and NotWanted once ``is_wanted`` returns False."""
        try:
            process, messages = self._start(), [{"source": source}]
            if process is not self._process:
                self._process, messages = process, [self._setup, *messages]
            answer = self._exchange(process, b"".join(map(_packed, messages)), is_wanted)
        except OSError as error:
            self.close()
            raise TrialBroken(f"{type(error).__name__}: {error}") from None
        if answer["error"] is not None:
            raise TrialFailed(answer["error"])
        return int(answer["bytes"])

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """The process, which is new unless it runs. Raises OSError."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.runtime.constraints.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, is_wanted: Callable[[], bool]) -> dict[str, Any]:
        """Write a request and read the answer, without being blocked by a process that does neither. Raises as
        `try_grammar`, and OSError."""
        assert process.stdin is not None and process.stdout is not None
        requests, answers, found = process.stdin.fileno(), process.stdout.fileno(), b""
        deadline = time.monotonic() + MAX_WALL_S
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            selector.register(requests, selectors.EVENT_WRITE)
            while True:
                ready = {key.fd for key, _ in selector.select(POLL_S)}
                if not is_wanted():
                    self.close()
                    raise NotWanted
                if time.monotonic() > deadline:
                    self.close()
                    raise TrialBroken(f"no answer in {MAX_WALL_S:g} s")
                if requests in ready:
                    data = data[os.write(requests, data[:_PIPE_BYTES]) :]
                    if not data:
                        selector.unregister(requests)
                if answers in ready:
                    part = os.read(answers, _PIPE_BYTES)
                    if not part:
                        ended = process.wait()
                        self.close()
                        raise self._ended(ended)
                    found += part
                    if len(found) >= _LENGTH.size and len(found) == _LENGTH.size + _LENGTH.unpack(found[:4])[0]:
                        return json.loads(found[_LENGTH.size :])

    def _ended(self, returncode: int) -> Exception:
        match -returncode:
            case signal.SIGPROF:
                return TrialFailed(f"it takes more than {self._setup['max_cpu_s']:g} s to compile; make it simpler")
            case signal.SIGSEGV | signal.SIGBUS:
                return TrialFailed(_TOO_DEEP)
            case signal.SIGABRT:  # what Rust does where it gets no memory
                return TrialFailed(
                    f"it takes more than {self._setup['max_bytes'] >> 20} MB to compile; make it simpler"
                )
        return TrialBroken(f"the process ended with return code {returncode}")


# -- messages ----------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")

_PIPE_BYTES = 65_536


def _packed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = pipe.read(_LENGTH.unpack(head)[0])
    return json.loads(data)


# -- the process -------------------------------------------------------------------------------------------------------


class _ByteTokens:
    """What llguidance asks of a tokenizer: every byte, and the model's special tokens."""

    def __init__(self, setup: dict[str, Any]) -> None:
        special = {int(token_id): text for token_id, text in setup["special"]}
        self._first_byte = max([setup["vocab_size"], *(token_id + 1 for token_id in special)])
        self.tokens = [b""] * self._first_byte + [bytes([byte]) for byte in range(256)]
        for token_id, text in special.items():
            self.tokens[token_id] = text.encode()
        self.special_token_ids = list(special)
        self.eos_token_id = setup["eos"][0] if setup["eos"] else len(self.tokens)
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._first_byte + byte for byte in (text.encode() if isinstance(text, str) else text)]


def _compile(tokenizer: LLTokenizer, source: str, answer: dict[str, Any]) -> None:
    """Fill in the answer."""
    try:
        before = _resident_bytes()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        error = _error_of(matcher)
        if error is None:
            matcher.compute_bitmask()
            error = _error_of(matcher)
            if error is not None and error.startswith(NO_WAY_ON):
                error = None  # the worker says so in its own words
        answer.update(error=error, bytes=max(0, _resident_bytes() - before))
    except BaseException as error:  # a panic of Rust's is no Exception
        answer.update(error=f"{type(error).__name__}: {error}"[:300], bytes=0)


def _error_of(matcher: LLMatcher) -> str | None:
    return matcher.get_error().split("\n<")[0] if matcher.is_error() else None


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_itself(max_bytes: int) -> None:
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = held + STACK_BYTES + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(OSError):
        os.nice(5)


def main() -> None:
    """Serve until the worker closes the pipe."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker ends this process when it ends
    setup = _read(requests)
    if setup is None:
        return
    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokens(setup)), eos_token=setup["eos"] or None)
    threading.stack_size(STACK_BYTES)
    _limit_itself(setup["max_bytes"])
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup["max_cpu_s"])
        answer: dict[str, Any] = {}
        thread = threading.Thread(target=_compile, args=(tokenizer, request["source"], answer))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(_packed(answer))
        answers.flush()


if __name__ == "__main__":
    main()
