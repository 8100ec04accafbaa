"""Reads the fields by which a request continues an earlier one, or asks to be kept for a later one to continue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ...scheduler.request_spec import ContinuationSpec
from ..description.json_schema import (
    IDS,
    Properties,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    per_prompt,
    string,
    whole,
)
from .reading import MAX_RID_CHARS, PerPrompt, one_of, read_rid, typed

MAX_RETAIN_TTL = 86_400.0
"""Seconds: one day. A lease holds memory that other requests could use."""

CONTINUATION: Properties = {
    "continuation_of": per_prompt(
        string(
            "The rid of the request to continue; its prompt and output, with their KV, come first.",
            least=1,
            most=MAX_RID_CHARS,
        )
    ),
    "continuation_suffix": per_prompt(string("Text that follows the parent's output.")),
    "continuation_ids": either(
        IDS, list_of(nullable(IDS)), about="The suffix as token ids, for all prompts or a list for each."
    ),
    "continuation_at": per_prompt(
        enum("finish", "now", about="Continue the finished parent, or its tokens so far.", default="finish")
    ),
    "continuation_index": per_prompt(whole("Which of the parent's samples.", 0, default=0)),
    "keep_parent": per_prompt(flag("The parent stays, for other children.", default=False)),
    "retain_ttl": per_prompt(
        number(
            "Seconds for which the output's KV is kept for a continuation; meta_info.retained says what was granted.",
            0,
            MAX_RETAIN_TTL,
        )
    ),
    "retain_n": per_prompt(whole("How many of the n outputs are kept; all, where it is missing.", 1)),
    "retain_states": per_prompt(
        whole(
            "For models with recurrent states: how many of the conversation's turn ends, the newest first, keep their "
            "state before all others, so that a later request can continue from there.",
            1,
            default=1,
        )
    ),
}


def continuation_batch_size(fields: dict[str, Any]) -> int | None:
    """How many prompts the lists in ``continuation_of``, ``_suffix`` and ``_ids`` are for; None if none is a list."""
    lists = {name: fields.get(name) for name in ("continuation_of", "continuation_suffix")}
    ids = fields.get("continuation_ids")
    if isinstance(ids, list) and any(isinstance(item, list) for item in ids):
        lists["continuation_ids"] = ids
    sizes = {name: len(value) for name, value in lists.items() if isinstance(value, list)}
    if not sizes:
        return None
    name, size = next(iter(sizes.items()))
    if size == 0:
        raise RequestRefused(f"{name} is an empty list; give one value per prompt", param=name)
    for other, count in sizes.items():
        if count != size:
            raise RequestRefused(f"{name} lists {size} values and {other} lists {count}; one for each", param=other)
    return size


@dataclass(slots=True, frozen=True)
class ContinuationFields:
    """The request that one prompt continues; ``spec`` is None for none. suffix_ids: the suffix, if given as ids."""

    spec: ContinuationSpec | None = None
    suffix_ids: list[int] | None = None


def read_continuations(fields: dict[str, Any], per_prompt: PerPrompt) -> list[ContinuationFields]:
    """One per prompt. Raises RequestRefused."""
    parents = per_prompt.read_values("continuation_of", read_rid, None)
    suffixes = per_prompt.typed("continuation_suffix", str, None)
    id_lists = _id_lists(fields, per_prompt)
    ats = per_prompt.read_values(
        "continuation_at", lambda value, name: one_of(value, ("finish", "now"), name), "finish"
    )
    indices = per_prompt.read_values("continuation_index", _index, 0)
    keeps = per_prompt.typed("keep_parent", bool, False)
    continuations: list[ContinuationFields] = []
    for parent, suffix, ids, at, index, keep in zip(parents, suffixes, id_lists, ats, indices, keeps, strict=True):
        if parent is None:
            asked = {
                "continuation_suffix": suffix is not None, "continuation_ids": ids is not None,
                "continuation_at": at != "finish", "continuation_index": index != 0, "keep_parent": keep,
            }  # fmt: skip
            if name := next((name for name, is_set in asked.items() if is_set), None):
                raise RequestRefused(
                    f"{name} is set without continuation_of; add continuation_of: the rid of the request to continue",
                    param=name,
                )
            continuations.append(ContinuationFields())
            continue
        if suffix is not None and ids is not None:
            raise RequestRefused(
                "continuation_suffix and continuation_ids are both given; give the suffix as text or as token ids",
                param="continuation_suffix",
            )
        spec = ContinuationSpec(parent, index=index, at=at, keep_parent=keep, suffix_text=suffix)
        continuations.append(ContinuationFields(spec, ids))
    return continuations


def read_retain_ttls(per_prompt: PerPrompt) -> list[float | None]:
    """Seconds for which each output is kept; None takes the server's default. Raises RequestRefused."""
    return per_prompt.read_values("retain_ttl", _ttl, None)


def read_retain_ns(per_prompt: PerPrompt) -> list[int | None]:
    """How many outputs of each prompt are kept; None for all. Raises RequestRefused."""
    return per_prompt.read_values("retain_n", _count, None)


def read_retain_states(per_prompt: PerPrompt) -> list[int]:
    """How many turn ends of each conversation keep their recurrent state before others. Raises RequestRefused."""
    return per_prompt.read_values("retain_states", _state_count, 1)


def _id_lists(fields: dict[str, Any], per_prompt: PerPrompt) -> list[list[int] | None]:
    """One per prompt, from one list of ids for all prompts or a list with one such list, or null, for each."""
    given = fields.get("continuation_ids")
    is_nested = isinstance(given, list) and any(isinstance(item, list) for item in given)
    try:
        if not is_nested:
            return [msgspec.convert(given, list[int] | None)] * per_prompt.size
        nested = msgspec.convert(given, list[list[int] | None])
    except msgspec.ValidationError:
        raise RequestRefused(
            "continuation_ids takes a list of token ids, or a list of such lists for a batch", param="continuation_ids"
        ) from None
    return PerPrompt({"continuation_ids": nested}, per_prompt.size, per_prompt.is_batch).read_values(
        "continuation_ids", lambda ids, _: ids, None
    )


def _index(value: Any, name: str) -> int:
    if typed(value, int, name) < 0:
        raise RequestRefused(f"{name} is {value}; use the number of a sample, from 0 to n - 1", param=name)
    return value


def _count(value: Any, name: str) -> int:
    if typed(value, int, name) < 1:
        raise RequestRefused(f"{name} is {value}; use 1 to n, or retain_ttl: 0 to keep none", param=name)
    return value


def _state_count(value: Any, name: str) -> int:
    if typed(value, int, name) < 1:
        raise RequestRefused(f"{name} is {value}; use 1 for the newest turn end alone, or more", param=name)
    return value


def _ttl(value: Any, name: str) -> float:
    seconds = typed(value, float, name)
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_RETAIN_TTL:
        raise RequestRefused(f"{name} is {value}; use 0 to {MAX_RETAIN_TTL:.0f} seconds", param=name)
    return seconds
