"""The expressions that a program appends to its state: plain data. `expressions` makes them.

    s += "text"                                  a string is itself
    s += gen("name", max_tokens=32, stop="\\n")   Gen
    s += beam("name", width=32, max_tokens=3)    Beam
    s += select("name", choices=["yes", "no"])   Select
    s += user("Hi " + gen("x"))                  RoleBegin, ..., RoleEnd

``+`` joins expressions. This module does not depend on servers, tokenizers or threads. The names are those of SGLang's
frontend language (Zheng et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .choices import ChoicesSamplingMethod, token_length_normalized


class Expr:
    """An expression that can be appended to a state; a plain string is one, too."""

    def __add__(self, other: Expr | str) -> Expr:
        return Joined((self, other)) if isinstance(other, Expr | str) else NotImplemented

    def __radd__(self, other: Expr | str) -> Expr:
        return Joined((other, self)) if isinstance(other, Expr | str) else NotImplemented


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Generate text. ``sampling``: the given sampling_params. ``options``: other fields (logprobs). reasoning: the
    name of the parser that separates thoughts from the text; None to leave it as it is."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Beam(Expr):
    """Search for the likeliest sequences, and append the best; fields as in Gen."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Append one of ``choices``, the one that ``method`` takes."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod = token_length_normalized


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """All text from here to the ScopeEnd of this name is the variable ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str


@dataclass(frozen=True, slots=True)
class Joined(Expr):
    """Expressions one after the other."""

    parts: tuple[Expr | str, ...]


Step = str | Gen | Beam | Select | RoleBegin | RoleEnd | ScopeBegin | ScopeEnd


def steps_of(expr: Expr | str) -> Iterator[Step]:
    """The expression's steps in order. Raises TypeError if it is not an expression."""
    if isinstance(expr, Joined):
        for part in expr.parts:
            yield from steps_of(part)
    elif isinstance(expr, Step):
        yield expr
    else:
        raise TypeError(f"{type(expr).__name__} cannot be appended to a state; use str, gen, beam, select or a role")
