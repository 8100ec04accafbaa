"""The sampling parameters in SGLang's names, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Any

from ...runtime.checkpoint.generation_config import SAMPLING_NAMES
from ...scheduler.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
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
from ..description.json_schema import Properties, Schema, either, enum, flag, list_of, number, string, whole
from .shared_schema import TOKEN_ID

_LIMITED: Properties = {
    "max_new_tokens": whole(
        "Tokens to generate at most; null: up to the context's end. 0 computes the prompt and samples nothing.", 0
    ),
    "min_new_tokens": whole("Nothing ends the output before it has this many tokens.", 0),
    "temperature": number("0 is greedy.", 0, MAX_TEMPERATURE),
    "top_p": number("Sample among the likeliest tokens that have this probability together.", above=0, high=1),
    "top_k": whole("Sample among so many of the likeliest tokens; -1 or 0: no limit.", -1),
    "min_p": number("Sample among tokens that have this share of the likeliest one's probability.", 0, 1),
    "frequency_penalty": number("Taken from a token's logit for each time the output has it.", -2, 2),
    "presence_penalty": number("Taken from a token's logit once the output has it.", -2, 2),
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
    "spaces_between_special_tokens": flag("As transformers has it."),
    "seed": whole("The same seed and prompt give the same tokens; -1: drawn by the server.", MIN_SEED, MAX_SEED),
    "n": whole("Independent samples; of a beam search, how many of its sequences are returned.", 1, MAX_SEQUENCES),
    "beam_width": whole("Search for the likeliest sequences with so many beams; 0: sample.", 0, MAX_SEQUENCES),
    "length_penalty": number("Of a beam search: scores are divided by length ** this.", -10, 10),
    "early_stopping": enum(True, False, "never", about="When a beam search ends, as transformers defines it."),
    "item_trie": string("Only items of this trie may come out.", least=1, most=MAX_NAME_CHARS),
    "allowed_token_ids": list_of(TOKEN_ID, "The only ids that may be sampled.", least=1, most=MAX_ALLOWED_TOKEN_IDS),
    "bad_words": list_of(
        string(least=1),
        f"Words that are not generated; {MAX_BAD_WORD_CHARS:,} characters together at most.",
        most=MAX_BAD_WORDS,
    ),
}


def _with_default(name: str, schema: Schema) -> Schema:
    default: Any = getattr(SamplingParams(), name)
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
