"""Reading the fields of a JSON body: unknown fields, wrong types, one value or one per prompt, names of requests.

Every API uses these readers. All of them raise RequestRefused (400), naming the field and the fix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import MAX_INT, flag, string, taken
from .ignored import Ignored

T = TypeVar("T")

MAX_RID_CHARS = 512

_LONGEST_RID = 2 * MAX_RID_CHARS
"""With prefixes; in a longer one, which may have megabytes, none are looked for."""

_SHOWN_CHARS = 60
"""Characters of a value that an error shows."""

MAX_NAME_CHARS = 128
"""Length up to which the name of an unknown field is compared with others."""

_RESPONSE_ID_PREFIX = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)+")
"""The id of a response, OpenAI's or Anthropic's, is one of these and a rid; both name the same request. All that a name
begins with are dropped: a name that has been read once means the same when it is read again."""

STORED_RESPONSE_PREFIX = "resp_"
"""Begins the ids of OpenAI's Responses."""

_NONE: Mapping[str, tuple] = MappingProxyType({})


def refuse_unserved(
    given: dict[str, Any],
    served: Collection[str],
    unsupported: Mapping[str, tuple] = _NONE,
    without_effect: tuple = (),
    *,
    where: str = "",
    instead: dict[str, str] | None = None,
    ignored: Ignored | None = None,
) -> None:
    """Refuse unknown fields of an object, and unsupported ones that ask for something. The fields of a whole request
    are for `foreign_fields.settle_fields`.

    where: prefix of names in messages. instead: unsupported field -> what to use instead. ignored: takes unknown fields
    where the server does.
    """
    for name, value in given.items():
        if name in served or name in without_effect:
            continue
        if name not in unsupported:
            pass_or_refuse_unknown(name, served, (*unsupported, *without_effect), ignored, where=where)
            continue
        if isinstance(value, dict) and all(item is None for item in value.values()):
            value = {}  # SGLang's client sends session_params with a null for each of its fields
        # 0 == False in Python, but not for the caller of an API.
        if value is not None and not any(value == off and type(value) is type(off) for off in unsupported[name]):
            off = ", ".join(["null", *(msgspec.json.encode(value).decode() for value in unsupported[name])])
            use = f"use {where}{instead[name]}" if instead and name in instead else "leave it out"
            raise RequestRefused(
                f"{where}{name} is not supported; {use} (accepted: {off})",
                code="unsupported_field",
                param=f"{where}{name}",
            )


def pass_or_refuse_unknown(
    name: str, served: Collection[str], listed: Collection[str], ignored: Ignored | None, *, where: str
) -> None:
    """Raises RequestRefused, with a hint at the nearest name, unless the server ignores unknown fields. listed: names
    that are known and not served."""
    if ignored is not None and ignored.takes_unknown:
        ignored.add_field(f"{where}{name}", "unknown")
        return
    name = str(name)  # of an Engine's caller it may be anything
    if len(name) > MAX_NAME_CHARS:  # the search for near names takes time and memory with every character
        raise RequestRefused(
            f"unknown field {where}{name[:MAX_NAME_CHARS]}...; its name has {len(name)} characters",
            code="unknown_field",
        )
    near = difflib.get_close_matches(name, (*served, *listed), n=1, cutoff=0.6)
    hint = f"; did you mean {where}{near[0]}?" if near else f"; known fields: {', '.join(served)}"
    raise RequestRefused(f"unknown field {where}{name}{hint}", code="unknown_field", param=f"{where}{name}")


def typed(value: Any, kind: type[T], name: str) -> T:
    """The value, which must have exactly this JSON type; a whole number passes as a float. It must fit 64 bits."""
    if type(value) is int and not -MAX_INT <= value <= MAX_INT and kind in _NUMBERS:
        raise RequestRefused(f"{name} is {shown(value)}; use a number of less than 64 bits", param=name)
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise RequestRefused(f"{name} is {shown(value)}; it takes {_A_KIND[kind]}", param=name)
    return value


_NUMBERS: tuple[type, ...] = (int, float)
_A_KIND = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def shown(value: Any) -> str:
    """The value as the caller wrote it, cut to a readable length."""
    if isinstance(value, str | list):
        value = value[:_SHOWN_CHARS]  # before it is encoded: it may have megabytes
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def one_of(value: Any, choices: tuple[str, ...], name: str) -> Any:
    if value not in choices:
        raise RequestRefused(f"{name} is {shown(value)}; it takes {' or '.join(choices)}", param=name)
    return value


def spread(value: Any, name: str, size: int, is_batch: bool) -> list:
    """One value per prompt, from one value or a list of them."""
    if not isinstance(value, list):
        return [value] * size
    if not is_batch:
        raise RequestRefused(f"{name} is a list, but the call has a single prompt; give one value", param=name)
    if len(value) != size:
        raise RequestRefused(f"{name} lists {len(value)} values for {size} prompts; give one for each", param=name)
    return value


class PerPrompt:
    """Spreads the fields of a request over its ``size`` prompts. null means the default, also inside a list."""

    def __init__(self, fields: dict[str, Any], size: int, is_batch: bool) -> None:
        self._fields = fields
        self.size = size
        self.is_batch = is_batch

    def read_values(self, name: str, check: Callable[[Any, str], T], default: T) -> list[T]:
        """One value per prompt. ``check(value, name)`` returns the value to use, or refuses it."""
        if name not in self._fields:
            return [default] * self.size
        values = spread(self._fields.get(name), name, self.size, self.is_batch)
        return [default if value is None else check(value, name) for value in values]

    def typed(self, name: str, kind: type[T], default: T) -> list[T]:
        return self.read_values(name, lambda value, name: typed(value, kind, name), default)


RID = string("The request's name; the X-Request-Id header where it is missing.", least=1, most=MAX_RID_CHARS)

MODEL = string(
    "The served model's name, or that of an adapter, or NAME:ADAPTER. Any other name means the served model too, until "
    "--served-model-name is set or an adapter has been loaded; with --serve-any-model-name, even then."
)


# -- names -------------------------------------------------------------------------------------------------------------


def read_rid(given: Any, name: str) -> str:
    """A request's name. The prefix of a response's id is dropped, so that both forms mean the same request."""
    rid = given
    if isinstance(given, str) and len(given) <= _LONGEST_RID and (prefix := _RESPONSE_ID_PREFIX.match(given)):
        rid = given[prefix.end() :]
    if not isinstance(rid, str) or not 1 <= len(rid) <= MAX_RID_CHARS:
        raise RequestRefused(
            f"{name} is {shown(given)}; it takes a string of 1 to {MAX_RID_CHARS} characters", param=name
        )
    return rid


def read_rids(given: Any, size: int, is_batch: bool) -> tuple[str, list[str]]:
    """(name of the request, one rid per prompt). The rids of a batch are its name with a number added."""
    if isinstance(given, list):
        if not is_batch or len(given) != size:
            raise RequestRefused(f"rid lists {len(given)} names for {size} prompts; give one for each", param="rid")
        return uuid4().hex, [read_rid(item, "rid") for item in given]
    group = uuid4().hex if given is None else read_rid(given, "rid")
    return group, [f"{group}_{i}" for i in range(size)] if is_batch else [group]


STREAM = flag("Answer with server-sent events, as tokens come.", default=False)

STREAM_OPTIONS = taken(
    {"include_usage": flag("The last event says how many tokens there were.", default=False)},
    "With stream: true only.",
    title="StreamOptions",
)

# -- stream_options ----------------------------------------------------------------------------------------------------

_STREAM_OPTIONS_OFF: dict[str, tuple] = {"include_obfuscation": (False,)}


def include_usage(options: Any, stream: bool, ignored: Ignored | None = None) -> bool:
    """Read ``stream_options``, which OpenAI's clients send, and SGLang's to /generate too: does the last event of the
    stream have the token counts? Without a stream they ask for nothing: a whole answer has the counts. Raises
    RequestRefused."""
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    refuse_unserved(
        options,
        ("include_usage",),
        _STREAM_OPTIONS_OFF,
        ("continuous_usage_stats",),
        where="stream_options.",
        ignored=ignored,
    )
    if options.get("continuous_usage_stats") and ignored is not None:
        ignored.add_field("stream_options.continuous_usage_stats", "the last event has the counts")
    include = options.get("include_usage")
    return typed(False if include is None else include, bool, "stream_options.include_usage") and stream
