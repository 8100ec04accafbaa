"""Finds the finished request that a prompt extends, by token ids: so a client that sends its whole history again
continues its job without naming it.

    finished   prompt + output, kept as a digest            a b c d e f
    arrives    a prompt that begins with the same ids       a b c d e f  g h    ─▶ the same job; only g h are new

Chats are compared as text, in another process (entrypoints/chat/conversations.py). This table does the same for
requests that bring ids, or text that no chat template made.

A prompt is hashed only where it may match: up to the lengths of turns of the same client and namespace whose last ids
stand in the prompt at that place. So a prompt that extends nothing costs one look at small arrays, however long it is.

A client that sends text may have the last token of an answer merged with what follows it. So a prompt also extends a
turn if only the last token of the answer differs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from ..client_shares import ClientShares

MAX_TURNS = 4096
"""Turns on record; beyond that, the client with most of them loses its oldest."""

MAX_HASHED = 64
"""Turns with the right last ids that one prompt is compared with, the longest first."""

TAIL = 4
"""Last ids of a turn, but for the very last one, that a prompt must have at their place before it is hashed."""

_LEAST_ROOM = 8
"""Turns that a new scope has room for."""


@dataclass(slots=True, eq=False)
class FinishedTurn:
    """A sequence that ended well. name: rid and index. job_id: its job's; None for a turn of no job."""

    client: str
    namespace: str
    name: tuple[str, int]
    job_id: str | None
    length: int
    """Tokens of prompt and output, without a matched stop."""
    digest: bytes
    short_digest: bytes
    """Digest of the same ids without the last one; empty if the output has only one token."""
    serial: int
    """A later turn has a greater one."""
    place: int = -1
    """Its place in the arrays of its scope."""


class _Scope:
    """The turns of one client in one namespace, in arrays without gaps: a look-up reads all of them."""

    def __init__(self) -> None:
        self.turns: list[FinishedTurn] = []
        """By place."""
        self._ends = np.zeros(_LEAST_ROOM, dtype=np.intp)
        """Positions of the ids in front of the last ones."""
        self._tails = np.zeros((TAIL, _LEAST_ROOM), dtype=np.int32)
        """The ids in front of the last one, the nearest first."""
        self._serials = np.zeros(_LEAST_ROOM, dtype=np.int64)
        self._extended = np.zeros(_LEAST_ROOM, dtype=np.int64)
        """Prompts that extended each turn. Of turns with the same ids, the one that was extended least is found: so
        conversations that began with the same words stay apart."""

    def add_turn(self, turn: FinishedTurn, tail: np.ndarray) -> None:
        """tail: int32 [TAIL]"""
        turn.place = place = len(self.turns)
        if place == len(self._ends):
            self._ends, self._tails = _doubled(self._ends), _doubled(self._tails)
            self._serials, self._extended = _doubled(self._serials), _doubled(self._extended)
        self.turns.append(turn)
        self._ends[place], self._serials[place], self._extended[place] = turn.length - 2, turn.serial, 0
        self._tails[:, place] = tail

    def remove_turn(self, turn: FinishedTurn) -> None:
        """The last turn takes its place."""
        last, place = self.turns.pop(), turn.place
        if last is not turn:
            self.turns[place] = last
            for of_turns in (self._ends, self._tails, self._serials, self._extended):
                of_turns[..., place] = of_turns[..., last.place]
            last.place = place

    def count_extension(self, turn: FinishedTurn) -> None:
        """Count a prompt that extends this turn."""
        self._extended[turn.place] += 1

    def near_turns(self, prompt: np.ndarray) -> list[FinishedTurn]:
        """The turns with last ids that stand in the prompt, int32 [n], at their place; the first to be tried first."""
        ends, tails = self._ends[: len(self.turns)], self._tails
        # a position behind the prompt gets its last id here, and is sorted out below
        places = np.flatnonzero(prompt.take(ends, mode="clip") == tails[0, : len(ends)])
        if not len(places):
            return []
        places = places[ends[places] < len(prompt) - 1]
        for back in range(1, TAIL):
            places = places[prompt[ends[places] - back] == tails[back, places]]
        order = np.lexsort((-self._serials[places], self._extended[places], -ends[places]))
        return [self.turns[place] for place in places[order[:MAX_HASHED]].tolist()]


def _doubled(of_turns: np.ndarray) -> np.ndarray:
    """The same array with room for twice as many turns in its last dimension."""
    return np.concatenate([of_turns, np.zeros_like(of_turns)], axis=-1)


class FinishedTurns:
    """The turns on record."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        self._turns: dict[int, FinishedTurn] = {}
        """By their serial."""
        self._shares: ClientShares[int] = ClientShares()
        """Serials of the turns, by client."""
        self.max_turns = max_turns
        self._scopes: dict[tuple[str, str], _Scope] = {}
        """By client and namespace; those without turns are absent."""
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._turns)

    def record_turn(
        self,
        client: str,
        namespace: str,
        name: tuple[str, int],
        job_id: str | None,
        prompt: np.ndarray,
        output: np.ndarray,
    ) -> None:
        """prompt, output: int32 [n] each. A turn without output, or of TAIL ids or less, is not recorded."""
        length = len(prompt) + len(output)
        if not (len(output) and length > TAIL and self.max_turns):
            return
        hasher = _hasher(prompt)
        hasher.update(_packed(output[:-1]))
        short = hasher.digest() if len(output) > 1 else b""
        hasher.update(_packed(output[-1:]))
        self._recorded += 1
        turn = FinishedTurn(client, namespace, name, job_id, length, hasher.digest(), short, self._recorded)
        last = output if len(output) > TAIL else np.concatenate([prompt[-TAIL - 1 :], output])
        self._turns[turn.serial] = turn
        self._shares.put_key(client, turn.serial)
        scope = self._scopes.get((client, namespace))
        if scope is None:
            scope = self._scopes[client, namespace] = _Scope()
        scope.add_turn(turn, last[-2 : -TAIL - 2 : -1])
        if len(self._turns) > self.max_turns:
            self._forget_turn(next(self._shares.in_order_of_forgetting()))

    def find_turn(self, client: str, namespace: str, prompt: np.ndarray) -> FinishedTurn | None:
        """The longest turn of the client in the namespace that ``prompt``, int32 [n], extends; of turns with the same
        ids the one that was extended least, and of these the latest. It counts as extended."""
        scope = self._scopes.get((client, namespace))
        near = scope.near_turns(prompt) if scope is not None and len(prompt) else []
        if scope is None or not near:
            return None
        digests = _digests(prompt, {turn.length for turn in near} | {turn.length - 1 for turn in near})
        for turn in near:
            whole = digests.get(turn.length) == turn.digest
            if whole or (turn.short_digest and digests.get(turn.length - 1) == turn.short_digest):
                scope.count_extension(turn)
                self._shares.renew_key(turn.serial)
                return turn
        return None

    def _forget_turn(self, serial: int) -> None:
        turn = self._turns.pop(serial)
        self._shares.remove_key(serial)
        scope = self._scopes[turn.client, turn.namespace]
        scope.remove_turn(turn)
        if not scope.turns:
            del self._scopes[turn.client, turn.namespace]


def _packed(ids: np.ndarray) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<i4").data


def _hasher(ids: np.ndarray):
    """SHA-256, for which processors have instructions: half a millisecond for 100,000 ids."""
    return hashlib.sha256(_packed(ids))


def _digests(prompt: np.ndarray, lengths: set[int]) -> dict[int, bytes]:
    """Digests of the first ids of ``prompt``, by length; lengths beyond the prompt's are left out."""
    hasher, start = _hasher(prompt[:0]), 0
    digests: dict[int, bytes] = {}
    for length in sorted(lengths):
        if length > len(prompt):
            break
        hasher.update(_packed(prompt[start:length]))
        digests[length], start = hasher.digest(), length
    return digests
