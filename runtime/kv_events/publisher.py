"""Publishes changes of KV blocks for routers and other followers of this server's cache.

    tree ──BlockAnnouncer──▶ events of one turn ──▶ batch n ──PUB──▶ followers
                                                      └──▶ PastBatches ◀──ROUTER── followers that missed some

All of it runs in the worker's thread, between two steps. ZMQ's own thread sends, and drops messages that a follower
leaves unread, so that a follower that never reads delays no others.

The first batch of a start has the time as its number, in milliseconds since 1970. So a follower of an earlier server at
these addresses asks for a batch older than all that are kept, and gets a full snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ...radix.block_events import AllCleared, BlockAnnouncer, BlockEvent
from ...radix.cache import RadixCache
from ...radix.tiers.host_tier import HostTier
from ..config import KVEventConfig
from .endpoints import bind, event_block_tokens
from .replay import PastBatches, ReplayServer, replay_socket
from .wire import Packer, sequence_frame

MAX_BATCH_TOKENS = 1 << 14
"""Tokens in one batch, which is then less than 100 KB long."""

MAX_UNREAD = 1000
"""Batches that wait for one follower; it misses all further ones until it reads."""


class KVEventPublisher:
    """Owns the sockets and numbers the batches. `watch_cache` once, then `publish_events` once a turn."""

    def __init__(self, config: KVEventConfig, page_size: int, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises ModelLoadError if an address cannot be bound. wall_clock: seconds since 1970; its value now, in
        milliseconds, becomes the number of the first batch."""
        self.block_tokens = event_block_tokens(config, page_size)
        self._config = config
        self._wall_clock = wall_clock
        self._packer = Packer(self.block_tokens, config.kv_events_format)
        self._most_blocks = max(1, MAX_BATCH_TOKENS // self.block_tokens)
        self._topic = config.kv_events_topic.encode()
        self._next = int(wall_clock() * 1000)
        self._announcer: BlockAnnouncer | None = None
        self._past: PastBatches | None = None
        self._replay: ReplayServer | None = None
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # followers send topics, nothing else
        self.endpoint = bind(self._socket, config.kv_events_endpoint, "--kv-events-endpoint")
        self.replay_endpoint, router = "", None
        if config.kv_events_replay_endpoint:
            router = self._bind_replay(config)
            max_bytes = config.kv_events_buffer_mb * 2**20
            self._past = PastBatches(self._packer, self.block_tokens, max_bytes, wall_clock)
        self._send([AllCleared()])  # a follower of an earlier server forgets that one
        if router is not None and self._past is not None:  # only now is there a batch to answer with
            self._replay = ReplayServer(router, self._past, self._answer_topic())

    def _bind_replay(self, config: KVEventConfig) -> zmq.Socket:
        router = replay_socket()
        try:
            self.replay_endpoint = bind(router, config.kv_events_replay_endpoint, "--kv-events-replay-endpoint")
        except BaseException:
            self._socket.close(linger=0)
            raise
        return router

    def _answer_topic(self) -> bytes | None:
        """The topic frame of an answer to a follower that asks; None where answers have no such frame."""
        return self._topic if self._config.kv_events_format == "maps" else None

    def watch_cache(self, cache: RadixCache, tier: HostTier | None) -> None:
        """Publish the changes of this cache, which is still empty."""
        host_tokens = tier.allocator.total_tokens if tier is not None else 0
        if self._config.kv_events_tiers == "device":
            host_tokens = 0
        self._announcer = BlockAnnouncer(cache, self.block_tokens, host_tokens)

    def publish_events(self) -> None:
        """Send the events since the last call. Never waits."""
        if self._announcer is not None and (events := self._announcer.take_events()):
            for batch in self._packer.in_batches(events, self._most_blocks):
                self._send(batch)

    def _send(self, events: list[BlockEvent]) -> None:
        payload = self._packer.payload(events, self._wall_clock())
        number, self._next = self._next, self._next + 1
        if self._past is not None:
            self._past.add_batch(number, payload, events)
        self._socket.send_multipart([self._topic, sequence_frame(number), payload], zmq.NOBLOCK)

    def describe(self) -> dict:
        """The settings that a follower needs, for /server_info."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": self._config.kv_events_topic,
            "block_size": self.block_tokens,
            "tiers": self._config.kv_events_tiers,
            "format": self._config.kv_events_format,
        }

    def close(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._socket.close(linger=0)


def open_kv_events(config: KVEventConfig, page_size: int) -> KVEventPublisher | None:
    """The publisher that the settings ask for, if any. Raises ModelLoadError if an address cannot be bound."""
    return KVEventPublisher(config, page_size) if config.kv_events_endpoint else None
