"""The device memory of one sequence. A request, a lease and the trunk of a beam search each have one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from .node import TreeNode
from .sequence_states import SequenceStates


class SequenceEnd(IntEnum):
    """How a sequence ended that held KV."""

    FINISHED = 0
    """Its request ended or was retracted, or its lease broke because the memory was needed."""
    EXPIRED = 1
    """It was under a lease, which ran out."""
    RELEASED = 2
    """It was given up: its lease was released, or its KV was marked as not reusable (discarding.py)."""


NUM_ENDS = len(SequenceEnd)


@dataclass(slots=True)
class KVSequence:
    """Everything one sequence holds on the device. The holder of this object owns all of it: handing it on is O(1)."""

    namespace: str
    row: int
    """Row in req_to_token; -1 once closed."""
    node: TreeNode | None
    """The last tree node of the sequence; the sequence holds one direct lock on it. None once closed."""
    tree_len: int
    """row[:tree_len] belongs to the tree and is protected by that lock; a multiple of page_size."""
    length: int
    """row[:length] has slots; the pages of row[tree_len:length] are private to this sequence. The code that allocates
    slots for the sequence updates this."""
    turn: int = field(default=1, compare=False)
    """How many requests one after the other led to what it computes; see `TreeNode.turn`."""
    priority: int = field(default=0, compare=False)
    """The priority of its request; nodes that it inserts into the tree get at least this."""
    client: str = field(default="", compare=False)
    """The client of its request; "" if it is unknown."""
    window_start: int = field(default=0, compare=False)
    """row[window_start:length] has K and V in layers with a sliding window, and the sequence holds them; where a page
    begins. 0 for models without such a pool."""
    states: SequenceStates = field(default_factory=SequenceStates, compare=False)
    """The recurrent states that it names; none for models without. One that will compute has a state of ``length``
    tokens, or no tokens."""

    def open_node(self, num_committed: int | None = None) -> TreeNode:
        """The node. Raises ValueError if the sequence is closed, or so many tokens cannot be committed."""
        if self.node is None:
            raise ValueError("this sequence is closed; it was finished or released before")
        if num_committed is not None and not self.tree_len <= num_committed <= self.length:
            raise ValueError(
                f"{num_committed} committed tokens for a sequence with {self.tree_len} tokens in the tree and slots "
                f"for {self.length}; the number must lie between these two"
            )
        return self.node
