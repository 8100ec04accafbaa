"""Headers of GGUF files: what the package gguf writes, and everything that is wrong with a file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="gguf is in the extra [dev]")

import gguf
import numpy as np

from baton.runtime.checkpoint.gguf_header import read_gguf_header
from baton.runtime.checkpoint.model_files import ModelLoadError
from tests.doubles.gguf_checkpoints import add_value, finish

METADATA: dict[str, Any] = {
    "a.text": "naïve 世界", "a.yes": True, "a.count": 7, "a.real": 0.5, "a.words": ["x", "", "世界"], "a.ids": [3, -1],
    "a.reals": [0.25, -2.0],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        add_value(writer, key, value)
    writer.add_tensor("w", np.zeros((5, 34 * 2), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", np.arange(7, dtype=np.float32))
    finish(writer)
    return path


def test_header_is_that_of_the_package(file):
    header = read_gguf_header(file)
    assert header.metadata == {"general.architecture": "llama"} | METADATA
    theirs = gguf.GGUFReader(file)
    for tensor in theirs.tensors:
        found = header.tensors[tensor.name]
        assert (found.block.name, found.start, found.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
    assert header.tensors["w"].shape == (5, 64) and header.tensors["norm"].shape == (7,)
    slim = read_gguf_header(file, keeps_arrays=False)
    assert slim.tensors == header.tensors and slim.metadata["a.words"] is None and slim.metadata["a.count"] == 7


def test_every_cut_is_noticed(file):
    whole = file.read_bytes()
    for length in range(len(whole) - 31):  # the last bytes are padding
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut off|is empty|no GGUF file"):
            read_gguf_header(file)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_give_an_answer_or_an_error(file, seed):
    whole, rng = file.read_bytes(), random.Random(seed)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(4, 600)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        file.write_bytes(damaged)
        try:
            read_gguf_header(file)
        except ModelLoadError:
            refused += 1
    assert refused > 30


def packed(version: int = 3, tensors: int = 0, values: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip", r"no GGUF file: it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"Git LFS pointer.*git lfs pull"),
        (packed(4), r"of GGUF version 4; versions 2 and 3 are read\. Use a newer Baton"),
        (packed(1), r"of GGUF version 1;.*Convert the model again"),
        (packed(3 << 24), "big-endian"),
        (packed(values=HUGE), rf"cut off or damaged: its header promises {HUGE} values of metadata"),
        (packed(tensors=HUGE), rf"promises {HUGE} tensors"),
        (packed(values=1, rest=text(b"k") + struct.pack("<IQ", 8, HUGE) + b"x" * 20), rf"a text of {HUGE} bytes \(k\)"),
        (packed(values=1, rest=struct.pack("<Q", 70000) + b"k" * 70010), r"70000 bytes as a key"),
        (packed(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + b"x" * 20), rf"{HUGE} strings in k"),
        (packed(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, HUGE) + b"x" * 20), rf"{HUGE} numbers in k"),
        (packed(values=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1) + b"x" * 20), r"array of the type 9.*\(k\)"),
        (packed(values=1, rest=text(b"k") + struct.pack("<I", 77) + b"x" * 20), r"unknown type 77 .*\(k\)"),
        (packed(values=1, rest=text(b"\xff") + struct.pack("<IB", 0, 1)), "no UTF-8"),
        (packed(values=2, rest=(text(b"k") + struct.pack("<IB", 0, 1)) * 2), "'k' twice in its metadata"),
        (packed(tensors=1, rest=tensor(b"w", (32,), 99)), r"tensor w of the type 99, .*newer Baton.*Q8_0"),
        (packed(tensors=1, rest=tensor(b"w", (1,) * 5, 0)), r"w has 5 dimensions"),
        (packed(tensors=1, rest=tensor(b"w", (4, 0), 0)), r"w has shape \[0, 4\]"),
        (packed(tensors=1, rest=tensor(b"w", (31, 2), 2)), r"w has 31 inputs in blocks of 32 \(Q4_0\)"),
        (packed(tensors=1, rest=tensor(b"w", (HUGE, HUGE), 0)), r"cut off: tensor w ends at byte \d{37}"),
        (packed(tensors=1, rest=tensor(b"w", (1,), 0, 3) + b"x" * 99), r"w at byte 67, which is no multiple of 32"),
        (packed(tensors=2, rest=tensor(b"w", (1,), 0) * 2 + b"x" * 99), "holds tensor w twice"),
        (
            packed(values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 24)),
            "general.alignment 24, which is no power of two",
        ),
    ],
)
def test_bad_headers_are_refused(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_header(tmp_path / "m.gguf")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"none\.gguf cannot be read"):
        read_gguf_header(tmp_path / "none.gguf")
