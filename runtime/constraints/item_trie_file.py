"""Reads item tries from .npy files. Anybody may have sent one, so nothing in it is trusted."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np

from ...scheduler.constraints.item_trie import ItemTrie, ItemTrieError

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
    except Exception as error:  # the header is Python source that anybody may have written
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
