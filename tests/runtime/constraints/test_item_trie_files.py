"""Files are read as numpy.save writes them; whatever else is in one is named, and nothing worse happens."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest

from baton.runtime.constraints.item_tries import load_item_trie, read_item_trie
from baton.scheduler.constraints.item_trie import ItemTrie, ItemTrieError


def npy(items: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, items)
    return file.getvalue()


def with_header(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """A .npy file whose header is this text."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


ITEM_TABLE = np.array([[1, 4], [1, 5], [2, 4]], dtype=np.int32)


@pytest.mark.parametrize("items", [ITEM_TABLE, np.asfortranarray(ITEM_TABLE), ITEM_TABLE.astype(">i8")])
def test_npy_item_tries_are_read(items: np.ndarray, tmp_path: Path) -> None:
    wanted = ItemTrie.build(ITEM_TABLE)
    (tmp_path / "items.npy").write_bytes(npy(items))
    for got in (read_item_trie(npy(items)), load_item_trie(tmp_path / "items.npy")):
        assert got.edges.tolist() == wanted.edges.tolist()
    version_2 = with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }", ITEM_TABLE.tobytes(), 2)
    assert read_item_trie(version_2).num_items == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no .npy file"),
        (b"[[1, 2]]", "no .npy file"),
        (b"\x93NUM", "no .npy file"),
        (b"\x93NUMPY\x01\x00", "cannot be read"),
        (b"\x93NUMPY\x09\x00" + bytes(100), "format version 9.0"),
        (npy(ITEM_TABLE)[:-1], "has 23 bytes of data, but int32 of shape .3, 2. is 24 bytes"),
        (npy(ITEM_TABLE) + b"!", "has 25 bytes of data"),
        (npy(ITEM_TABLE)[:60], "cannot be read"),
        (npy(ITEM_TABLE[0]), "not of 1 dimensions"),
        (npy(np.array(1.5, dtype=np.float32)), "holds float32"),
        (npy(ITEM_TABLE.astype(np.float32)), "holds float32"),
        (npy(np.array([[{"a": 1}]], dtype=object)), "holds object"),
        (npy(np.zeros(2, dtype=[("a", "<i4"), ("b", "<i4")])), "holds .*'a'"),
        (with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (10**9, 10**9)}"), "cannot be read"),
        (with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (4000000000, 9)}"), "is 144000000000 bytes"),
        (with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1, -1)}", bytes(4)), "shape .-1, -1."),
        (with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (True, 3)}", bytes(12)), "shape .True, 3."),
        (
            with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (0, 1%s)}" % ("0" * 30)),
            "no array has the shape",
        ),
        (
            with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (0, 4000000000000000000)}"),
            "no array has the shape",
        ),
        (
            with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (%s)}" % ("1," * 70), bytes(4)),
            "no array has",
        ),
        (
            with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (9%s, 9%s)}" % (("0" * 4000,) * 2)),
            "no array has",
        ),
        (with_header("{'descr': '<i4', 'fortran_order': False}"), "cannot be read"),
        (with_header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (1, 1)}"), "cannot be read"),
        (with_header("(" * 9000), "cannot be read"),
        (with_header("__import__('os')"), "cannot be read"),
        (with_header("'"), "cannot be read"),
    ],
)
def test_invalid_item_trie_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ItemTrieError, match=message):
        read_item_trie(data)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_raise_only_item_trie_errors(seed: int) -> None:
    rng = random.Random(seed)
    whole = npy(ITEM_TABLE)
    for _ in range(100):
        noise, at = rng.randbytes(rng.choice([0, 1, 2, 30])), rng.randint(0, len(whole))
        for data in (noise, whole[:at] + noise, whole[:at] + noise + whole[at + len(noise) :]):
            try:
                trie = read_item_trie(data)
            except ItemTrieError:
                continue
            assert 1 <= trie.num_items <= 6


def test_unreadable_item_trie_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ItemTrieError, match=r"cannot read .*missing.npy: No such file"):
        load_item_trie(tmp_path / "missing.npy")
    with pytest.raises(ItemTrieError, match=r"cannot read .*: Is a directory"):
        load_item_trie(tmp_path)
    (tmp_path / "text.npy").write_text("1 2 3")
    with pytest.raises(ItemTrieError, match=r"text.npy: this is no .npy file"):
        load_item_trie(tmp_path / "text.npy")
