"""The item tries of a worker, by name. A request gets the trie itself: if that is replaced or deleted, it
stays alive for the requests that have it, and for no others."""

from __future__ import annotations

import re

import numpy as np

from ...scheduler.constraints.allowed_ids import AllowedIds
from ...scheduler.constraints.constraint import Constraint
from ...scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ...scheduler.constraints.items import ItemConstraint
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import SamplingParams
from ..messages import LoadItemTrie

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
"""But not . and .., which the path of a URL cannot end in."""


class ItemTries:
    """The registry; the worker's event loop owns it."""

    def __init__(self, vocab_size: int, *, max_tries: int = 64, max_bytes: int = 2**30) -> None:
        """vocab_size: of the model. max_bytes: of all tries together; one that was replaced but is still in use by a
        request does not count."""
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
                f"item trie {name!r}: {len(others)} others are loaded already, as many as may be; delete one, or "
                "raise --max-item-tries"
            )
        held = sum(other.num_bytes for other in others)
        if held + trie.num_bytes > self._max_bytes:
            raise ItemTrieError(
                f"item trie {name!r} has {trie.num_bytes} bytes and the others {held}; together at most "
                f"{self._max_bytes}: delete one, or raise --max-item-trie-mb"
            )
        self._tries[name] = trie

    def resolve(self, sampling: SamplingParams) -> Constraint | None:
        """The constraint on a request's outputs; None without one. Raises RequestRefused (404)."""
        if sampling.allowed_token_ids:
            return AllowedIds(sampling.allowed_token_ids)
        return None if sampling.item_trie is None else ItemConstraint(self._get(sampling.item_trie), sampling.item_trie)

    def _get(self, name: str) -> ItemTrie:
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
        """One entry per trie, in order of loading; see `describe`."""
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
    """Reads the array in place: nothing is built in the worker."""
    return ItemTrie(
        edges=np.frombuffer(message.edges, dtype="<i8"),
        num_items=message.num_items,
        min_depth=message.min_depth,
        max_depth=message.max_depth,
        max_token=message.max_token,
    )
