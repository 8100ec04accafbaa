"""A host tier for a model with recurrent states, over memories that remember what each slot holds."""

from __future__ import annotations

import numpy as np

from baton.memory_pool.state_slots import StateSlots
from baton.radix.invariants import check_states
from baton.radix.node import StateKind
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.cache_rig import Running, int32
from tests.doubles.host_rig import TierRig
from tests.doubles.state_rig import StateRig, path_of


class StateTierRig(TierRig, StateRig):
    """As both, with ``host_states`` slots for states on the host."""

    def __init__(
        self,
        *,
        num_tokens: int = 256,
        page_size: int = 4,
        rows: int = 4,
        context: int = 256,
        states: int = 16,
        host_tokens: int = 512,
        host_states: int = 16,
        policy: HostPolicy | None = None,
    ) -> None:
        super().__init__(
            host_tokens, policy, num_tokens=num_tokens, page_size=page_size, rows=rows, context=context, states=states
        )
        self.host_slots = StateSlots(host_states, fences=self.allocator.fences, check=True)
        self.nodes.keep_on_host(self.host_slots)
        assert self.nodes.on_host is not None
        self.on_host = self.nodes.on_host
        self.host_states: list[tuple[str, bytes] | None] = [None] * (host_states + 1)

    def turn(self, ids: np.ndarray, kind: StateKind = StateKind.TURN_END) -> None:
        """A whole life: afterwards ``ids``, whole pages, are cached with their state."""
        running = self.start(ids)
        assert self.compute(running)
        self.finish_turn(running, kind)

    def end(self, fence: int, ok: bool = True) -> np.ndarray | None:
        copy = self.copies[fence]
        source, target = (self.states, self.host_states) if copy.to_host else (self.host_states, self.states)
        start, to = copy.device_state, copy.host_state
        if not copy.to_host:
            start, to = to, start
        if to:
            target[to] = source[start] if ok else ("rubbish", b"")
        return super().end(fence, ok)

    def load(self, ids: np.ndarray, namespace: str = "") -> int | None:
        match = self.cache.match_prefix(namespace, ids)
        if match.host_handle is None:
            return None
        lowest = self.cache.tree.last_on_device(match.host_handle)
        self.cache.lock(lowest)
        missing = self.tier.missing_tokens(match)
        if (short := missing - self.allocator.free_tokens) > 0:
            self.cache.evict(short)
        slots = self.allocator.alloc_extend(int32(0), int32(missing), int32(0))
        state = self.take_state()
        self.cache.unlock(lowest)
        assert slots is not None and state is not None
        copy = self.tier.load_match(match, slots, state)
        self.copies[copy.fence] = copy
        return copy.fence

    def start(self, ids: np.ndarray, namespace: str = "", priority: int = 0) -> Running:
        match = self.cache.match_prefix(namespace, ids[:-1])
        assert match.host_handle is None or not self.copies
        return super().start(ids, namespace, priority)

    def check(self) -> None:
        super().check()
        check_states(self.cache, [running.kv for running in self.running])
        for node in self.cache.tree.nodes():
            copies = [each.copy for each in self.tier.under_way.values() if each.node is not None]
            storing = any(copy.to_host and copy.host_state == node.host_state for copy in copies)
            if self.cache.tree.is_hidden(node):
                continue
            if node.state and not node.state_loading:
                assert self.states[node.state] == path_of(self, node), node
            if node.host_state and not storing:
                assert self.host_states[node.host_state] == path_of(self, node), node
