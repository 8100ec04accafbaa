"""A reader of msgpack that knows nothing of Baton's, from the format's specification."""

from __future__ import annotations

import struct
from typing import Any


def read(data: bytes) -> Any:
    value, rest = _value(memoryview(data))
    assert not len(rest), "bytes behind the value"
    return value


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_LENGTHS = {
    0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I",
    0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
}  # fmt: skip


def _value(data: memoryview) -> tuple[Any, memoryview]:
    code, rest = data[0], data[1:]
    if code < 0x80:
        return code, rest
    if code >= 0xE0:
        return code - 0x100, rest
    if code < 0x90:
        return _map(code & 0x0F, rest)
    if 0x90 <= code < 0xA0:
        return _array(code & 0x0F, rest)
    if 0xA0 <= code < 0xC0:
        return _text(code & 0x1F, rest)
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], rest
    if code in _NUMBERS:
        size = struct.calcsize(_NUMBERS[code])
        return struct.unpack(_NUMBERS[code], rest[:size])[0], rest[size:]
    size = struct.calcsize(_LENGTHS[code])  # extensions are not expected
    length, rest = struct.unpack(_LENGTHS[code], rest[:size])[0], rest[size:]
    if code >= 0xDE:
        return _map(length, rest)
    if code >= 0xDC:
        return _array(length, rest)
    return _text(length, rest) if code >= 0xD9 else (bytes(rest[:length]), rest[length:])


def _text(length: int, data: memoryview) -> tuple[str, memoryview]:
    return bytes(data[:length]).decode(), data[length:]


def _array(length: int, data: memoryview) -> tuple[list[Any], memoryview]:
    items: list[Any] = []
    for _ in range(length):
        item, data = _value(data)
        items.append(item)
    return items, data


def _map(length: int, data: memoryview) -> tuple[dict[Any, Any], memoryview]:
    items, data = _array(2 * length, data)
    return dict(zip(items[::2], items[1::2], strict=True)), data
