"""Item tries: their files, the worker's registry, and the message that brings one to it.

A request gets the trie itself: a trie that is replaced or deleted stays alive for the requests that have it, and for no
others. Anyone may have sent a .npy file, so nothing in it is trusted.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import numpy as np

from ...scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ...scheduler.outcome import RequestRefused
from ..messages import LoadItemTrie

_MAX_DIMENSIONS, _MAX_SIZE = 32, 2**48
"""Limits of an array to read. Beyond 64 dimensions or 63 bits numpy raises errors of its own."""


def read_item_trie(data: bytes) -> ItemTrie:
    """Build a trie from a .npy file's bytes, which hold the table that `ItemTrie.build` takes. Raises ItemTrieError."""
    return ItemTrie.build(_read_npy(data))


def load_item_trie(path: str | Path) -> ItemTrie:
    """Build a trie from a .npy file. Raises ItemTrieError, naming the file."""
    try:
        return read_item_trie(Path(path).read_bytes())
    except OSError as error:
        raise ItemTrieError(f"cannot read {path}: {error.strerror}") from None
    except ItemTrieError as error:
        raise ItemTrieError(f"{path}: {error}") from None


def _read_npy(data: bytes) -> np.ndarray:
    """A read-only view of the array. Not np.load, which unpickles or allocates before it checks the header."""
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
    except Exception as error:  # the header is Python source that anyone may have written
        raise ItemTrieError(f"the header of the .npy file cannot be read: {type(error).__name__}") from None
    if dtype.kind not in "iu" or not all(type(size) is int and size >= 0 for size in shape):
        raise ItemTrieError(
            f"the .npy file holds {dtype} of shape {shape}; item tries are made of integers, save int32"
        )
    if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_SIZE:
        raise ItemTrieError(f"no array has the shape {str(shape)[:100]} that the .npy file gives")
    there, needed = len(data) - source.tell(), math.prod(shape) * dtype.itemsize
    if there != needed:
        raise ItemTrieError(f"the .npy file has {there} bytes of data, but {dtype} of shape {shape} is {needed} bytes")
    items = np.frombuffer(data, dtype, offset=source.tell())
    return items.reshape(shape, order="F" if fortran_order else "C")


_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
"""Excludes . and .., which cannot end the path of a URL."""


class ItemTries:
    """The registry of a worker's tries, by name."""

    def __init__(self, vocab_size: int, *, max_tries: int = 64, max_bytes: int = 2**30) -> None:
        """max_bytes: limit for all tries together. A replaced trie that a request still uses does not count."""
        self._vocab_size = vocab_size
        self._max_tries = max_tries
        self._max_bytes = max_bytes
        self._tries: dict[str, ItemTrie] = {}

    def put(self, name: str, trie: ItemTrie) -> None:
        """Store a trie under this name. Raises ItemTrieError for a trie with a token that the model does not have,
        and where there would be too many tries, or too many bytes."""
        if trie.max_token >= self._vocab_size:
            raise ItemTrieError(
                f"item trie {name!r}: an item has the token {trie.max_token}; the model has {self._vocab_size} tokens, "
                f"0 to {self._vocab_size - 1}"
            )
        others = [other for known, other in self._tries.items() if known != name]
        if len(others) >= self._max_tries:
            raise ItemTrieError(
                f"item trie {name!r}: {len(others)} others are loaded already, the maximum; delete one, or "
                "raise --max-item-tries"
            )
        held = sum(other.num_bytes for other in others)
        if held + trie.num_bytes > self._max_bytes:
            raise ItemTrieError(
                f"item trie {name!r} has {trie.num_bytes} bytes and the others have {held}; together they may have "
                f"{self._max_bytes}: delete one, or raise --max-item-trie-mb"
            )
        self._tries[name] = trie

    def get(self, name: str) -> ItemTrie:
        """Raises RequestRefused if there is none of this name."""
        trie = self._tries.get(name)
        if trie is None:
            loaded = ", ".join(map(repr, self._tries)) or "none"
            raise RequestRefused(
                f"there is no item trie {name!r}; loaded: {loaded}",
                code="item_trie_not_found",
                param="sampling_params.item_trie",
            )
        return trie

    def delete(self, name: str) -> bool:
        """Delete a trie. True if there was one."""
        return self._tries.pop(name, None) is not None

    def describe(self) -> list[dict[str, object]]:
        """Describe each trie, in order of loading."""
        return [describe(name, trie) for name, trie in self._tries.items()]


def describe(name: str, trie: ItemTrie) -> dict[str, object]:
    """Describe a trie to clients. Depths are in tokens."""
    return {
        "name": name,
        "num_items": trie.num_items,
        "min_depth": trie.min_depth,
        "max_depth": trie.max_depth,
        "num_bytes": trie.num_bytes,
    }


def check_name(name: str) -> None:
    """Raises ItemTrieError for an invalid name: names appear in URLs and on command lines."""
    if _NAME.fullmatch(name) is None:
        raise ItemTrieError(f"an item trie cannot be named {name!r}; use 1 to 128 letters, digits, '.', '_' or '-'")


def pack_trie(call_id: int, name: str, trie: ItemTrie) -> LoadItemTrie:
    """The message that carries a trie to the worker."""
    return LoadItemTrie(
        call_id=call_id,
        name=name,
        edges=trie.edges.astype("<i8", copy=False).tobytes(),
        num_items=trie.num_items,
        min_depth=trie.min_depth,
        max_depth=trie.max_depth,
        max_token=trie.max_token,
    )


def unpack_trie(message: LoadItemTrie) -> ItemTrie:
    """Read a message's arrays in place: nothing is built in the worker."""
    return ItemTrie(
        edges=np.frombuffer(message.edges, dtype="<i8"),
        num_items=message.num_items,
        min_depth=message.min_depth,
        max_depth=message.max_depth,
        max_token=message.max_token,
    )
