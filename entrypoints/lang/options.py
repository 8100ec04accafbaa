"""The options that `run`, `run_async` and `run_batch` take besides the program's own arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .backends import Backend, as_backend

DEFAULT_RETAIN_TTL = 5.0

SAMPLING_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Defaults for every `gen` of a run."""

SEARCH_OPTIONS = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Defaults that a `beam` takes too. The others say how to draw a token, and a search draws none."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """retain_ttl: seconds for which the server keeps a finished step's KV for the next one; with 0 it keeps nothing,
    and the next step uses what the cache still holds. stream: `gen` delivers text as it is generated. sampling:
    defaults for every `gen`."""

    backend: Backend
    stream: bool = False
    retain_ttl: float = DEFAULT_RETAIN_TTL
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def search(self) -> dict[str, Any]:
        """Defaults for every `beam`."""
        return {name: value for name, value in self.sampling.items() if name in SEARCH_OPTIONS}


OPTION_NAMES = frozenset({*SAMPLING_OPTIONS, *(option.name for option in fields(RunOptions))} - {"sampling"})


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Any) -> None:
    """Set the backend for programs whose `run` names none: an Engine, a URL or a Backend; None for no default."""
    _Default.backend = None if backend is None else as_backend(backend)


def split_options(given: dict[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """Keywords of `run` -> (options, arguments of the program). Raises ValueError without a backend."""
    options = {name: value for name, value in given.items() if name in OPTION_NAMES}
    arguments = {name: value for name, value in given.items() if name not in OPTION_NAMES}
    chosen = options.pop("backend", None)
    backend = _Default.backend if chosen is None else as_backend(chosen)
    if backend is None:
        raise ValueError("no backend: pass backend=... (an Engine or a server's URL), or call set_default_backend")
    sampling = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    retain_ttl = options.get("retain_ttl", DEFAULT_RETAIN_TTL)
    if not isinstance(retain_ttl, int | float) or not 0 <= retain_ttl < float("inf"):
        raise ValueError(f"retain_ttl is {retain_ttl!r}; use a number of seconds, 0 or more")
    return RunOptions(backend=backend, sampling=sampling, **options), arguments
