"""The expressions that a program appends to its state: plain data, and the constructors that programs call.

    s += "text"                                  a string is itself
    s += gen("name", max_tokens=32, stop="\\n")   Gen
    s += beam("name", width=32, max_tokens=3)    Beam
    s += select("name", choices=["yes", "no"])   Select
    s += user("Hi " + gen("x"))                  RoleBegin, ..., RoleEnd

``+`` joins expressions. Nothing here knows of servers, tokenizers or threads. The names are those of SGLang's frontend
language (Zheng et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


class Expr:
    """Anything but a string that can be appended to a state."""

    def __add__(self, other: Expr | str) -> Expr:
        return Joined((self, other)) if isinstance(other, Expr | str) else NotImplemented

    def __radd__(self, other: Expr | str) -> Expr:
        return Joined((other, self)) if isinstance(other, Expr | str) else NotImplemented


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Generate text. ``sampling``: the sampling_params that were given; ``options``: other fields (logprobs)."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beam(Expr):
    """Search for the likeliest sequences, and append the best; fields as in Gen."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Append the likeliest of ``choices``."""

    name: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class Joined(Expr):
    """Expressions one after the other."""

    parts: tuple[Expr | str, ...]


Step = str | Gen | Beam | Select | RoleBegin | RoleEnd


def steps_of(expr: Expr | str) -> Iterator[Step]:
    """The expression's steps in order. Raises TypeError if it is not an expression."""
    if isinstance(expr, Joined):
        for part in expr.parts:
            yield from steps_of(part)
    elif isinstance(expr, Step):
        yield expr
    else:
        raise TypeError(f"{type(expr).__name__} cannot be appended to a state; use str, gen, beam, select or a role")


_NOT_SUPPORTED = {
    "regex": "constrained decoding is not there yet",
    "json_schema": "constrained decoding is not there yet",
    "dtype": "constrained decoding is not there yet; generate text and convert it",
    "stop_regex": "use stop with plain strings",
    "choices_method": "choices are scored by their token-length-normalised log-probability only",
}
_LENGTH_NORMALIZED = "token_length_normalized"


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: dict[int, float] | None = None,
    seed: int | None = None,
    ignore_eos: bool | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    item_trie: str | None = None,
    choices: Sequence[str] | None = None,
    **unsupported: Any,
) -> Expr:
    """Generate text and store it as ``name``. Settings left None take their values from `run`, else from the server.

    n: samples; the variable is then a list, and the state goes on with the first. choices: the same as `select`.
    The other names mean what they mean in ``sampling_params`` of POST /generate; max_tokens is max_new_tokens there.
    Raises ValueError for SGLang's constraints (regex, json_schema, dtype), which are not supported.
    """
    _check_name(name)
    _refuse(unsupported, "gen")
    if choices is not None:
        return select(name, choices, temperature or 0.0)
    sampling = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": _strings(stop),
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": _biases(logit_bias),
        "seed": seed,
        "ignore_eos": ignore_eos,
        "no_stop_trim": no_stop_trim,
        "skip_special_tokens": skip_special_tokens,
        "item_trie": item_trie,
    }
    return Gen(name, _given(sampling), _logprobs(return_logprob, top_logprobs_num, return_text_in_logprobs))


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
) -> Expr:
    """Search for the likeliest sequences, ``width`` at a time, and store their texts as ``name``: always a list, best
    first, of ``n`` texts (by default ``width``), or fewer if there are no more. The state goes on with the best.

    item_trie: the trie on the server whose items are the only sequences. The other names mean what they mean in
    ``sampling_params`` of POST /generate; max_tokens is max_new_tokens there. Scores are in the step's meta.
    """
    _check_name(name)
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
    choices_method: str = _LENGTH_NORMALIZED,
) -> Expr:
    """Append the choice with the highest mean log-probability per token, and store it as ``name``.

    Each choice is scored as a continuation of the state, tokenised by itself. Raises ValueError for no choices, an
    empty one, a temperature (the best choice is taken, not drawn), or another method.
    """
    _check_name(name)
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"select: choices is {choices!r}; give a list of at least one non-empty string")
    if temperature != 0.0:
        raise ValueError(f"select: temperature is {temperature}; the best choice is taken, none is drawn: use 0")
    if choices_method != _LENGTH_NORMALIZED:
        raise ValueError(f"select: choices_method is {choices_method!r}; only {_LENGTH_NORMALIZED!r} is supported")
    return Select(name, tuple(choices))


def system(expr: Expr | str | None = None) -> Expr:
    """A system message, written as the model's chat template writes it."""
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


def _check_name(name: Any) -> None:
    if not isinstance(name, str | None) or name == "":
        raise ValueError(f"the name of a variable is {name!r}; use a non-empty string, or None for none")


def _refuse(given: dict[str, Any], where: str) -> None:
    for name, value in given.items():
        if name not in _NOT_SUPPORTED:
            raise TypeError(f"{where}() has no parameter {name!r}")
        if value is not None:
            raise ValueError(f"{where}: {name} is not supported: {_NOT_SUPPORTED[name]}")


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
