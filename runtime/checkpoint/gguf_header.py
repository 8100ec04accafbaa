"""Reads the header of a GGUF file, the one-file format of llama.cpp: typed metadata, then where each tensor lies. No
torch.

    magic, version │ numbers of tensors and of metadata │ metadata │ tensors: name, shape, type, offset │ their bytes

Files come from anywhere, so no length in one is trusted: every count is compared with the bytes that are left before
anything of that size is read or allocated, and every tensor with the length of the file. (The package gguf is not used
here: importing it takes a second, its reader keeps an array for each string of the vocabulary, and runs on past the end
of a file that promises too much. The tests compare with it.)
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .load_errors import ModelLoadError

VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_KEY_BYTES = 65535
"""Limits of the format."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How the numbers of a tensor are stored: in blocks of consecutive inputs."""

    name: str
    numbers: int
    """In a block."""
    num_bytes: int
    """Of a block."""


BLOCK_TYPES: dict[int, BlockType] = {
    number: BlockType(*block)
    for number, block in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip

PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""The types of blocks that are read."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its code in `struct`."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """In the order of torch: inputs last."""
    block: BlockType
    start: int
    """First byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says of itself."""

    file: Path
    metadata: dict[str, Any]
    """str, bool, int, float, or a list of one of them."""
    tensors: dict[str, TensorInfo]


def read_gguf_header(file: Path, *, keeps_arrays: bool = True) -> GGUFHeader:
    """keeps_arrays: False leaves out arrays in the metadata, such as the vocabulary. Raises ModelLoadError for a file
    that is no GGUF, of another version, cut off, or that contradicts itself."""
    try:
        with file.open("rb") as stream:
            start = stream.read(64)
            if start.startswith(b"version https://git-lfs"):
                raise ModelLoadError(f"{file} is a Git LFS pointer, not the model; run `git lfs pull` in its folder")
            if start[:4] != b"GGUF":
                what = "is empty" if not start else f"is no GGUF file: it begins with {start[:4]!r}"
                raise ModelLoadError(f"{file} {what}; download the file again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, keeps_arrays).read()
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from error


def refuse_unread_types(header: GGUFHeader) -> None:
    """Raises ModelLoadError for types of blocks that are not read."""
    for tensor in header.tensors.values():
        if tensor.block.name not in (*PLAIN_TYPES, *QUANTISED_TYPES):
            raise ModelLoadError(
                f"{header.file} has tensor {tensor.name} in {tensor.block.name}, which is not supported; supported are "
                f"{', '.join(PLAIN_TYPES + QUANTISED_TYPES)}. Take another file of the model, such as Q4_K_M or Q8_0"
            )


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap, keeps_arrays: bool) -> None:
        self._file, self._data, self._size, self._at = file, data, len(data), 4
        self._keeps_arrays = keeps_arrays

    def read(self) -> GGUFHeader:
        version = self._number("I")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise self._refuse("is in big-endian byte order; take a file for little-endian machines")
            newer = version > VERSIONS[-1]
            raise self._refuse(
                f"is of GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[-1]} are read. "
                + ("Use a newer Baton, or another file of the model" if newer else "Convert the model again")
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self._expect_room(num_values, 8 + 4 + 1, f"{num_values} values of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("a key of the metadata", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._refuse(f"has {key!r} twice in its metadata")
            metadata[key] = self._value(key, self._number("I"))
        self._expect_room(num_tensors, 8 + 4 + 8 + 4 + 8, f"{num_tensors} tensors")
        found = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._refuse(f"has general.alignment {alignment!r}, which is no power of two")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, block, offset in found:
            if name in tensors:
                raise self._refuse(f"holds tensor {name} twice")
            tensors[name] = self._place(name, shape, block, begin + offset, alignment)
        return GGUFHeader(self._file, metadata, tensors)

    def _place(self, name: str, shape: tuple[int, ...], block: BlockType, start: int, alignment: int) -> TensorInfo:
        count = 1
        for length in shape:
            count *= length
        if shape[-1] % block.numbers:
            raise self._refuse(
                f"says that tensor {name} has {shape[-1]} inputs in blocks of {block.numbers} ({block.name})"
            )
        num_bytes = count // block.numbers * block.num_bytes
        if start % alignment:
            raise self._refuse(f"places tensor {name} at byte {start}, which is no multiple of {alignment}")
        if start + num_bytes > self._size:
            raise self._refuse(
                f"is cut off: tensor {name} ends at byte {start + num_bytes}, the file at byte {self._size}; was the "
                "download cut short? Download the file again"
            )
        return TensorInfo(name, shape, block, start, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._string("the name of a tensor", _MAX_KEY_BYTES)
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._refuse(f"says that tensor {name} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} exist")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise self._refuse(f"says that tensor {name} has shape {list(shape)}")
        number = self._number("I")
        if number not in BLOCK_TYPES:
            raise self._refuse(
                f"has tensor {name} of the type {number}, which is not known here; use a newer Baton, or another file "
                "of the model, such as one in Q8_0 or Q4_K_M"
            )
        return name, shape, BLOCK_TYPES[number], self._number("Q")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._refuse(f"has a value of the unknown type {kind} in its metadata ({key})")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> list[Any] | None:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._expect_room(count, 8, f"{count} strings in {key}")
            if self._keeps_arrays:
                return [self._string(key) for _ in range(count)]
            for _ in range(count):
                self._skip_string(key)
            return None
        if kind not in _SCALARS:
            raise self._refuse(f"has an array of the type {kind} in its metadata ({key}), which is not read")
        code = _SCALARS[kind]
        num_bytes = count * struct.calcsize(code)
        self._expect_room(count, struct.calcsize(code), f"{count} numbers in {key}")
        at, self._at = self._at, self._at + num_bytes
        return list(struct.unpack_from(f"<{count}{code}", self._data, at)) if self._keeps_arrays else None

    def _number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self._expect_room(1, size, "a number")
        at, self._at = self._at, self._at + size
        return struct.unpack_from(f"<{code}", self._data, at)[0]

    def _string(self, what: str, longest: int | None = None) -> str:
        at = self._skip_string(what, longest)
        try:
            return self._data[at : self._at].decode("utf-8")
        except UnicodeDecodeError:
            raise self._refuse(f"has text that is no UTF-8 ({what}); download the file again") from None

    def _skip_string(self, what: str, longest: int | None = None) -> int:
        """The byte at which it begins; reading goes on behind it."""
        length = self._number("Q")
        if longest is not None and length > longest:
            raise self._refuse(f"has {length} bytes as {what}; {longest} are the most. Download the file again")
        self._expect_room(length, 1, f"a text of {length} bytes ({what})")
        at, self._at = self._at, self._at + length
        return at

    def _expect_room(self, count: int, size: int, what: str) -> None:
        if count * size > self._size - self._at:
            raise self._refuse(
                f"is cut off or damaged: its header promises {what} at byte {self._at} of {self._size}; download the "
                "file again"
            )

    def _refuse(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file} {text}")
