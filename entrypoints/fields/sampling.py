"""Reads ``sampling_params`` in SGLang's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ...runtime.text.stop_regex import check_stop_regex
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import MAX_BIAS, SamplingParams
from .foreign_fields import settle_fields
from .ignored import Ignored
from .reading import PerPrompt, shown, spread

SAMPLING_ALIASES = {"sampling_seed": "seed"}

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

_FIELDS = SamplingParams.__struct_fields__
_SERVED = (*_FIELDS, *SAMPLING_ALIASES)


def read_sampling_params(given: Any, per_prompt: PerPrompt, ignored: Ignored | None = None) -> list[SamplingParams]:
    """One per prompt, from ``sampling_params`` (an object, a list of them, or None) and the field ``no_stop_trim``
    beside it. ignored: gets what has no effect. Raises RequestRefused."""
    given = {} if given is None else given
    trims = per_prompt.typed("no_stop_trim", bool, None)
    if not isinstance(given, list) and len(set(trims)) == 1:
        return [parse_sampling_params(given, no_stop_trim=trims[0], ignored=ignored)] * per_prompt.size
    each = spread(given, "sampling_params", per_prompt.size, per_prompt.is_batch)
    wheres = [f"sampling_params[{i}]" if isinstance(given, list) else "sampling_params" for i in range(len(each))]
    return [
        parse_sampling_params({} if item is None else item, where=where, no_stop_trim=trim, ignored=ignored)
        for item, where, trim in zip(each, wheres, trims, strict=True)
    ]


def with_defaults(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters in SGLang's names, with the model's own defaults where the request says nothing, or null. A
    beam search, which draws nothing, takes none of them."""
    if given.get("beam_width"):
        return given
    return {**given, **{name: value for name, value in defaults.items() if given.get(name) is None}}


def parse_sampling_params(
    given: Any,
    *,
    where: str = "sampling_params",
    no_stop_trim: bool | None = None,
    ignored: Ignored | None = None,
) -> SamplingParams:
    """A JSON object in SGLang's names -> SamplingParams. Raises RequestRefused.

    no_stop_trim: the value of the request's own field, outside the object. ignored: gets what has no effect.
    """
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {shown(given)}; it takes an object", param=where)
    given = settle_fields(given, "sampling_params", _SERVED, ignored or Ignored(), where=f"{where}.")
    # null means the default, but max_new_tokens: null means "up to the context length".
    values = {
        SAMPLING_ALIASES.get(name, name): value
        for name, value in given.items()
        if (value is not None or name == "max_new_tokens")
    }
    if values.get("stop_regex") == "":
        del values["stop_regex"]  # SGLang's clients say so where there is none
    for name in ("stop", "stop_regex"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = _logit_bias(bias, where)
    if values.get("allowed_token_ids") == []:
        name = f"{where}.allowed_token_ids"
        raise RequestRefused(f"{name} is empty, so no token may be sampled; name some ids, or leave it out", param=name)
    for name in ("beam_width", "top_k"):
        if values.get(name) == 0 and type(values[name]) is int:
            del values[name]  # 0 means no search, and no limit
    if values.get("seed") == -1 and type(values["seed"]) is int:
        del values["seed"]  # as llama.cpp and vLLM have it
    if (early := values.get("early_stopping", False)) not in (True, False, "never") or type(early) in (int, float):
        name = f"{where}.early_stopping"
        raise RequestRefused(f'{name} is {shown(early)}; it takes true, false or "never"', param=name)
    if no_stop_trim is not None and values.setdefault("no_stop_trim", no_stop_trim) != no_stop_trim:
        raise RequestRefused(
            f"no_stop_trim and {where}.no_stop_trim contradict each other; give it once", param="no_stop_trim"
        )
    try:
        params = msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, param = _readable(str(error))
        raise RequestRefused(f"{where}.{message}", param=f"{where}.{param}" if param else where) from None
    if params.stop_regex:
        check_stop_regex(params.stop_regex, f"{where}.stop_regex")
    return params


def _token_id(key: Any) -> int:
    """Raises ValueError."""
    if not isinstance(key, str | int):  # an Engine's caller may have given a float
        raise ValueError
    return int(key)


def _logit_bias(given: dict, where: str) -> dict[int, Any]:
    """Turn the keys into token ids; JSON has only strings. Values beyond the limit count as it, as in vLLM."""
    try:
        return {_token_id(key): _within_bias(value) for key, value in given.items()}
    except ValueError:
        raise RequestRefused(f"{where}.logit_bias: its keys must be token ids", param=f"{where}.logit_bias") from None


def _within_bias(value: Any) -> Any:
    if type(value) in (int, float) and value == value:
        return min(max(value, -MAX_BIAS), MAX_BIAS)
    return value


def _readable(message: str) -> tuple[str, str | None]:
    """msgspec's "Expected `int`, got `str` - at `$.top_k`" -> ("top_k: expected int, got str", "top_k")."""
    located = re.fullmatch(r"(.*?) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if located is None:
        name = message.split(" ", 1)[0]
        return message, name if name in _FIELDS else None
    what, path = located.groups()
    name = re.split(r"[.\[]", path)[0]
    if not name:
        # Our own message, which starts with the field's name.
        first = what.split(" ", 1)[0]
        return what, first if first in _FIELDS else None
    # null never gets here: it means the default.
    what = what.replace("`", "").replace(" | null", "")
    return f"{name}: {what[0].lower() + what[1:]}", name
