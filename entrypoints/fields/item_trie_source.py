"""Where an item trie comes from: the body of an upload, a file, or an array. Built in a thread, so that a million items
stall nobody: neither the loop that answers, nor the worker, which gets the finished array."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ...runtime.constraints.item_trie_file import load_item_trie, read_item_trie
from ...scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ...scheduler.refusal import RequestRefused


async def build_item_trie(source: bytes | str | Path | np.ndarray) -> ItemTrie:
    """From what a .npy file holds (bytes), its path, or the table of `ItemTrie.build`. Raises RequestRefused."""
    try:
        return await asyncio.to_thread(_build, source)
    except ItemTrieError as error:
        raise RequestRefused(str(error), code="invalid_item_trie") from None


def _build(source: bytes | str | Path | np.ndarray) -> ItemTrie:
    if isinstance(source, bytes):
        return read_item_trie(source)
    if isinstance(source, np.ndarray):
        return ItemTrie.build(source)
    return load_item_trie(source)
