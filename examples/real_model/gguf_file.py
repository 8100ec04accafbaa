"""Reads a GGUF file, the one-file format of llama.cpp: typed metadata, then tensors, most of them quantised."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np


class GGUFError(ValueError):
    """The file cannot be turned into a Hugging Face folder without guessing; the message says what is in the way."""


def require_gguf() -> None:
    """Raise GGUFError if the package gguf, which is in the extra [examples], is not installed."""
    if find_spec("gguf") is None:
        raise GGUFError(
            "the package gguf, which reads the model's file, is not installed: pip install 'baton-serve[examples]'"
        )


class GGUFFile:
    """See the module. The tensors stay in the mapped file until they are asked for."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._path = path
        self._reader = GGUFReader(path)

    @property
    def metadata_keys(self) -> list[str]:
        return list(self._reader.fields)

    def __getitem__(self, key: str) -> Any:
        """A value of the metadata: str, bool, int, float, or a list of one of them."""
        if key not in self._reader.fields:
            raise GGUFError(f"{self._path.name} has no {key!r} in its metadata")
        return self._reader.fields[key].contents()

    @property
    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and values, float32, one after the other. Quantised ones are what llama.cpp computes with."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            yield tensor.name, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type))

    def expect(self, key: str, served: Any, meaning: str) -> None:
        """Raise GGUFError unless the metadata says what is served here. A key that is absent is wrong, too."""
        if self[key] != served:
            raise GGUFError(f"{self._path.name}: {key} is {self[key]!r}, but only {served!r} is known here: {meaning}")
