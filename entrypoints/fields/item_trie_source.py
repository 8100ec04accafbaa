"""Builds an item trie from an uploaded body, a file or an array. A thread does the work, so that a million items stall
neither the event loop nor the worker, which gets the finished array."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ...runtime.constraints.item_tries import load_item_trie, read_item_trie
from ...scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ...scheduler.outcome import RequestRefused


async def build_item_trie(source: bytes | str | Path | np.ndarray) -> ItemTrie:
    """source: the bytes of a .npy file, its path, or the table for `ItemTrie.build`. Raises RequestRefused."""
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
