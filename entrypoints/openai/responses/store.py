"""The responses that can be read and gone on from by their id: the last ones, by number and by size. The client that
has most of them loses its oldest first."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ....scheduler.client_shares import ClientShares
from ...chat.conversations import Turn
from ...chat.messages import Message

MAX_BYTES = 2**27
"""Limit for all stored responses together."""

_OBJECT_BYTES = 700
"""Estimated size of the Python objects of an item and its message, beside their texts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response that has ended. ``body``: its JSON.

    items: those of its input and of all responses that it continues. output: its own items, as responses that continue
    it list them. item_bytes: the approximate size of both. messages: the conversation with its answer, without the
    instructions. turn: the turn that a chat continues; None if the response was cancelled or failed.
    """

    rid: str
    scope: str
    status: str
    background: bool
    body: bytes
    items: list[dict]
    output: list[dict]
    item_bytes: int
    messages: list[Message]
    turn: Turn | None

    @property
    def size(self) -> int:
        """In bytes, roughly and not too little: what it shares with other responses counts for each of them."""
        turn = 0 if self.turn is None else sys.getsizeof(self.turn.text) + self.turn.ids.nbytes
        return len(self.body) + turn + 2 * self.item_bytes + _OBJECT_BYTES * len(self.items)


class ResponseStore:
    """By scope and rid (`Client.scope`): a client reads and replaces only responses of its own,
    in the namespace of the request."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[tuple[str, str], StoredResponse] = {}
        self._shares: ClientShares[tuple[str, str]] = ClientShares()
        """Scopes and rids of the responses; their sizes are bytes."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put_response(self, response: StoredResponse, client: str = "") -> None:
        """Store it, in place of one of the same rid, and forget others for it. The one that was put last stays, however
        large it is, and takes no client below an equal share of the room. client: the name of
        its client."""
        newest = response.scope, response.rid
        self.pop_response(*newest)
        self._stored[newest] = response
        self._shares.put_key(client, newest, response.size)
        self._bytes += response.size
        while len(self._stored) > self._max_responses:
            self.pop_response(*next(self._shares.in_order_of_forgetting()))
        while self._bytes > self._max_bytes:
            least = self._max_bytes // self._shares.num_clients
            forgettable = self._shares.in_order_of_forgetting(by_size=True, least=least)
            if (old := next((key for key in forgettable if key != newest), None)) is None:
                return
            self.pop_response(*old)

    def find_response(self, scope: str, rid: str) -> StoredResponse | None:
        return self._stored.get((scope, rid))

    def pop_response(self, scope: str, rid: str) -> StoredResponse | None:
        """The response, which is forgotten now."""
        response = self._stored.pop((scope, rid), None)
        if response is not None:
            self._shares.remove_key((scope, rid))
            self._bytes -= response.size
        return response
