"""Bytes of plain data, so that two steps' orders can be compared; anything that is a live object is refused."""

from __future__ import annotations

import dataclasses
from enum import Enum

import msgspec
import numpy as np


def plain_bytes(value: object) -> bytes:
    """Equal values of equal types give equal bytes. Raises TypeError for what cannot be sent to another process."""
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, Enum):
        return [type(value).__name__, value.value]
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, msgspec.to_builtins(value)]
    if dataclasses.is_dataclass(value):
        fields = [[field.name, _plain(getattr(value, field.name))] for field in dataclasses.fields(value)]
        return [type(value).__name__, fields]
    raise TypeError(f"{type(value).__name__} is no plain data: {value!r}")
