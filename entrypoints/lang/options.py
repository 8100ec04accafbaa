"""The options that `run`, `run_async` and `run_batch` take besides the program's own arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from .backends import Backend
from .default_backend import chosen_backend
from .expressions import did_you_mean

DEFAULT_RETAIN_TTL = 5.0

SAMPLING_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Defaults for every `gen` of a run."""

DETAIL_OPTIONS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
"""Further defaults for every `gen`: fields of the request beside its sampling_params."""

SEARCH_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Defaults that a `beam` takes, too. The others are for drawing tokens, and a search draws none."""

_WITHOUT_EFFECT = ("use_thread",)
"""SGLang's option to run the steps in their own thread; they have the same meaning either way."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """retain_ttl: seconds for which the server keeps a finished step's KV for the next one; with 0 it keeps nothing,
    and the next step uses what the cache still holds. stream: `gen` delivers text as it is generated. sampling,
    details: defaults for every `gen`."""

    backend: Backend
    stream: bool = False
    retain_ttl: float = DEFAULT_RETAIN_TTL
    sampling: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def search(self) -> dict[str, Any]:
        """Defaults for every `beam`."""
        return {name: value for name, value in self.sampling.items() if name in SEARCH_OPTIONS}


OPTION_NAMES = frozenset(
    {
        *SAMPLING_OPTIONS,
        *DETAIL_OPTIONS,
        *_WITHOUT_EFFECT,
        *(option.name for option in fields(RunOptions)),
    }
    - {"sampling", "details"}
)


def split_options(given: dict[str, Any], parameters: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `run` -> (options, arguments of the program). ``parameters``: the program's parameters that still
    need a value; a keyword with such a name is an argument, even if it is an option's name."""
    arguments = {name: value for name, value in given.items() if name in parameters or name not in OPTION_NAMES}
    return {name: value for name, value in given.items() if name not in arguments}, arguments


def read_options(given: dict[str, Any]) -> RunOptions:
    """Options by name -> RunOptions. Raises ValueError for a wrong one, or without a backend."""
    options = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    backend = chosen_backend(options.pop("backend", None))
    if not options.get("stop_regex", True):
        del options["stop_regex"]  # an empty one means none, as in SGLang
    sampling = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
    details = {name: options.pop(name) for name in DETAIL_OPTIONS if name in options}
    retain_ttl = options.get("retain_ttl", DEFAULT_RETAIN_TTL)
    if not isinstance(retain_ttl, int | float) or not 0 <= retain_ttl < float("inf"):
        raise ValueError(f"retain_ttl is {retain_ttl!r}; use a number of seconds, 0 or more")
    return RunOptions(backend=backend, sampling=_given(sampling), details=_given(details), **options)


def unknown_keyword(where: str, name: str, parameters: Collection[str]) -> TypeError:
    """The error for a keyword that is neither an option nor a parameter of the program."""
    return TypeError(
        f"{where}: {name!r} is neither an option nor a parameter{did_you_mean(name, {*parameters, *OPTION_NAMES})}"
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
