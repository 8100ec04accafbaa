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

_NEVER = np.iinfo(np.int64).max


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
    """Of the same ids without the last one; empty if the output has only one token."""
    place: int


class FinishedTurns:
    """The turns on record."""

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        self._turns: dict[int, FinishedTurn] = {}
        """By their place in the arrays."""
        self._shares: ClientShares[int] = ClientShares()
        """Places of the turns, by client."""
        self.max_turns = max_turns
        places = max_turns + 1  # a new turn is recorded before one is forgotten
        self._free = list(range(places))[::-1]
        self._lengths = np.full(places, _NEVER, dtype=np.int64)
        self._tails = np.zeros((TAIL, places), dtype=np.int32)
        """The ids in front of the last one, the nearest first."""
        self._scopes = np.zeros(places, dtype=np.int64)
        """Hashes of (client, namespace)."""
        self._serials = np.zeros(places, dtype=np.int64)
        """A later turn has a greater one."""
        self._extended = np.zeros(places, dtype=np.int64)
        """Prompts that extended each turn. Of turns with the same ids, the one that was extended least is found: so
        conversations that began with the same words stay apart."""
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
        place = self._free.pop()
        self._recorded += 1
        turn = FinishedTurn(client, namespace, name, job_id, length, hasher.digest(), short, place)
        self._turns[place] = turn
        self._shares.put_key(client, place)
        last = np.concatenate([prompt[-TAIL - 1 :], output[-TAIL - 1 :]])
        self._tails[:, place] = last[-2 : -TAIL - 2 : -1]
        self._scopes[place] = hash((client, namespace))
        self._lengths[place], self._serials[place], self._extended[place] = length, self._recorded, 0
        if len(self._turns) > self.max_turns:
            self._forget_turn(next(self._shares.in_order_of_forgetting()))

    def find_turn(self, client: str, namespace: str, prompt: np.ndarray) -> FinishedTurn | None:
        """The longest turn of the client in the namespace that ``prompt``, int32 [n], extends; of turns with the same
        ids the one that was extended least, and of these the latest. It counts as extended."""
        near = self._near(client, namespace, prompt)
        if not near:
            return None
        digests = _digests(prompt, {turn.length for turn in near} | {turn.length - 1 for turn in near})
        for turn in near:
            whole = digests.get(turn.length) == turn.digest
            if whole or (turn.short_digest and digests.get(turn.length - 1) == turn.short_digest):
                self._extended[turn.place] += 1
                self._shares.renew_key(turn.place)
                return turn
        return None

    def _near(self, client: str, namespace: str, prompt: np.ndarray) -> list[FinishedTurn]:
        """The turns with last ids that stand in the prompt, the first to be tried first."""
        size = len(prompt)
        if not self._turns:
            return []
        fits = (self._lengths <= size) & (self._scopes == hash((client, namespace)))
        places = np.flatnonzero(fits)
        for back in range(TAIL):
            if not len(places):
                return []
            places = places[prompt[self._lengths[places] - 2 - back] == self._tails[back, places]]
        order = np.lexsort((-self._serials[places], self._extended[places], -self._lengths[places]))
        found = [self._turns[place] for place in places[order[:MAX_HASHED]].tolist()]
        return [turn for turn in found if (turn.client, turn.namespace) == (client, namespace)]

    def _forget_turn(self, place: int) -> None:
        del self._turns[place]
        self._shares.remove_key(place)
        self._lengths[place] = _NEVER
        self._free.append(place)


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
