"""The host tier: copies of nodes in a second pool, made while the nodes are on the device, read when they have left it.

    inserted ──▶ wanted ──next_stores──▶ being stored ──finish_copy──▶ stored ──evict──▶ no copy
                                            │ failed: no copy
    evicted from the device with a copy: stays in the tree ──load_match──▶ being loaded ──finish_copy──▶ on the device

This class decides and counts; `TierCopy` describes a copy, the owner of the tensors makes it, and `finish_copy` takes
its result. Nothing here waits. While a copy is under way:

- its nodes are locked on the device, so that the slots it reads or writes stay theirs, even if the request for which it
  was made ends;
- its slots on the host, if they are freed, wait for its fence;
- a copy to the host does not count yet: no match finds it, and if it fails, it is dropped with all copies below it.

Only what `RadixCache` has in the tree is ever stored: committed tokens, in whole pages. KV that is marked as not
reusable is not stored, unless a match ends there all the same.

For models with recurrent states, a node's state is stored with its KV, or by itself where the node gets it later: so a
node has a state on the host only if its KV is there. A load brings the state of the last node, and no other; where only
that has left the device, it brings nothing else. A copy under way names the slots of its states, on both tiers: no step
writes them, and nothing takes them. When states run short, there is no time to copy one first: so where KV is stored
only when it leaves the device, a node whose state is to be kept is stored at once all the same, with its path.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from ...memory_pool.allocator import Allocator
from ...memory_pool.state_slots import StateSlots
from ..cache import LEAST_REST, MatchResult, RadixCache
from ..discarding import drop_path
from ..kv_sequence import NUM_ENDS, SequenceEnd
from ..node import StateKind, TreeNode
from ..node_states import NodeStates, TierStates

MAX_WANTED = 1 << 14
"""Nodes that may wait to be stored; where copies are slower than the model, the oldest are given up."""


@dataclass(slots=True, frozen=True)
class TierCopy:
    """KV, or a recurrent state, or both, to be copied between device and host. Plain data."""

    fence: int
    """Open until `HostTier.finish_copy`."""
    to_host: bool
    device_slots: np.ndarray
    """int32 [n], whole pages."""
    host_slots: np.ndarray
    """int32 [n], whole pages."""
    device_state: int = 0
    """Slot of a recurrent state on the device; 0 for none."""
    host_state: int = 0
    """Its slot on the host; 0 for none."""


@dataclass(slots=True, frozen=True)
class UnderWay:
    """A copy and its nodes: from the one that ends there up to where it begins, also if they are split meanwhile."""

    copy: TierCopy
    node: TreeNode | None
    """None if the tree has been given up since."""
    start: int
    leaving: int = 0
    """Tokens that will leave the device when it has ended."""


@dataclass(slots=True)
class HostCounts:
    """Tokens, and states, since start."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    no_room: int = 0
    """Not stored, because the host's pool had no room that could be taken."""
    stored_states: int = 0
    loaded_states: int = 0
    evicted_states: int = 0
    no_room_states: int = 0


@dataclass(slots=True, frozen=True)
class HostPolicy:
    """When a node is stored."""

    min_hits: int = 0
    """Matches that must have ended there; 0: it is stored as soon as it is computed."""
    write_back: bool = False
    """Only when it has to leave the device."""
    max_storing: int = 4096
    """Most tokens on their way to the host at a time. Nodes that have to leave the device do not wait for that."""


class LowerTier(Protocol):
    """The interface of a tier behind the host, which reads the host's copies and brings others."""

    def copy_stored(self, node: TreeNode) -> None:
        """A node has a copy on the host now."""
        ...

    def state_kept(self, node: TreeNode) -> None:
        """A node with a copy of its state on the host is to keep it; perhaps it was not to before."""
        ...

    def path_used(self, node: TreeNode) -> None:
        """The path down to this node is in use, whatever tier it is on."""
        ...

    def fences_reading(self, slots: np.ndarray) -> list[int]:
        """Fences of all orders that read some of these host slots, int32 [n]."""
        ...

    @property
    def incoming_slots(self) -> list[np.ndarray]:
        """Host slots, int32 [n] each, that it fills and that belong to no node yet."""
        ...

    @property
    def fences(self) -> set[int]:
        """Of all orders that are under way."""
        ...

    @property
    def named_states(self) -> list[int]:
        """Slots of recurrent states on the host that orders under way name, each as often as they do."""
        ...

    def detach_orders(self) -> list[tuple[int, np.ndarray]]:
        """The tree is dropped. Returns the fence and the host slots, int32 [n], of all orders that still run."""
        ...


class HostTier:
    """A residency that keeps KV that leaves the device, if it was stored before (write-through).

    allocator: numbers the host pool's slots; shares its fences with the device's allocator. states: slots of the host's
    pool of recurrent states; None if it keeps none.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: Allocator,
        policy: HostPolicy | None = None,
        states: StateSlots | None = None,
    ) -> None:
        if allocator.fences is not cache.allocator.fences or allocator.page_size != cache.page_size:
            raise ValueError("the host's allocator must share fences and page size with the device's")
        self.allocator = allocator
        self.policy = policy or HostPolicy()
        self.counts = HostCounts()
        self.tokens = 0
        """Tokens of nodes that have a copy, or are being stored."""
        self.order = HostOrder()
        self._cache = cache
        self._wanted: deque[TreeNode] = deque(maxlen=MAX_WANTED)
        self.under_way: dict[int, UnderWay] = {}
        """Copies that have not ended, by fence."""
        self.below: list[LowerTier] = []
        """The tiers behind the host."""
        self._ready: list[TierCopy] = []
        """Stores of what has to leave the device, to be made now."""
        self._storing = 0
        self.leaving_tokens = 0
        if states is not None:
            assert cache.states is not None, "the model has no states"
            cache.states.keep_on_host(states)
        self._least_rest = max(allocator.page_size, min(LEAST_REST, allocator.total_tokens // 256))

    # -- as a residency -----------------------------------------------------------------------------------------------

    def node_inserted(self, node: TreeNode) -> None:
        if node.host is None and self.policy.min_hits == 0 and not self.policy.write_back:
            self._wanted.append(node)

    def node_accessed(self, node: TreeNode) -> None:
        if node.parent is None:
            return
        for tier in self.below:
            tier.path_used(node)
        if node.host is not None or self.policy.write_back:
            return
        node.hits += 1
        if node.hits >= self.policy.min_hits:  # again, where there was no room, or it had been released
            self._wanted.append(node)

    def state_put(self, node: TreeNode) -> None:
        if self.states_on_host is None:
            return
        if node.host_state:
            for tier in self.below if node.state_kind > StateKind.PASSING else ():
                tier.state_kept(node)
            return
        if node.host is not None or (self.policy.write_back and node.state_kind > StateKind.PASSING):
            self._wanted.append(node)  # else its state is stored with its KV

    def path_demoted(self, node: TreeNode) -> None:
        if node.host is None and node.parent is not None:
            node.demoted = True  # a flag for `keeps`, in case memory is needed before the copy is made
            if not self.policy.write_back:
                self._wanted.append(node)

    def keeps(self, node: TreeNode) -> bool:
        wanted = node.demoted or (self.policy.write_back and not _is_released(node))
        return wanted and node.host is None and self._cache.tree.reachable(node) is node

    def copy_leaving(self, nodes: Sequence[TreeNode]) -> Sequence[TreeNode]:
        homeless: list[TreeNode] = []
        for node in nodes:
            for upper in self._cache.tree.without_copy(node):
                copy = self._store(upper, leaving=len(node) if upper is node else 0)
                if copy is None:
                    break
                self._ready.append(copy)
            if node.host is None:
                homeless.append(node)
        return homeless

    def promised_tokens(self, node: TreeNode) -> int:
        """Tokens on the path down to a node that are stored or being stored, or, if the path is demoted, will be before
        they leave the device. Later they are evicted like all others, least recently used first."""
        tree = self._cache.tree
        if tree.reachable(node) is not node:
            return 0
        missing = self._cache.tree.without_copy(node)
        if not missing or node.prefix_len <= self.allocator.total_tokens:
            return node.prefix_len
        return missing[0].prefix_len - len(missing[0])

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return [victim for victim in victims if victim.host is None]

    def drop_copies(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            if node.host is not None:
                self._give_up(node)

    def holders(self) -> Sequence[TreeNode]:
        return [under_way.node for under_way in self._attached if under_way.node is not None]

    def named_states(self) -> Sequence[int]:
        return [each.copy.device_state for each in self._attached if each.copy.device_state]

    @property
    def _attached(self) -> list[UnderWay]:
        """Copies under way whose tree has not been given up."""
        return [under_way for under_way in self.under_way.values() if under_way.node is not None]

    @property
    def states_on_host(self) -> TierStates | None:
        """The states that nodes have here; None if it keeps none."""
        return self._cache.states.on_host if self._cache.states is not None else None

    @property
    def _node_states(self) -> NodeStates:
        assert self._cache.states is not None
        return self._cache.states

    def detach_copies(self) -> Sequence[tuple[int, np.ndarray]]:
        copies = [under_way.copy for under_way in self.under_way.values()]
        self.under_way = {copy.fence: UnderWay(copy, None, 0) for copy in copies}
        self.leaving_tokens = 0
        self._start_afresh()
        if (states := self.states_on_host) is not None:
            states.slots.reset(sorted(self._fences))
        return [(copy.fence, copy.device_slots) for copy in copies]

    def _start_afresh(self) -> None:
        """All of the host is free again, but for what orders under way still read or write."""
        going_on = [(under_way.copy.fence, under_way.copy.host_slots) for under_way in self.under_way.values()]
        for tier in self.below:
            going_on += tier.detach_orders()
        self.allocator.reset(going_on)
        self._wanted.clear()
        self.order.clear()
        self.tokens = 0

    @property
    def _fences(self) -> set[int]:
        """Of all copies under way, and of all orders of the tiers behind."""
        return {*self.under_way, *(fence for tier in self.below for fence in tier.fences)}

    # -- a damaged pool -----------------------------------------------------------------------------------------------

    @property
    def unaccounted_tokens(self) -> int:
        """Tokens that all owners fall short of the host's pool; negative if they exceed it; 0 when all is well."""
        coming = sum(len(slots) for tier in self.below for slots in tier.incoming_slots)
        free, waiting = self.allocator.free_tokens, self.allocator.quarantined_tokens
        return self.allocator.total_tokens - free - waiting - self.tokens - coming

    def state_names(self) -> Counter[int]:
        """How many nodes, copies, and orders of the tiers behind name each slot of the host's states."""
        named = [each.copy.host_state for each in self._attached]
        named += [slot for tier in self.below for slot in tier.named_states]
        nodes = self.states_on_host.nodes if self.states_on_host is not None else ()
        return Counter([slot for slot in (*named, *nodes) if slot])

    @property
    def states_add_up(self) -> bool:
        """False if a slot of the host's states is nowhere, or if another number of holders name it than is counted."""
        if self.states_on_host is None:
            return True
        slots, names = self.states_on_host.slots, self.state_names()
        counts = np.zeros(slots.total + 1, dtype=np.int64)
        counts[list(names)] = list(names.values())
        is_gone = np.concatenate([slots.free_slots(), slots.quarantined_slots()])
        adds_up = len(is_gone) + slots.held == slots.total and not counts[is_gone].any()
        return bool(adds_up and (counts == slots.refs).all())

    def recount(self) -> None:
        """Derive all counts, and the order of eviction, from the tree and the copies under way: for the time after an
        exception that left an operation half done."""
        nodes = [node for node in self._cache.tree.nodes() if node.host is not None]
        self.tokens = sum(map(len, nodes))
        self._storing = sum(len(each.copy.host_slots) for each in self.under_way.values() if each.copy.to_host)
        self.leaving_tokens = sum(each.leaving for each in self.under_way.values())
        self.order.clear()
        for node in nodes:
            self.may_be_leaf(node)
        self._recount_states()

    def _recount_states(self) -> None:
        if (states := self.states_on_host) is not None:
            states.slots.rebuild(self.state_names(), sorted(self._fences))

    def discard_copies(self) -> None:
        """Forget every copy, because the owners of the host's pages are no longer known. The device keeps its KV."""
        tree = self._cache.tree
        gone = [node for node in tree.nodes() if node.host is not None][::-1]
        for node in gone:
            self._cache.watchers.copy_removed(node)
        if self._cache.states is not None:
            for node in gone:
                self._cache.states.remove_from_host(node)
        for node in (*gone, tree.root):
            node.host, node.storing, node.host_children = None, 0, 0
        tree.remove_leaves([node for node in gone if not node.on_device])
        self._start_afresh()
        self._recount_states()

    # -- to the host --------------------------------------------------------------------------------------------------

    def next_stores(self) -> list[TierCopy]:
        """The copies to be made now. Parents go before their children."""
        while self._wanted and self._storing < self.policy.max_storing:
            node = self._wanted.popleft()
            if not node.on_device or self._cache.tree.reachable(node) is not node:
                continue  # it has left the device or the tree, or is hidden
            if _is_released(node) and not node.demoted:
                continue
            missing = self._cache.tree.without_copy(node)  # none, if it was stored with a child
            for upper in missing:
                copy = self._store(upper)
                if copy is None:
                    break
                self._ready.append(copy)  # at once: an exception further on must not lose it
            if not missing and (slot := self._take_state_for(node)):
                self._ready.append(self._begin_store(node, np.empty(0, dtype=np.int32), slot))
        copies, self._ready = self._ready, []
        return copies

    def _store(self, node: TreeNode, leaving: int = 0) -> TierCopy | None:
        parent = node.parent
        assert parent is not None
        slots = self.allocate(len(node))
        if slots is None:
            self.counts.no_room += len(node)
            return None
        if parent is not self._cache.tree.root and parent.host is None:
            self.allocator.free(slots)  # the parent's copy was what had to give way
            self.counts.no_room += len(node)
            return None
        state = self._take_state_for(node)
        node.host, node.demoted = slots, False
        parent.host_children += 1
        self.tokens += len(node)
        return self._begin_store(node, slots, state, leaving)

    def _begin_store(self, node: TreeNode, slots: np.ndarray, state: int, leaving: int = 0) -> TierCopy:
        """slots: int32 [tokens] on the host for the KV of the node, which has none there yet; empty to store its state
        alone. state: slot on the host for its state; 0 not to store it."""
        fence = self.allocator.fences.open_fence()
        self._storing += len(slots)
        self.leaving_tokens += leaving
        self._cache.lock(node)
        kv = node.value.copy() if len(slots) else slots
        if len(slots):
            node.storing = fence
        if state:
            self._node_states.slots.share(node.state)
            self._node_states.put_on_host(node, state)
        copy = TierCopy(fence, True, kv, slots.copy(), node.state if state else 0, state)
        self.under_way[fence] = UnderWay(copy, node, node.prefix_len - len(slots), leaving)
        return copy

    def _take_state_for(self, node: TreeNode) -> int:
        """A slot on the host for a node's state, which the copy names; evicts if need be. 0 if there is no room, or
        nothing to store."""
        if self.states_on_host is None or not node.state or node.host_state:
            return 0
        return self.take_state()

    def take_state(self) -> int:
        """A slot on the host for a state, which the caller alone names; evicts if need be. 0 if there is no room."""
        states = self.states_on_host
        assert states is not None, "the host keeps no states"
        slot = states.slots.take()
        if slot is None and (victim := self._node_states.evict_from_host()) is not None:
            self.counts.evicted_states += 1
            self._note_useless(victim)
            slot = states.slots.take()
        self.counts.no_room_states += slot is None
        return slot or 0

    def _note_useless(self, node: TreeNode) -> None:
        """A node has lost its state here: if no other lies behind its KV, that goes before all else."""
        self._cache.mark_useless(node)
        if not node.last_access and HostOrder.is_leaf(node):
            self.order.push_first(node)

    def allocate(self, tokens: int) -> np.ndarray | None:
        """Host slots, int32 [tokens]; evicts if need be. None if there is no room."""
        if tokens > self.allocator.total_tokens or self.make_room(tokens) < tokens:
            return None
        none = np.zeros(1, dtype=np.int32)
        return self.allocator.alloc_extend(none, np.array([tokens], dtype=np.int32), none)

    def make_room(self, tokens: int, kept: TreeNode | None = None) -> int:
        """Evict until ``tokens`` tokens are free, or nothing is left to evict; how many of them are. kept: the copies
        of the path down to this node stay."""
        if kept is not None:
            kept.host_children += 1  # as if there were one more copy below it
        while (short := tokens - self.allocator.free_tokens) > 0 and self.evict(short):
            pass  # what is being read by a tier behind is not free at once
        if kept is not None:
            kept.host_children -= 1
            self.may_be_leaf(kept)
        return min(tokens, self.allocator.free_tokens)

    # -- back to the device -------------------------------------------------------------------------------------------

    def missing_tokens(self, match: MatchResult) -> int:
        """Tokens of a match whose KV is on the host only; the others that it has there need but their state."""
        assert match.host_handle is not None
        return match.host_handle.prefix_len - self._cache.tree.last_on_device(match.host_handle).prefix_len

    def can_load(self, match: MatchResult) -> bool:
        """False if what is on the host of a match had to give way to what was stored since."""
        node = match.host_handle
        return node is not None and node.parent is not None and (self._cache.states is None or node.has_state)

    def load_match(self, match: MatchResult, slots: np.ndarray, state: int = 0) -> TierCopy:
        """Bring the host part of a match to the device. From now on its nodes count as on the device for all requests,
        but a step that reads them must wait for the copy.

        slots: int32 [`missing_tokens`], the caller's, whole pages; they belong to the tree afterwards. state: slot on
        the device for the recurrent state of the last node, which the caller alone names; 0 if that needs none. The
        copy names it in the caller's place.
        """
        node = match.host_handle
        assert node is not None and len(slots) == self.missing_tokens(match) and (state or len(slots))
        fence = self.allocator.fences.open_fence()
        beginning = node.prefix_len - len(slots)
        nodes = self._cache.tree.path(node, beginning)
        host_slots = np.concatenate([slots[:0], *(node.host for node in nodes if node.host is not None)])
        assert len(host_slots) == len(slots)
        start = 0
        for missing in nodes:
            self._cache.put_on_device(missing, slots[start : start + len(missing)].copy())
            missing.loading = fence
            start += len(missing)
        self._cache.lock(node)
        if state:
            assert self.states_on_host is not None and node.host_state
            self.states_on_host.slots.share(node.host_state)
            node.state_loading = fence
            self._node_states.put(node, state, node.state_kind)
        copy = TierCopy(fence, False, slots, host_slots, state, node.host_state if state else 0)
        self.under_way[fence] = UnderWay(copy, node, beginning)
        return copy

    # -- the end of a copy --------------------------------------------------------------------------------------------

    def finish_copy(self, fence: int, ok: bool) -> TierCopy | None:
        """A copy has been made, or has failed. Returns a failed load: its slots on the device hold nothing valid, so
        the caller must end their use; the nodes, or the state, have left the reachable tree."""
        ended = self.under_way.pop(fence)
        copy, node = ended.copy, ended.node
        self.leaving_tokens -= ended.leaving
        self._storing -= len(copy.host_slots) if copy.to_host else 0
        self._count(copy, ok)
        if node is not None:
            if copy.device_state:
                self._settle_state(node, copy, trusted=ok)
            self._settle(node, ended.start, copy, trusted=ok)
        self.allocator.fences.close_fence(fence)
        self.release_quarantine()
        self._cache.allocator.release_quarantine()
        if self._cache.states is not None:
            self._cache.states.slots.release_quarantine()
        return None if ok or copy.to_host or node is None else copy

    def release_quarantine(self) -> None:
        """Free what waits for closed fences only, on the host."""
        self.allocator.release_quarantine()
        if (states := self.states_on_host) is not None:
            states.slots.release_quarantine()

    def _count(self, copy: TierCopy, ok: bool) -> None:
        counts, tokens, states = self.counts, len(copy.host_slots), int(copy.host_state > 0)
        if not ok:
            counts.failed_stores += tokens if copy.to_host else 0
            counts.failed_loads += 0 if copy.to_host else tokens
        elif copy.to_host:
            counts.stored, counts.stored_states = counts.stored + tokens, counts.stored_states + states
        else:
            counts.loaded, counts.loaded_states = counts.loaded + tokens, counts.loaded_states + states

    def _settle_state(self, node: TreeNode, copy: TierCopy, *, trusted: bool) -> None:
        """The copy names no states any more; what it was to write is gone if it failed."""
        node.state_loading = 0 if node.state_loading == copy.fence else node.state_loading
        if not trusted and node.host_state == copy.host_state:
            self._node_states.remove_from_host(node)
        if not trusted and not copy.to_host and node.state == copy.device_state:
            self._cache.remove_state(node)
        assert self.states_on_host is not None
        self.states_on_host.slots.drop(copy.host_state)
        self._node_states.slots.drop(copy.device_state)

    def _settle(self, node: TreeNode, start: int, copy: TierCopy, *, trusted: bool) -> None:
        """Note that the nodes from position ``start`` down to ``node`` are copied, or that they cannot be trusted."""
        nodes, fence = self._cache.tree.path(node, start), copy.fence
        made = [copied for copied in nodes if copied.storing == fence]  # the others were given up meanwhile
        for copied in nodes:
            copied.storing = 0 if copied.storing == fence else copied.storing
            copied.loading = 0 if copied.loading == fence else copied.loading
        if not trusted and nodes:
            if copy.to_host:
                self._forget_below(nodes[0])
            else:
                drop_path(self._cache, node, start)
        for copied in nodes:
            self.may_be_leaf(copied)
        self._cache.unlock(node)
        if trusted and copy.to_host:
            for copied in made:
                self._cache.watchers.copy_made(copied)
            for tier in self.below:
                tier.copy_stored(node)

    def _forget_below(self, top: TreeNode) -> None:
        """Give up the copies of a node and of all below it: no copy is without its parent's."""
        nodes = [node for node in self._cache.tree.nodes(top) if node.host is not None][::-1]
        self.drop_copies(nodes)
        self._cache.tree.remove_leaves([node for node in nodes if not node.on_device])

    # -- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` tokens of the host, least recently used leaves first. Returns what was freed:
        less if the rest is being copied."""
        freed = 0
        while freed < num_tokens and (node := self.order.pop()) is not None:
            rest = len(node) - (num_tokens - freed)
            if rest >= self._least_rest and not node.host_state:  # without its last token that would be of no use
                self._cache.tree.split(node, rest // self._cache.page_size * self._cache.page_size)
            freed += len(node)  # the object stays the lower part
            parent = node.parent
            assert parent is not None
            self._give_up(node)
            if not node.on_device:
                self._cache.tree.remove_leaves([node])
                parent.last_access = max(parent.last_access, node.last_access)
        self.counts.evicted += freed
        return freed

    def _give_up(self, node: TreeNode) -> None:
        """Free the copy of a node. A copy from or to it that is under way still has its slots."""
        assert node.host is not None and node.parent is not None
        fences = [fence for fence in (node.storing, node.loading) if fence]
        for tier in self.below:
            fences += tier.fences_reading(node.host)
        self._cache.watchers.copy_removed(node)
        self.allocator.quarantine(node.host, fences)
        if self._cache.states is not None:
            self._cache.states.remove_from_host(node)
        node.host, node.storing = None, 0
        self.tokens -= len(node)
        node.parent.host_children -= 1
        self.may_be_leaf(node.parent)
        self._cache.mark_useless(node)

    def took_copy(self, node: TreeNode) -> None:
        """A node got a copy from elsewhere."""
        self.tokens += len(node)
        self._cache.watchers.copy_made(node)
        self.may_be_leaf(node)

    def took_state(self, node: TreeNode, slot: int) -> None:
        """A node with a copy here got its state from elsewhere, in this slot of the host."""
        self._node_states.adopt_on_host(node, slot)

    def has_whole_state(self, node: TreeNode) -> bool:
        """True if a node has a copy of its state here, and none is being made."""
        slot = node.host_state
        return slot > 0 and not any(each.copy.to_host and each.copy.host_state == slot for each in self._attached)

    def may_be_leaf(self, node: TreeNode) -> None:
        if HostOrder.is_leaf(node):
            self.order.push_leaf(node)


def _is_released(node: TreeNode) -> bool:
    """True if the KV of a node is marked as not reusable, and has not been accessed since."""
    return not node.last_access and node.retired_end > 0 and node.retired_end % NUM_ENDS == SequenceEnd.RELEASED


class HostOrder:
    """Owns the entries. Every node that may be evicted from the host has one, with a time not later than its access."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._listed: set[int] = set()
        """Serials of nodes that have an entry."""

    def __len__(self) -> int:
        return len(self._heap)

    @staticmethod
    def is_leaf(node: TreeNode) -> bool:
        """True if its copy may be evicted: no node below it has a copy, and none is being made of it or from it."""
        return node.host is not None and not (node.host_children or node.storing or node.loading)

    def has(self, node: TreeNode) -> bool:
        return node.serial in self._listed

    def push_leaf(self, node: TreeNode) -> None:
        if node.serial not in self._listed:
            self._listed.add(node.serial)
            heappush(self._heap, (node.last_access, node.serial, node))

    def push_first(self, node: TreeNode) -> None:
        """As `push_leaf`, for a node that is to go before the time of the entry that it may have."""
        self._listed.add(node.serial)
        heappush(self._heap, (0, node.serial, node))

    def pop(self) -> TreeNode | None:
        """The least recently used leaf, without its entry; None if there is none."""
        while self._heap:
            time, serial, node = heappop(self._heap)
            if not self.is_leaf(node):
                self._listed.discard(serial)
            elif node.last_access > time:
                heappush(self._heap, (node.last_access, serial, node))
            else:
                self._listed.discard(serial)
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._listed.clear()
