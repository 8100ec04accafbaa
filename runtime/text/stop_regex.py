"""Ends an output where a regular expression matches its text, at a cost per token that no expression can raise far.

The expressions are RE2's: matching takes time linear in the text, whatever the pattern, so there are neither
look-arounds nor back-references. What one token may cost is the product of two bounds:

    text ……………………………………| at most WINDOW bytes | new token |      times at most MAX_PROGRAM instructions
                       ^ a match begins here or later, and ends in the new token

So an output of n tokens costs n searches of the same size; a match that began more than WINDOW bytes before the token
that completes it is not found. Unlike a stop string, a match stays in the text: nothing is cut off, nothing held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import re2

from ...scheduler.batch import StopMatch
from ...scheduler.outcome import RequestRefused
from .incremental_decode import IncrementalDecoder
from .token_bytes import TokenBytes

WINDOW = 1024
"""Bytes of UTF-8 before a new token in which a match that it completes may begin."""

MAX_PROGRAM = 500
"""Instructions of all expressions of a request together. RE2 then takes 2 to 3 ms for the worst of windows, some 5 µs
for usual ones."""

_MAX_MEM = 1 << 17
"""Bytes that an expression may take, states that matching has built included. (More helps none of this size, and makes
the worst ones slower: states are built, and thrown away.)"""

_UNSUPPORTED = (
    (("(?=", "(?!", "(?<"), "look-arounds are not supported; matching takes linear time, as RE2 defines it"),
    (("(?P", "\\1", "\\2", "\\3", "\\4", "\\5", "\\6", "\\7", "\\8", "\\9"), "back-references are not supported"),
    (("\\Z",), "use \\z for the end of the text"),
)
"""Constructs that RE2's messages name, and a hint for each."""


def check_stop_regex(patterns: Iterable[str], name: str = "stop_regex") -> None:
    """Raises RequestRefused for an expression that is wrong, too large, or matches where there is no text. name: of the
    field, for the message."""
    size = 0
    for pattern in patterns:
        try:
            regex = _compiled(pattern)
        except UnicodeEncodeError as error:
            raise _refused(name, pattern, f"it is not valid Unicode: {error}") from None
        except re2.error as error:
            raise _refused(name, pattern, _readable(error)) from None
        size += regex.programsize
        if size > MAX_PROGRAM:
            raise _refused(
                name,
                pattern,
                f"with it the expressions compile to {size} instructions, at most {MAX_PROGRAM} are served; repeat "
                "less, or use smaller classes (\\pL alone takes 1196)",
            )
        if regex.search(b"") is not None:
            raise _refused(name, pattern, "it matches the empty text, and would end every output at once")


def _compiled(pattern: str) -> Any:
    """Raises re2.error. The module re2 keeps 128 expressions, so that all sequences with one share it."""
    options = re2.Options()
    options.max_mem = _MAX_MEM
    options.log_errors = False
    options.never_capture = True
    return re2.compile(pattern, options)


def _readable(error: Exception) -> str:
    """RE2's "invalid perl operator: (?=", with what it means for the caller."""
    message = error.args[0] if error.args else ""
    text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
    what, _, piece = text.partition(": ")
    if "too large" in text or "repetition size" in text:
        return f"{text}; repeat less (at most {MAX_PROGRAM} instructions are served)"
    if what in ("invalid perl operator", "invalid escape sequence", "invalid named capture group"):
        for pieces, hint in _UNSUPPORTED:
            if piece.startswith(pieces):
                return f"{hint} ({text[:80]})"
    return f"{text[:80]}; the syntax is RE2's"


def _refused(name: str, pattern: str, why: str) -> RequestRefused:
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    return RequestRefused(f"{name} holds {shown!r}: {why}", param=name)


class StopRegexMatcher:
    """Searches one sequence, token by token. Of several expressions that match, the one listed first counts.

    Text of the first ``min_new_tokens`` tokens is no part of a match, but known to ``^`` and ``\\b`` behind it.
    """

    __slots__ = ("_decoder", "_first", "_min_new_tokens", "_regexes", "_tail", "_tail_start", "num_tokens")

    def __init__(self, token_bytes: TokenBytes, patterns: Sequence[str], min_new_tokens: int = 0) -> None:
        """patterns: that `check_stop_regex` lets pass."""
        self._decoder = IncrementalDecoder(token_bytes, skip_special_tokens=False)
        self._regexes = [_compiled(pattern) for pattern in patterns]
        self._min_new_tokens = min_new_tokens
        self._first = 0
        """Position in the whole text, in bytes, from which on a match may begin."""
        self._tail = b""
        """The end of the text, UTF-8: the window, and at least one byte before it where the text has one."""
        self._tail_start = 0
        """Position of ``_tail`` in the whole text."""
        self.num_tokens = 0
        """Tokens seen."""

    def push_id(self, token_id: int) -> StopMatch | None:
        """Take the next token; return the match that its text completes, if any."""
        new = self._decoder.push_ids((token_id,)).encode()
        old_length = len(self._tail)
        self._tail += new
        self.num_tokens += 1
        if self.num_tokens <= self._min_new_tokens:
            self._first = self._tail_start + len(self._tail)
        elif new:
            begin = _next_character(self._tail, max(self._first - self._tail_start, old_length - WINDOW, 0))
            for index, regex in enumerate(self._regexes):
                if regex.search(self._tail, begin) is not None:
                    return StopMatch(index, self.num_tokens, is_regex=True)
        if (excess := len(self._tail) - WINDOW - 1) > WINDOW:
            self._tail = self._tail[excess:]
            self._tail_start += excess
        return None


def _next_character(text: bytes, place: int) -> int:
    """The first place from ``place`` on that is not within a character."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place
