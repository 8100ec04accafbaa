"""The jobs of conversations that share a name, such as a ``prompt_cache_key`` or a ``user``.

    name + first message of the user     key:9f0c…       the first such conversation
                                         key:9f0c…-2     the second: a new opening while the first is recorded

A chat that continues a recorded turn has that turn's job and is not looked up here. An opening, a chat without an
answer, is a new conversation. What is left are chats that went on elsewhere, or that their program has edited: such a
chat belongs to the recorded conversation that begins with the most of its messages.

Only digests of messages are kept, for a bounded number of conversations; the client that has most of them loses its
oldest first. A conversation that is forgotten becomes a new job.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from ...scheduler.client_shares import ClientShares
from .messages import Conversation, Message
from .prefix_rules import without_volatile_texts

MAX_CONVERSATIONS = 4096
"""As many jobs as the scheduler keeps by default."""

MAX_MESSAGES = 64
"""First messages of a conversation that are compared."""

_BYTES = 8
"""Length of a message's digest."""

_Key = tuple[str, str, bytes]
"""Scope, name, and the digest of the first message."""


@dataclass(frozen=True, slots=True)
class Opening:
    """digests: of the first messages of a conversation, from the first of the user on, 8 bytes each. is_new: it has no
    answer yet."""

    digests: bytes
    is_new: bool

    @property
    def first(self) -> bytes:
        return self.digests[:_BYTES]


def opening_of(conversation: Conversation) -> Opening:
    """System messages do not count: their first line may be a date, or a counter. Nor do such texts of the user."""
    messages = without_volatile_texts(conversation.messages[: len(conversation.messages) - conversation.goes_on])
    start = next((number for number, each in enumerate(messages) if each["role"] == "user"), 0)
    counted = [each for each in messages[start:] if each["role"] != "system"][:MAX_MESSAGES]
    is_new = not any(each["role"] == "assistant" for each in messages)
    return Opening(b"".join(_digest(each) for each in counted).ljust(_BYTES, b"\0"), is_new)


def _digest(message: Message) -> bytes:
    """Digest what a client sends again unchanged: no thoughts, which some programs drop, and no ids of calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    try:
        said = repr((message["role"], message.get("content"), calls))
    except RecursionError:  # arguments that are nested too deeply
        said = repr((message["role"], message.get("content"), len(calls)))
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()


@dataclass(slots=True)
class _Conversations:
    """Those with one name and first message. count: how many there have been. digests: by job, the last used last."""

    count: int = 0
    digests: OrderedDict[str, bytes] = field(default_factory=OrderedDict)


class NamedJobs:
    """Used on the server's loop only."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._known: dict[_Key, _Conversations] = {}
        self._shares: ClientShares[tuple[_Key, str]] = ClientShares()

    def __len__(self) -> int:
        return len(self._shares)

    def find_job(self, scope: str, name: str, opening: Opening, client: str = "") -> str:
        """The job of a chat that continues no recorded turn. scope: its client and namespace (`Client.scope`). client:
        the name of the client."""
        key = scope, name, opening.first
        known = self._known.get(key)
        job_id = None if opening.is_new or known is None else _nearest(known.digests, opening.digests)
        if job_id is None:
            count = known.count + 1 if known is not None else 1
            job_id = f"{name}:{opening.first.hex()}" + (f"-{count}" if count > 1 else "")
        self.record_chat(scope, name, opening, job_id, client)
        return job_id

    def record_chat(self, scope: str, name: str, opening: Opening, job_id: str, client: str = "") -> None:
        """Note the messages of a chat of this job."""
        key = scope, name, opening.first
        known = self._known.setdefault(key, _Conversations())
        known.count += job_id not in known.digests
        known.digests[job_id] = opening.digests
        known.digests.move_to_end(job_id)
        self._shares.put_key(client, (key, job_id))
        while len(self._shares) > self._max:
            self._forget(*next(self._shares.in_order_of_forgetting()))

    def _forget(self, key: _Key, job_id: str) -> None:
        self._shares.remove_key((key, job_id))
        known = self._known[key]
        del known.digests[job_id]
        if not known.digests:
            del self._known[key]


def _nearest(conversations: OrderedDict[str, bytes], digests: bytes) -> str | None:
    """The conversation that has most of the first messages in common; of equals the last used. All have the first: if
    several have no more than that, there is no telling, and it is none of them."""
    best, best_shared, better = None, 0, digests[:_BYTES]
    for job_id, known in reversed(conversations.items()):
        if known.startswith(better):  # thousands may begin alike: messages are counted only where one is nearer
            best, best_shared = job_id, _shared(known, digests)
            if best_shared * _BYTES == len(digests):
                break
            better = digests[: (best_shared + 1) * _BYTES]
    return best if best_shared > 1 or len(conversations) == 1 else None


def _shared(one: bytes, other: bytes) -> int:
    """The number of first messages that are the same."""
    most = min(len(one), len(other)) // _BYTES
    for number in range(most):
        place = slice(number * _BYTES, (number + 1) * _BYTES)
        if one[place] != other[place]:
            return number
    return most
