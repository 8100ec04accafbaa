"""Reads ``sampling_params`` in SGLang's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ...runtime.checkpoint.hf_config import SAMPLING_NAMES
from ...runtime.text.stop_regex import check_stop_regex
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_NAME_CHARS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_REGEX,
    MAX_STOP_REGEX_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_SEED,
    SamplingParams,
)
from ..description.json_schema import TOKEN_ID, Properties, Schema, either, enum, flag, list_of, number, string, whole
from .foreign_fields import settle_fields
from .grammars import GRAMMARS, take_grammar
from .ignored import Ignored
from .reading import PerPrompt, shown, spread

SAMPLING_ALIASES = {"sampling_seed": "seed"}

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

_LIMITED: Properties = {
    "max_new_tokens": whole(
        "Tokens to generate at most; null: up to the context's end. 0 computes the prompt and samples nothing.", 0
    ),
    "min_new_tokens": whole("The output does not end before it has this many tokens.", 0),
    "temperature": number("0 is greedy.", 0, MAX_TEMPERATURE),
    "top_p": number("Sample among the likeliest tokens that have this probability together.", above=0, high=1),
    "top_k": whole("Sample among this many of the likeliest tokens; -1 or 0: no limit.", -1),
    "min_p": number("Sample among tokens that have this share of the likeliest one's probability.", 0, 1),
    "frequency_penalty": number("Subtracted from a token's logit for each time the output has it.", -2, 2),
    "presence_penalty": number("Subtracted from a token's logit once the output has it.", -2, 2),
    "repetition_penalty": number(
        "Divides the logits of tokens that prompt or output have.", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    ),
    "logit_bias": {
        "type": "object",
        "description": "Token id -> what is added to its logit; beyond -100 and 100 it counts as these.",
        "propertyNames": {"pattern": "^[0-9]{1,18}$"},
        "additionalProperties": number(""),
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "stop": either(
        string(least=1),
        list_of(string(least=1), most=MAX_STOPS),
        about=f"The output ends before any of these texts; {MAX_STOP_CHARS:,} characters together at most.",
    ),
    "stop_regex": either(
        string(),
        list_of(string(least=1), most=MAX_STOP_REGEX),
        about="Regular expressions (RE2's syntax) that end the output where they match; the match stays in the text. "
        f"{MAX_STOP_REGEX_CHARS} characters together at most.",
    ),
    "stop_token_ids": list_of(TOKEN_ID, "Ids that end the output.", most=MAX_STOP_TOKEN_IDS),
    "ignore_eos": flag("The end-of-text token does not end the output."),
    "no_stop_trim": flag("Leave the stop string in the text."),
    "skip_special_tokens": flag("Leave special tokens out of the text."),
    "spaces_between_special_tokens": flag("As in transformers."),
    "seed": whole("The same seed and prompt give the same tokens; -1: drawn by the server.", MIN_SEED, MAX_SEED),
    "n": whole("Independent samples; of a beam search, how many of its sequences are returned.", 1, MAX_SEQUENCES),
    "beam_width": whole("Number of beams of a beam search; 0: sampling.", 0, MAX_SEQUENCES),
    "length_penalty": number("Of a beam search: scores are divided by length ** this.", -10, 10),
    "early_stopping": enum(True, False, "never", about="When a beam search ends, as transformers defines it."),
    "item_trie": string("Constrains the output to items of this trie.", least=1, most=MAX_NAME_CHARS),
    **GRAMMARS,
    "allowed_token_ids": list_of(TOKEN_ID, "The only ids that may be sampled.", least=1, most=MAX_ALLOWED_TOKEN_IDS),
    "bad_words": list_of(
        string(least=1),
        f"Words that are not generated; {MAX_BAD_WORD_CHARS:,} characters together at most.",
        most=MAX_BAD_WORDS,
    ),
}


def _with_default(name: str, schema: Schema) -> Schema:
    default: Any = getattr(SamplingParams(), name, None)
    if isinstance(default, tuple):
        default = list(default)
    if default == [] and schema.get("minItems"):
        default = None  # an empty list is refused, and null leaves the field out
    return schema | {"default": default}


SAMPLING: Properties = {name: _with_default(name, schema) for name, schema in _LIMITED.items()}
SAMPLING["sampling_seed"] = SAMPLING["seed"] | {"description": "Another name of seed."}


def with_model_defaults(properties: Properties) -> Properties:
    """For the APIs in which a model's own sampling parameters are the defaults."""
    return {name: _of_model(schema) if name in SAMPLING_NAMES else schema for name, schema in properties.items()}


def _of_model(schema: Schema) -> Schema:
    rest = {name: value for name, value in schema.items() if name != "default"}
    otherwise = f"; otherwise {schema['default']}" if "default" in schema else ""
    about = f"{schema['description']} By default the model's (default_sampling_params of /model_info){otherwise}."
    return rest | {"description": about.strip()}


_FIELDS = tuple(_LIMITED)
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
    if (grammar := take_grammar(values, f"{where}.")) is not None:
        values["grammar"] = grammar
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
