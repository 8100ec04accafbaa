"""Stop strings: where in the generated text does one stand, and which tokens lie before it.

The worker matches (StopStringChecker) between sampling and the scheduler's `process_result`; the detokenizer trims the
text with the same matcher, so both always agree. The text that is searched is the generated one alone, with special
tokens written out: a stop string may name a special token though clients never see it. Matches go across token borders
and may begin inside a token:

    tokens      | "I" | " am" | " done.\\n#" | "##" |        stop "\\n###"
    text         I      am      done.\\n#      ##
    match                           ^ start           kept_tokens 2, visible rest " done."
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...scheduler.request import Request
from .incremental_decode import IncrementalDecoder
from .token_bytes import TokenBytes


@dataclass(slots=True, frozen=True)
class FoundStop:
    """A match. kept_tokens: tokens that lie wholly before it and end with a whole character; rest: the text between
    them and the match; stop_index: which stop string."""

    stop_index: int
    kept_tokens: int
    rest: str


class StopStringMatcher:
    """Searches one sequence, token by token; keeps only as much text as a match can span.

    The earliest match wins; of two that begin together, the one listed first. A match that ends within the first
    ``min_new_tokens`` tokens does not count, then or later.
    """

    __slots__ = ("_decoder", "_longest", "_marks", "_min_new_tokens", "_stop", "_text", "_text_start", "num_tokens")

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str], min_new_tokens: int = 0) -> None:
        self._decoder = IncrementalDecoder(token_bytes, skip_special_tokens=False)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self._min_new_tokens = min_new_tokens
        self._text = ""
        self._text_start = 0
        """Position of ``_text`` in the whole text."""
        self._marks: deque[tuple[int, int]] = deque([(0, 0)])
        """(position, tokens): so many tokens end exactly at that position, with a whole character."""
        self.num_tokens = 0
        """Tokens seen."""

    def copy(self) -> StopStringMatcher:
        """Another matcher of the same text, to go on with other tokens."""
        other = StopStringMatcher.__new__(StopStringMatcher)
        other._decoder = self._decoder.copy()
        other._stop, other._longest, other._min_new_tokens = self._stop, self._longest, self._min_new_tokens
        other._text, other._text_start = self._text, self._text_start
        other._marks = self._marks.copy()
        other.num_tokens = self.num_tokens
        return other

    def push(self, token_id: int) -> FoundStop | None:
        """Take the next token; the match its text completes, if any."""
        old_length = len(self._text)
        self._text += self._decoder.push((token_id,))
        self.num_tokens += 1
        found = self._search(old_length) if self.num_tokens > self._min_new_tokens else None
        if found is None:
            self._forget()
            if not self._decoder.has_pending_bytes:
                self._marks.append((self._text_start + len(self._text), self.num_tokens))
        return found

    def _search(self, old_length: int) -> FoundStop | None:
        best: tuple[int, int] | None = None
        for index, stop in enumerate(self._stop):
            # Only a match that ends in the new text is new.
            start = self._text.find(stop, max(0, old_length - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = start, index
        if best is None:
            return None
        start, index = best
        position, kept = max(mark for mark in self._marks if mark[0] <= self._text_start + start)
        return FoundStop(index, kept, self._text[position - self._text_start : start])

    def _forget(self) -> None:
        """Drop text and marks that no later match can reach; the text is cut at a mark, so that `rest` stays whole."""
        reach = self._text_start + len(self._text) - self._longest + 1
        while len(self._marks) > 1 and self._marks[1][0] <= reach:
            self._marks.popleft()
        if len(self._text) > 4 * self._longest + 64:
            cut = self._marks[0][0]
            self._text = self._text[cut - self._text_start :]
            self._text_start = cut


class StopStringChecker:
    """The matchers of all live requests that have stop strings, by (rid, index): one each, or one for each beam."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._matchers: dict[tuple[str, int], StopStringMatcher] = {}
        self._beams: dict[tuple[str, int], dict[bytes, StopStringMatcher]] = {}
        """For each search, its live beams at the last check by their tokens (int32 bytes)."""

    def check(self, requests: Sequence[Request], next_ids: np.ndarray) -> dict[int, FoundStop]:
        """Batch row -> match, for the rows whose new token completes a stop string.

        next_ids: int [bs], parallel to ``requests``, -1 where none was sampled; not yet part of `Request.token_ids`.
        """
        matches: dict[int, FoundStop] = {}
        for row, request in enumerate(requests):
            if request.sampling.stop and next_ids[row] >= 0:
                found = self._matcher(request).push(int(next_ids[row]))
                if found is not None:
                    matches[row] = self._as_seen(request, request.output_ids, int(next_ids[row]), found)
        return matches

    def check_beams(
        self, request: Request, sequences: np.ndarray, parents: np.ndarray, tokens: np.ndarray
    ) -> dict[int, FoundStop]:
        """Candidate -> match, for the continuations of a search that complete a stop string.

        sequences: int32 [beams, generated tokens], what each beam has so far; parents, tokens: int32 [candidates].
        """
        matchers = self._beam_matchers(request, sequences)
        matches: dict[int, FoundStop] = {}
        for candidate, (parent, token_id) in enumerate(zip(parents.tolist(), tokens.tolist())):
            found = matchers[parent].copy().push(token_id)
            if found is not None:
                matches[candidate] = self._as_seen(request, sequences[parent], token_id, found)
        return matches

    def _as_seen(self, request: Request, ids: np.ndarray, next_id: int, found: FoundStop) -> FoundStop:
        """Without the rest, if that is part of a special token which the client does not see. The text is that of
        ``ids`` and ``next_id``."""
        kept = found.kept_tokens
        first = int(ids[kept]) if kept < len(ids) else next_id
        hidden = request.sampling.skip_special_tokens and first in self._token_bytes.special_ids
        return replace(found, rest="") if hidden else found

    def _beam_matchers(self, request: Request, sequences: np.ndarray) -> list[StopStringMatcher]:
        """One for each beam. A beam is found by its tokens: whatever the search did since the last check, and however
        often, what is kept cannot be that of another sequence."""
        known = self._beams.get(request.key, {})
        matchers: dict[bytes, StopStringMatcher] = {}
        for ids in sequences:
            name = ids.tobytes()
            matcher = known.get(name)
            if matcher is None:
                parent = known.get(ids[:-1].tobytes()) if len(ids) else None
                matcher = parent.copy() if parent is not None else self._new_matcher(request)
                for token_id in ids[matcher.num_tokens :].tolist():
                    matcher.push(token_id)
            matchers[name] = matcher
        self._beams[request.key] = matchers
        return [matchers[ids.tobytes()] for ids in sequences]

    def _new_matcher(self, request: Request) -> StopStringMatcher:
        return StopStringMatcher(self._token_bytes, request.sampling.stop, request.sampling.min_new_tokens)

    def _matcher(self, request: Request) -> StopStringMatcher:
        matcher = self._matchers.get(request.key)
        if matcher is None or matcher.num_tokens != request.num_output_tokens:
            # New here, or a step was lost: what the matcher knows follows from the request's own tokens.
            matcher = self._new_matcher(request)
            for token_id in request.output_ids.tolist():
                matcher.push(token_id)
            self._matchers[request.key] = matcher
        return matcher

    def drop(self, key: tuple[str, int]) -> None:
        """Forget a request that ended; unknown keys are fine."""
        self._matchers.pop(key, None)
        self._beams.pop(key, None)

    def __len__(self) -> int:
        return len(self._matchers) + len(self._beams)


def find_final_stop(token_bytes: TokenBytes, token_ids: Sequence[int], stop: str) -> FoundStop | None:
    """The match of ``stop`` that the last of ``token_ids`` completed: what the worker found, from the ids alone."""
    matcher = StopStringMatcher(token_bytes, (stop,), min_new_tokens=len(token_ids) - 1)
    found = None
    for token_id in token_ids:
        found = matcher.push(token_id)
    return found


def held_back(text: str, stop: Iterable[str]) -> int:
    """How many characters at the end of ``text`` may still turn out to begin a stop string: do not send them yet."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
