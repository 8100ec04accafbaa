"""Finds stop strings in the generated text, and the tokens that lie before them. (For regexes see `stop_regex`.)

The worker matches (StopStringChecker) between sampling and the scheduler's `process_result`; the detokenizer trims the
text with the same matcher, so both always agree. Only generated text is searched, with special tokens
written out: a stop string may name a special token although clients never see it. Matches may span tokens and begin
inside one:

    tokens      | "I" | " am" | " done.\\n#" | "##" |        stop "\\n###"
    text         I      am      done.\\n#      ##
    match                           ^ start           kept_tokens 2, visible tail " done."
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ...scheduler.batch import StopMatch
from ...scheduler.sampling_params import SamplingParams
from .incremental_decode import IncrementalDecoder
from .stop_regex import StopRegexMatcher
from .token_bytes import TokenBytes


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
        """(position, tokens): the first ``tokens`` tokens end exactly at that position, with a whole character."""
        self.num_tokens = 0
        """Tokens seen."""

    def copy(self) -> StopStringMatcher:
        """Another matcher of the same text, to be continued with other tokens."""
        other = StopStringMatcher.__new__(StopStringMatcher)
        other._decoder = self._decoder.copy()
        other._stop, other._longest, other._min_new_tokens = self._stop, self._longest, self._min_new_tokens
        other._text, other._text_start = self._text, self._text_start
        other._marks = self._marks.copy()
        other.num_tokens = self.num_tokens
        return other

    def push_id(self, token_id: int) -> StopMatch | None:
        """Take the next token; return the match its text completes, if any."""
        old_length = len(self._text)
        self._text += self._decoder.push_ids((token_id,))
        self.num_tokens += 1
        found = self._search(old_length) if self.num_tokens > self._min_new_tokens else None
        if found is None:
            self._forget()
            if not self._decoder.has_pending_bytes:
                self._marks.append((self._text_start + len(self._text), self.num_tokens))
        return found

    def kept_tokens(self) -> int | None:
        """How many of the tokens seen would be kept if a stop string began in the text at their end; None if none may
        have begun there."""
        held = held_back(self._text, self._stop)
        if not held and not self._decoder.has_pending_bytes:
            return None
        begin = self._text_start + len(self._text) - held
        return max(mark for mark in self._marks if mark[0] <= begin)[1]

    def _search(self, old_length: int) -> StopMatch | None:
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
        return StopMatch(index, kept, self._text[position - self._text_start : start])

    def _forget(self) -> None:
        """Drop text and marks that no later match can reach. The text is cut at a mark: visible tails stay whole."""
        reach = self._text_start + len(self._text) - self._longest + 1
        while len(self._marks) > 1 and self._marks[1][0] <= reach:
            self._marks.popleft()
        if len(self._text) > 4 * self._longest + 64:
            cut = self._marks[0][0]
            self._text = self._text[cut - self._text_start :]
            self._text_start = cut


class StringsAndRegexes:
    """Searches one sequence for its stop strings and its stop regexes. Of two that one token completes, the string
    counts."""

    __slots__ = ("_regexes", "_strings", "num_tokens")

    def __init__(self, strings: StopStringMatcher | None, regexes: StopRegexMatcher) -> None:
        self._strings, self._regexes = strings, regexes
        self.num_tokens = 0
        """Tokens seen."""

    def push_id(self, token_id: int) -> StopMatch | None:
        """Take the next token; return the match its text completes, if any."""
        self.num_tokens += 1
        string = self._strings.push_id(token_id) if self._strings is not None else None
        regex = self._regexes.push_id(token_id)
        return string or regex

    def kept_tokens(self) -> int | None:
        """See `StopStringMatcher.kept_tokens`. Nothing is cut off where a regex matches."""
        return self._strings.kept_tokens() if self._strings is not None else None


class StopStringChecker:
    """The matchers of all open sequences that have stop strings or regexes, by serial: one each, or one for each beam
    (a search has strings only)."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._matchers: dict[int, StopStringMatcher | StringsAndRegexes] = {}
        self._beams: dict[int, dict[bytes, StopStringMatcher]] = {}
        """For each search, the matchers of its live beams at the last check, by the beam's tokens (int32 bytes)."""

    def check_tokens(
        self, serial: int, sampling: SamplingParams, output_ids: np.ndarray, new_ids: Sequence[int]
    ) -> StopMatch | None:
        """The first match that one of the new tokens of a sequence completes.

        output_ids: int32 [n], all its output tokens before them.
        """
        matcher = self._matcher(serial, sampling, output_ids)
        for place, token_id in enumerate(new_ids):
            found = matcher.push_id(token_id)
            if found is not None:
                ids = np.concatenate([output_ids, np.array(new_ids[: place + 1], dtype=np.int32)])
                return replace(self._as_seen(sampling, ids, found), token=place)
        return None

    def kept_tokens(self, serial: int) -> int | None:
        """Of a sequence that was just checked: see `StopStringMatcher.kept_tokens`."""
        return self._matchers[serial].kept_tokens()

    def check_beams(
        self, serial: int, sampling: SamplingParams, sequences: np.ndarray, parents: np.ndarray, tokens: np.ndarray
    ) -> dict[int, StopMatch]:
        """Candidate -> match, for the continuations of a search that complete a stop string.

        sequences: int32 [beams, generated tokens], what each beam has so far; parents, tokens: int32 [candidates].
        """
        matchers = self._beam_matchers(serial, sampling, sequences)
        matches: dict[int, StopMatch] = {}
        for candidate, (parent, token_id) in enumerate(zip(parents.tolist(), tokens.tolist())):
            found = matchers[parent].copy().push_id(token_id)
            if found is not None:
                ids = np.append(sequences[parent], np.int32(token_id))
                matches[candidate] = self._as_seen(sampling, ids, found)
        return matches

    def _as_seen(self, sampling: SamplingParams, ids: np.ndarray, found: StopMatch) -> StopMatch:
        """Drop the visible tail if it is part of a special token that the client does not see. ``ids``: the tokens that
        were searched."""
        if not found.visible_tail:
            return found
        hidden = sampling.skip_special_tokens and int(ids[found.kept_tokens]) in self._token_bytes.special_ids
        return replace(found, visible_tail="") if hidden else found

    def _beam_matchers(self, serial: int, sampling: SamplingParams, sequences: np.ndarray) -> list[StopStringMatcher]:
        """One for each beam. A beam's matcher is found by its tokens, so it is never that of another sequence, whatever
        the search did since the last check."""
        known = self._beams.get(serial, {})
        matchers: dict[bytes, StopStringMatcher] = {}
        for ids in sequences:
            name = ids.tobytes()
            matcher = known.get(name)
            if matcher is None:
                parent = known.get(ids[:-1].tobytes()) if len(ids) else None
                matcher = parent.copy() if parent is not None else self._new_matcher(sampling)
                for token_id in ids[matcher.num_tokens :].tolist():
                    matcher.push_id(token_id)
            matchers[name] = matcher
        self._beams[serial] = matchers
        return [matchers[ids.tobytes()] for ids in sequences]

    def _new_matcher(self, sampling: SamplingParams) -> StopStringMatcher:
        return StopStringMatcher(self._token_bytes, sampling.stop, sampling.min_new_tokens)

    def _matcher(
        self, serial: int, sampling: SamplingParams, output_ids: np.ndarray
    ) -> StopStringMatcher | StringsAndRegexes:
        matcher = self._matchers.get(serial)
        if matcher is None or matcher.num_tokens != len(output_ids):
            # New here, or a step was lost: rebuild the matcher from the sequence's own tokens.
            matcher = self._new_matcher(sampling) if sampling.stop else None
            if sampling.stop_regex:
                regexes = StopRegexMatcher(self._token_bytes, sampling.stop_regex, sampling.min_new_tokens)
                matcher = StringsAndRegexes(matcher, regexes)
            assert matcher is not None, "only sequences with stops are checked"
            self._matchers[serial] = matcher
            for token_id in output_ids.tolist():
                matcher.push_id(token_id)
        return matcher

    def drop(self, serial: int) -> None:
        """Forget a sequence that is closed; unknown ones are fine."""
        self._matchers.pop(serial, None)
        self._beams.pop(serial, None)

    def __len__(self) -> int:
        return len(self._matchers) + len(self._beams)


def find_final_stop(token_bytes: TokenBytes, token_ids: Sequence[int], stop: str) -> StopMatch | None:
    """Find the match of ``stop`` that the last of ``token_ids`` completed, as the worker did, from the ids alone."""
    matcher = StopStringMatcher(token_bytes, (stop,), min_new_tokens=len(token_ids) - 1)
    found = None
    for token_id in token_ids:
        found = matcher.push_id(token_id)
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
