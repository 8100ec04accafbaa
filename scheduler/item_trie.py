"""Item tries: which token sequences are items. For generative recommenders, whose every output must name one.

A trie is two flat arrays in breadth-first order (compressed sparse rows): a million items are no Python objects.

    items (1,4) (1,5) (2,4)         root 0 ─1─▶ 1 ─4─▶ 3        node           0  1  2  3  4  5
                                           │     └─5─▶ 4        tokens        -1  1  2  4  5  4    on the way to it
                                           └─2─▶ 2 ─4─▶ 5       first_child    1  3  5  6  6  6  6

The children of node i are the nodes first_child[i] to first_child[i + 1], their tokens ascending. No item begins
another: a node without children, a leaf, is a whole item.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

_MAX_INT32 = 2**31 - 1


class ItemTrieError(ValueError):
    """The items make no trie; the text says which and why."""


@dataclass(frozen=True, eq=False)
class ItemTrie:
    """A set of items. ``tokens``: int32 [nodes]; ``first_child``: int32 [nodes + 1]; node 0 is the root."""

    tokens: np.ndarray
    first_child: np.ndarray
    num_items: int
    min_depth: int
    """Tokens of the shortest item."""
    max_depth: int

    @property
    def is_uniform(self) -> bool:
        """All items are of one length."""
        return self.min_depth == self.max_depth

    @cached_property
    def max_token(self) -> int:
        return int(self.tokens.max())

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.first_child.nbytes

    @classmethod
    def build(cls, items: np.ndarray) -> ItemTrie:
        """From token sequences, int [items, longest], the shorter ones padded with -1 at the end. Doubles count once.

        Raises ItemTrieError for anything that is no such table, and for an item that begins another.
        """
        columns = _checked_columns(items)
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        num_rows = len(order)
        # Sorted, the items below one node are neighbours, so a node of depth d + 1 begins at each row that differs from
        # the row before in one of its first d + 1 tokens. Nodes found in this order are in breadth-first order.
        is_new = np.zeros(num_rows, dtype=bool)
        is_new[0] = True
        node = np.zeros(num_rows, dtype=np.int32)  # of each row, among the nodes of its depth
        tokens = [np.array([-1], dtype=np.int32)]
        num_children = []
        for depth, column in enumerate(columns):
            _refuse_beginnings(depth, is_new, column, order)
            is_new[1:] |= column[1:] != column[:-1]
            starts = np.flatnonzero(is_new & (column >= 0))
            num_children.append(np.bincount(node[starts], minlength=len(tokens[-1])))
            node = np.zeros(num_rows, dtype=np.int32)
            node[starts] = 1
            node = np.cumsum(node, dtype=np.int32) - 1
            tokens.append(column[starts])
        num_children.append(np.zeros(len(tokens[-1]), dtype=np.int64))
        first_child = np.cumsum(np.concatenate([[1], *num_children]), dtype=np.int32)
        lengths = (columns >= 0).sum(axis=0)
        return cls(
            tokens=np.concatenate(tokens),
            first_child=first_child,
            num_items=int(is_new.sum()),
            min_depth=int(lengths.min()),
            max_depth=int(lengths.max()),
        )

    @classmethod
    def from_npy(cls, data: bytes) -> ItemTrie:
        """From the table that `build` takes, as a .npy file holds it. Raises ItemTrieError."""
        return cls.build(_read_npy(data))

    @classmethod
    def load(cls, path: str | Path) -> ItemTrie:
        """From a .npy file. Raises ItemTrieError, naming the file."""
        try:
            return cls.from_npy(Path(path).read_bytes())
        except OSError as error:
            raise ItemTrieError(f"cannot read {path}: {error.strerror}") from None
        except ItemTrieError as error:
            raise ItemTrieError(f"{path}: {error}") from None

    def num_children(self, nodes: np.ndarray) -> np.ndarray:
        """int32 [n] of nodes -> int32 [n]"""
        return self.first_child[nodes + 1] - self.first_child[nodes]

    def is_leaf(self, nodes: np.ndarray) -> np.ndarray:
        """bool [n]: the node is a whole item."""
        return self.num_children(nodes) == 0

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into ``nodes``, token), int32 [m] each: every way to go on from every node."""
        index = np.repeat(np.arange(len(nodes), dtype=np.int32), self.num_children(nodes))
        spans = zip(self.first_child[nodes].tolist(), self.first_child[nodes + 1].tolist(), strict=True)
        # Slices, not one gather: they are copied at the speed of memory.
        slices = [self.tokens[start:end] for start, end in spans]
        return index, np.concatenate([self.tokens[:0], *slices])

    def advance(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int32 [n]: from each node along one token, which must be one of its children's."""
        # A binary search in all children lists at once; `child` is the last one known to be at most the token.
        child, end = self.first_child[nodes], self.first_child[nodes + 1]
        stride = 1 << int((end - child).max(initial=0)).bit_length()
        while stride := stride >> 1:
            ahead = child + stride
            child = np.where((ahead < end) & (self.tokens.take(ahead, mode="clip") <= tokens), ahead, child)
        assert ((child < end) & (self.tokens.take(child, mode="clip") == tokens)).all(), "no such child in the trie"
        return child


def _read_npy(data: bytes) -> np.ndarray:
    """A read-only view of the array. Not np.load: that unpickles or allocates as the header says, before it looks."""
    source = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(source)
    except ValueError:
        raise ItemTrieError("this is no .npy file; write it with numpy.save") from None
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ItemTrieError(
            f"the .npy file has format version {version[0]}.{version[1]}; versions 1.0 and 2.0 are read"
        )
    try:
        shape, fortran_order, dtype = readers[version](source)
    except Exception as error:  # the header is Python source that anybody may have written
        raise ItemTrieError(f"the header of the .npy file cannot be read: {type(error).__name__}") from None
    if dtype.kind not in "iu" or min(shape, default=0) < 0:
        raise ItemTrieError(
            f"the .npy file holds {dtype} of shape {shape}; item tries are made of integers, save int32"
        )
    there, needed = len(data) - source.tell(), math.prod(shape) * dtype.itemsize
    if there != needed:
        raise ItemTrieError(f"the .npy file has {there} bytes of data, but {dtype} of shape {shape} is {needed} bytes")
    items = np.frombuffer(data, dtype, offset=source.tell())
    return items.reshape(shape, order="F" if fortran_order else "C")


def _checked_columns(items: np.ndarray) -> np.ndarray:
    """The items transposed, int32 [longest, items], contiguous. Raises ItemTrieError."""
    if items.ndim != 2:
        raise ItemTrieError(f"item tries are made of a table [items, tokens], not of {items.ndim} dimensions")
    if items.dtype.kind not in "iu":
        raise ItemTrieError(f"item tries are made of integers, not of {items.dtype}; save the token ids as int32")
    if items.size == 0:
        raise ItemTrieError(f"there are no items: the shape is {items.shape}")
    if items.size > _MAX_INT32:
        raise ItemTrieError(f"{items.size} tokens are too many for one item trie; the most is {_MAX_INT32}")
    if (largest := int(items.max())) > _MAX_INT32:
        raise ItemTrieError(f"{largest} is no token id: it does not fit into 32 bits")
    if int(items.min()) < -1:
        row, position = np.argwhere(items < -1)[0]
        raise ItemTrieError(
            f"item {row} has the token {items[row, position]}; token ids are 0 or more, and -1 fills up short items"
        )
    columns = np.ascontiguousarray(items.T, dtype=np.int32)
    is_padding = columns < 0
    if is_padding[0].any():
        row = int(is_padding[0].argmax())
        if (columns[:, row] >= 0).any():
            raise ItemTrieError(f"item {row} begins with -1; only its end may be filled up")
        raise ItemTrieError(f"item {row} has no tokens; leave it out")
    gaps = is_padding[:-1] & ~is_padding[1:]
    if gaps.any():
        row = int(gaps.any(axis=0).argmax())
        raise ItemTrieError(
            f"item {row} has -1 between its tokens: {columns[:, row].tolist()}; only its end may be filled up"
        )
    return columns


def _refuse_beginnings(depth: int, is_new: np.ndarray, column: np.ndarray, order: np.ndarray) -> None:
    """An item that ends at this depth, before others that go on from there, comes right before the first of them.

    is_new: bool [items], the row differs from the one before in its first ``depth`` tokens; column: the next tokens.
    """
    begins = (column[:-1] < 0) & (column[1:] >= 0) & ~is_new[1:]
    if begins.any():
        at = int(begins.argmax())
        short, long = int(order[at]), int(order[at + 1])
        raise ItemTrieError(
            f"item {short} ({depth} tokens) is the beginning of item {long}; leave one of them out, or end both with a "
            "token of their own"
        )
