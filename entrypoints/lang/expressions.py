"""The functions by which programs make expressions. Settings that cannot be served are refused here.

The names, and the order of the parameters, are those of SGLang's frontend language.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..reasoning_parsers.registry import reasoning_parser
from .choices import CHOICES_METHODS, ChoicesSamplingMethod, token_length_normalized
from .ir import Beam, Expr, Gen, Joined, RoleBegin, RoleEnd, Select, steps_of

_OF_TYPE = {
    "int": r"-?(0|[1-9][0-9]{0,17})",
    "float": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?",
    "bool": "True|False",
    "str": r'"[^"\\\x00-\x1f]*"',
}
"""Regular expressions of the values of a type, as Python writes them."""


GRAMMAR = "grammar"
"""As a choices_method: the choice is generated, held to the choices."""


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | type | None = None,
    *,
    ebnf: str | None = None,
    repetition_penalty: float | None = None,
    logit_bias: dict[int, float] | None = None,
    seed: int | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
    item_trie: str | None = None,
    **unknown: Any,
) -> Expr:
    """Generate text and store it as ``name``. Settings left None take their values from `run`, else from the server.

    n: samples; the variable is then a list, and the state continues with the first. choices: the same as `select`.
    regex, json_schema, ebnf: the form of the text; a pydantic model stands for its schema. dtype: int, float, bool or
    str (in quotes), or a pydantic model; the variable is the text all the same. One of the four at most.
    The other names mean what they mean in ``POST /generate``; max_tokens is max_new_tokens there, min_tokens
    min_new_tokens. Raises ValueError.
    """
    _check_name(name)
    refuse_unknown("gen", gen, unknown)
    if choices is not None:
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    if choices_method is not None:
        raise ValueError("gen: choices_method selects one of choices: give choices, too")
    sampling = _form(regex, json_schema, ebnf, dtype) | {
        "max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "n": n, "stop": _strings(stop),
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "stop_regex": _strings(stop_regex),
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty, "logit_bias": _biases(logit_bias), "seed": seed,
        "ignore_eos": ignore_eos, "no_stop_trim": no_stop_trim, "skip_special_tokens": skip_special_tokens,
        "item_trie": item_trie,
    }  # fmt: skip
    options = _logprobs(return_logprob, top_logprobs_num, return_text_in_logprobs)
    return Gen(name, _given(sampling), options | _given({"logprob_start_len": logprob_start_len}))


def gen_int(name: str | None = None, max_tokens: int | None = None, **more: Any) -> Expr:
    """As `gen` with dtype=int."""
    return gen(name, max_tokens, dtype=int, **more)


def gen_string(name: str | None = None, max_tokens: int | None = None, **more: Any) -> Expr:
    """As `gen` with dtype=str: a text in quotes."""
    return gen(name, max_tokens, dtype=str, **more)


def beam(
    name: str | None,
    width: int,
    max_tokens: int | None = None,
    item_trie: str | None = None,
    n: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] | None = None,
    stop: str | Sequence[str] | None = None,
    min_tokens: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    logit_bias: dict[int, float] | None = None,
    ignore_eos: bool | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    **unknown: Any,
) -> Expr:
    """Search for the likeliest sequences, ``width`` at a time, and store their texts as ``name``: always a list, best
    first, of ``n`` texts (by default ``width``), or fewer if there are no more. The state continues with the best.

    item_trie: a trie on the server; its items are the only possible sequences. The other names mean what they mean in
    ``sampling_params`` of POST /generate; max_tokens is max_new_tokens there. Scores are in the step's meta.
    """
    _check_name(name)
    refuse_unknown("beam", beam, unknown)
    sampling = {
        "beam_width": width,
        "n": width if n is None else n,
        "max_new_tokens": max_tokens,
        "item_trie": item_trie,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "stop": _strings(stop),
        "min_new_tokens": min_tokens,
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "logit_bias": _biases(logit_bias),
        "ignore_eos": ignore_eos,
        "no_stop_trim": no_stop_trim,
        "skip_special_tokens": skip_special_tokens,
    }
    return Beam(name, _given(sampling), _logprobs(return_logprob, top_logprobs_num, return_text_in_logprobs))


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str = token_length_normalized,
    **unknown: Any,
) -> Expr:
    """Append one of ``choices`` and store it as ``name``: by default the one with the highest mean log-probability per
    token. choices_method: another method of `choices`, by name, or your own, or "grammar".

    Each choice is scored as a continuation of the state, tokenised by itself. With "grammar" one is generated instead:
    a single request, in which the model picks its way token by token, and with a temperature draws it. Raises
    ValueError for no choices, an empty one, an unknown method, or a temperature where the best choice is taken.
    """
    _check_name(name)
    refuse_unknown("select", select, unknown)
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"select: choices is {choices!r}; give a list of at least one non-empty string")
    if choices_method == GRAMMAR:
        most = max(len(choice.encode()) for choice in choices) + 1
        return Gen(name, {"choice": [*choices], "max_new_tokens": most, "temperature": temperature})
    if temperature > 1e-5:
        raise ValueError(f"select: temperature is {temperature}; the best choice is taken, none is drawn: use 0")
    return Select(name, tuple(choices), _method(choices_method))


def separate_reasoning(expr: Expr | str | None = None, model_type: str | None = None) -> Expr:
    """Separate the thoughts from the text that the gens in ``expr`` generate: the state's text gets only the answer,
    the variable ``NAME`` has the answer, and ``NAME_reasoning_content`` the thought.

    model_type: the model's format of thoughts, a name that ``--reasoning-parser`` takes. Raises ValueError for an
    unknown one, and for a gen without a name.
    """
    if model_type is None:
        raise ValueError("separate_reasoning: model_type is None; name the model's format of thoughts, such as 'qwen3'")
    reasoning_parser(model_type)
    parts = []
    for step in () if expr is None else steps_of(expr):
        if isinstance(step, Gen):
            if step.name is None:
                raise ValueError(
                    "separate_reasoning: a gen has no name, so its thought would have none, either; give it a name"
                )
            step = replace(step, reasoning=model_type)
        parts.append(step)
    return Joined(tuple(parts))


def system(expr: Expr | str | None = None) -> Expr:
    """A system message, formatted by the model's chat template."""
    return role_message("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    """A user message."""
    return role_message("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    """An assistant message; usually ``assistant(gen("answer"))``."""
    return role_message("assistant", expr)


def role_message(role: str, expr: Expr | str | None = None) -> Expr:
    """A message of any role the chat template knows; None for an empty one."""
    return Joined((RoleBegin(role), "" if expr is None else expr, RoleEnd(role)))


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def refuse_unknown(where: str, function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raise TypeError for the first of these keywords, which ``function`` does not name among its parameters."""
    for name in unknown:
        known = [each.name for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        raise TypeError(f"{where}() has no parameter {name!r}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: a suggestion, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _form(regex: str | None, json_schema: Any, ebnf: str | None, dtype: type | str | None) -> dict[str, Any]:
    """The fields that say what the text looks like. Raises ValueError."""
    given = _given({"regex": regex, "json_schema": json_schema, "ebnf": ebnf, "dtype": dtype})
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ValueError(f"gen: {first} and {second} both say what the text looks like; give one of them")
    if dtype is not None:
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        if name in _OF_TYPE:
            return {"regex": _OF_TYPE[name]}
        if not hasattr(dtype, "model_json_schema"):
            raise ValueError(f"gen: dtype is {dtype!r}; use int, float, bool, str or a pydantic model")
        json_schema, given = dtype, {"json_schema": dtype}
    if hasattr(json_schema, "model_json_schema"):
        given["json_schema"] = json_schema.model_json_schema()
    return given


def _method(given: ChoicesSamplingMethod | str) -> ChoicesSamplingMethod:
    if isinstance(given, str) and given in CHOICES_METHODS:
        return CHOICES_METHODS[given]
    if isinstance(given, str) or not callable(given):
        known = ", ".join((*CHOICES_METHODS, GRAMMAR))
        raise ValueError(f"select: choices_method is {given!r}; use one of {known}, or a ChoicesSamplingMethod")
    return given


def _check_name(name: Any) -> None:
    if not isinstance(name, str | None) or name == "":
        raise ValueError(f"the name of a variable is {name!r}; use a non-empty string, or None for none")


def _strings(stop: str | Sequence[str] | None) -> str | list[str] | None:
    return stop if stop is None or isinstance(stop, str) else list(stop)


def _biases(given: dict[int, float] | None) -> dict[str, float] | None:
    return None if given is None else {str(token_id): bias for token_id, bias in given.items()}


def _logprobs(return_logprob: bool | None, top_logprobs_num: int | None, with_text: bool | None) -> dict[str, Any]:
    options = {
        "return_logprob": return_logprob,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": with_text,
    }
    return _given(options)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
