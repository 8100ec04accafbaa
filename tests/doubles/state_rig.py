"""A cache rig for models with recurrent states: each slot remembers whose state it holds, as each slot of the KV pool
does.

A sequence that gets slots for more tokens writes a state of its new length, and others on its way if asked to.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.memory_pool.state_slots import StateSlots
from baton.radix.cuts import fork_sequence, truncate
from baton.radix.invariants import Account, check_states
from baton.radix.node import StateKind, TreeNode
from baton.radix.node_states import TURNS_KEPT, NodeStates
from baton.radix.sequence_states import HeldState
from tests.doubles.cache_rig import CacheRig, Running


class StateRig(CacheRig):
    """There must be slots for two states of each row."""

    def __init__(self, num_tokens: int, page_size: int, rows: int, context: int, states: int) -> None:
        super().__init__(num_tokens, page_size, rows, context)
        assert states >= 2 * rows
        self.slots = StateSlots(states, fences=self.allocator.fences, check=True)
        self.nodes = self.cache.states = NodeStates(self.slots, page_size)
        self.states: list[tuple[str, bytes] | None] = [None] * (states + 1)
        """By slot: namespace, and id bytes of the tokens that its state is of."""

    def extend(self, running: Running, length: int, points: Sequence[int] = (), in_place: bool = False) -> bool:
        """Slots up to ``length``, evicting if need be; False if there is no room. points: lengths on the way whose
        states are kept where slots are free. in_place: write over the newest state where no other holder names it."""
        kv = running.kv
        old = kv.states.newest
        if not super().extend(running, length):
            return False
        target = old.slot if in_place and old is not None and not self.slots.is_shared(old.slot) else self.take_state()
        assert target is not None
        outs = [HeldState(slot, point) for point in points if (slot := self.slots.take()) is not None]
        kv.states.write([*outs, HeldState(target, length)])
        return True

    def take_state(self) -> int | None:
        """A slot, evicting if need be."""
        slot = self.slots.take()
        if slot is None and self.cache.evict_states(1, kept_too=True):
            slot = self.slots.take()
        return slot

    def compute(self, running: Running, length: int | None = None) -> bool:
        before = running.committed
        if not super().compute(running, length):
            return False
        for state in running.kv.states.held:
            if before < state.length <= running.committed:
                self.states[state.slot] = self._state(running, state.length)
        return True

    def settle(self, running: Running) -> None:
        """Give up the states that the sequence has no use for."""
        running.kv.states.prune(self.slots, running.committed, self.cache.page_size)

    def leave(self, running: Running, kind: StateKind) -> None:
        """Put the committed tokens into the tree, and the newest state that fits."""
        self.publish(running)
        self.cache.leave_state(running.kv, running.kv.open_node(), kind)

    def finish_turn(
        self, running: Running, kind: StateKind, fence: int | None = None, turns_kept: int = TURNS_KEPT
    ) -> None:
        self.running.remove(running)
        ids = running.ids[: running.committed]
        self.cache.cache_finished_req(running.kv, ids, fence=fence, kind=kind, turns_kept=turns_kept)

    def cut(self, running: Running, length: int, fence: int | None = None) -> None:
        """Go back to ``length`` tokens, or to the last state before."""
        truncate(self.cache, running.kv, length, fence=fence)
        running.committed = running.kv.length

    def fork(self, running: Running) -> Running | None:
        """A second sequence with all committed tokens; None if there is no room, or no state of them."""
        row = self.pool.alloc()
        assert row is not None
        forked = fork_sequence(self.cache, running.kv, running.committed, row)
        if forked is None:
            self.pool.free(row)
            return None
        kv, source, target = forked
        for slot, other in zip(source.tolist(), target.tolist()):
            self.kv[other] = self.kv[slot]
        fork = Running(kv, running.ids, running.committed)
        self.running.append(fork)
        return fork

    def close(self, fence: int) -> int:
        freed = super().close(fence)
        self.slots.release_quarantine()
        return freed

    def verify(self) -> Account:
        """Also that each state is of the tokens that its holder says."""
        account = super().verify()
        check_states(self.cache, [running.kv for running in self.running])
        for node in self.nodes.nodes():
            assert self.states[node.state] == path_of(self, node), node
        for running in self.running:
            for state in running.kv.states.held:
                if state.length <= running.committed:
                    assert self.states[state.slot] == self._state(running, state.length), (running, state)
        return account

    @staticmethod
    def _state(running: Running, length: int) -> tuple[str, bytes]:
        return running.kv.namespace, running.ids[:length].tobytes()


def path_of(rig: CacheRig, node: TreeNode) -> tuple[str, bytes]:
    """Namespace and id bytes of all tokens up to the end of a node that is not hidden."""
    keys: list[bytes] = []
    last = node
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return rig.cache.tree.namespace_of(last), b"".join(reversed(keys))
