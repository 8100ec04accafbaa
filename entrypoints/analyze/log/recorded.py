"""The format that ``--record-requests`` writes (runtime/recording), and any log with the same field names.

A line has the prompt as ``input_ids``, ``text``, ``messages`` (with ``tools``), or ``input_blocks``: hashes of blocks.
It may have ``output_ids``, for one output or a list for each; ``output_text``, ``output_blocks``; ``time``,
``seconds``, ``namespace``, ``continuation_of``, ``no_reuse_from``, ``cached_tokens``, ``missed_tokens``,
``state_points``, ``retain_states``, ``finish``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....runtime.recording.lines import HASH_BYTES, HEADER
from .logged_request import BadItem, LoggedRequest, Units
from .prompt_text import ID_BYTES, PromptText, id_units, key_of_ids

MAX_NUMBER = 1e18
"""Limit of times in seconds and of token counts: larger ones are mistakes, and would overflow."""

MAX_REASON_CHARS = 32
"""Longer names of a miss's reason are no reasons, and are passed over."""

MAX_POINTS = 1024
"""Limit of a request's places for recurrent states."""

_PROMPTS = ("input_ids", "text", "messages", "input_blocks")


class RequestReader:
    """Reads lines with prompts of one kind; only ids and texts may mix, and only with a tokenizer."""

    def __init__(self, text: PromptText, page_size: int | None) -> None:
        """page_size: None for the default."""
        self.units: Units | None = None
        self.notes: list[str] = []
        self._text = text
        self._page_size = page_size

    @staticmethod
    def knows(item: dict[str, Any]) -> bool:
        return HEADER in item or any(name in item for name in _PROMPTS)

    def read_item(self, item: Any) -> Iterator[LoggedRequest]:
        if not isinstance(item, dict):
            raise BadItem("it is not an object")
        if HEADER in item:
            return
        name = next((name for name in _PROMPTS if item.get(name) is not None), None)
        if name is None:
            raise BadItem(f"it has none of {', '.join(_PROMPTS)}")
        units = self._units(name, item)
        if self.units is None:
            self.units = units
        elif units != self.units:
            raise BadItem(f"its prompt is made of {units.what}, but earlier ones are made of {self.units.what}")
        yield self._request(name, item)

    def _units(self, name: str, item: dict[str, Any]) -> Units:
        if name == "input_blocks":
            block = item.get("block_tokens")
            if type(block) is not int or block < 1:
                raise BadItem("it has input_blocks without block_tokens")
            if self._page_size not in (None, block):
                raise BadItem(f"its blocks have {block} tokens; leave out --page-size")
            return Units(HASH_BYTES, block, f"hashed blocks of {block} tokens")
        return id_units(self._page_size or 1) if name == "input_ids" else self._text.units(self._page_size or 1)

    def _request(self, name: str, item: dict[str, Any]) -> LoggedRequest:
        key = self._prompt(name, item)
        outputs = self._outputs(name, item)
        if name == "input_blocks":
            prompt_tokens, output_tokens = _count(item, "input_tokens"), _count(item, "output_tokens", 0)
        else:
            width = ID_BYTES if name == "input_ids" else None
            lengths = [len(each) // width if width else self._text.num_tokens(each) for each in (key, *outputs)]
            prompt_tokens, output_tokens = lengths[0], sum(lengths[1:])
        if prompt_tokens < 1:
            raise BadItem("its prompt is empty")
        cached = item.get("cached_tokens")
        if type(cached) is int and not 0 <= cached <= MAX_NUMBER:
            raise BadItem("its cached_tokens is not a number of tokens")
        return LoggedRequest(
            prompt=key,
            prompt_tokens=prompt_tokens,
            outputs=tuple(outputs),
            output_tokens=output_tokens,
            has_outputs=bool(outputs),
            time=number(item, "time"),
            seconds=number(item, "seconds") or 0.0,
            namespace=str(item.get("namespace") or ""),
            continues=item.get("continuation_of") is not None,
            hinted=item.get("no_reuse_from") is not None,
            cached_tokens=cached if type(cached) is int else None,
            missed=_missed(item),
            state_points=_points(item),
            retain_states=_count(item, "retain_states", 1),
            is_aborted=item.get("finish") == "abort",
        )

    def _prompt(self, name: str, item: dict[str, Any]) -> bytes:
        value = item[name]
        if name == "input_ids":
            return key_of_ids(value, name)
        if name == "input_blocks":
            return _hashes(value, name)
        if name == "messages":
            return self._text.encode_chat(value, item.get("tools"))
        if not isinstance(value, str):
            raise BadItem("text is not a string")
        return self._text.encode(value)

    def _outputs(self, name: str, item: dict[str, Any]) -> list[bytes]:
        if name == "input_blocks":
            return [_hashes(each, "output_blocks") for each in _list(item, "output_blocks")]
        ids = _list(item, "output_ids")
        if ids and self.units is not None and self.units.what.startswith("token ids"):
            many = ids if isinstance(ids[0], list) else [ids]
            return [key_of_ids(each, "output_ids") for each in many]
        text = item.get("output_text")
        if isinstance(text, str) and name != "input_ids":
            return [self._text.encode_output(text)]
        return []


def _missed(item: dict[str, Any]) -> dict[str, int]:
    """Reason -> tokens; {} if the item does not tell. Raises BadItem."""
    missed = item.get("missed_tokens")
    if missed is None:
        return {}
    if not isinstance(missed, dict):
        raise BadItem("its missed_tokens is not an object")
    return {reason: _count(missed, reason) for reason in missed if len(reason) <= MAX_REASON_CHARS}


def _points(item: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of tokens. Raises BadItem."""
    points = _list(item, "state_points")
    if len(points) > MAX_POINTS or any(type(point) is not int or not 0 <= point <= MAX_NUMBER for point in points):
        raise BadItem(f"its state_points is not a list of at most {MAX_POINTS} numbers of tokens")
    return tuple(points)


def _list(item: dict[str, Any], name: str) -> list[Any]:
    value = item.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadItem(f"{name} is not a list")
    return value


def _hashes(value: Any, name: str) -> bytes:
    """The bytes of concatenated hexadecimal hashes."""
    try:
        key = bytes.fromhex(value)
    except (TypeError, ValueError):
        raise BadItem(f"{name} is not a string of hexadecimal digits") from None
    if len(key) % HASH_BYTES:
        raise BadItem(f"{name} is cut short: each hash has {2 * HASH_BYTES} digits")
    return key


def _count(item: dict[str, Any], name: str, default: int | None = None) -> int:
    value = item.get(name, default)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise BadItem(f"its {name} is not a number of tokens")
    return value


def number(item: dict[str, Any], name: str) -> float | None:
    """The number, or None if the item has none. Raises BadItem for one that is too large, or NaN."""
    value = item.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not -MAX_NUMBER <= value <= MAX_NUMBER:  # so is NaN
        raise BadItem(f"its {name} is out of range")
    return float(value)
