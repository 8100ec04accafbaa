"""Reads all settings of a server. CLI flags and `Engine` keywords come from the same dataclass fields.

Nothing is declared twice: each flag takes its name, type, default and help from a field of the classes in `_PARTS`.
``compose`` is pure; it refuses bad combinations (`contradictions.py`) before any process starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import secrets
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig
from ..scheduler.config import SchedulerConfig
from .chat.config import ChatConfig
from .contradictions import refuse_contradictions
from .server_config import SECRETS, ServerArgs, ServerConfig, UsageError, flag_name

_PARTS: dict[str, type] = {
    "model": ModelArgs,
    "scheduler": SchedulerConfig,
    "tiers": TierConfig,
    "jobs": JobConfig,
    "kv_events": KVEventConfig,
    "chat": ChatConfig,
    "recording": RecordingConfig,
    "server": ServerConfig,
}
_TITLES = {
    "model": "model",
    "scheduler": "scheduler and KV cache",
    "tiers": "tiers of the KV cache",
    "jobs": "jobs of agents",
    "kv_events": "KV cache events",
    "chat": "chat",
    "recording": "recording of requests",
    "server": "server",
}


def compose(settings: dict[str, Any]) -> ServerArgs:
    """Settings by snake_case field name -> ServerArgs; missing ones take their defaults.

    Raises UsageError for an unknown name, a value of the wrong type, or a contradiction.
    """
    owner = {field.name: (part, field) for part, cls in _PARTS.items() for field in dataclasses.fields(cls)}
    grouped: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in settings.items():
        if name not in owner:
            raise UsageError(f"unknown setting {name!r}{_nearest(name, owner)}")
        part, field = owner[name]
        grouped[part][name] = _checked(field, value, get_type_hints(_PARTS[part])[name])
    args = ServerArgs(**{part: cls(**grouped[part]) for part, cls in _PARTS.items()})
    refuse_contradictions(args)
    return args


def with_seed(args: ServerArgs) -> ServerArgs:
    """The same settings, with a random seed if they have none: each start of a server draws its own."""
    if args.scheduler.random_seed is not None:
        return args
    return dataclasses.replace(args, scheduler=dataclasses.replace(args.scheduler, random_seed=secrets.randbits(62)))


def parse_command_line(argv: list[str]) -> ServerArgs:
    """Flags -> ServerArgs. Raises UsageError; exits only for --help."""
    parser = build_parser()
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(_about_unknown(unknown[0], parser))
    given = vars(namespace)
    for name in (*SECRETS, *(f"{secret}_file" for secret in SECRETS)):
        if not given.get(name, "given nothing").strip():  # as "$KEY" is where KEY is not set
            raise UsageError(f"{flag_name(name)} is empty; a server without a key is one without the flag")
    return compose(given)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, one group per part. Flags that are not given do not appear in the namespace."""
    parser = _Parser(
        prog="baton-server",
        description="Serve a language model over HTTP.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for part, cls in _PARTS.items():
        group = parser.add_argument_group(_TITLES[part])
        types = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            group.add_argument(flag_name(field.name), **_flag_options(field, types[field.name]))
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        # Some errors bypass exit_on_error.
        raise UsageError(message)


def _flag_options(field: dataclasses.Field, kind: Any) -> dict[str, Any]:
    shown = "" if field.default is False or field.default in ("", (), None) else f" (default: {field.default})"
    options: dict[str, Any] = {"dest": field.name, "help": (field.metadata["help"] + shown).replace("%", "%%")}
    if kind is bool:
        # A switch that is on by default is turned off with --no-<name>.
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        return options | {"action": action}
    if kind == tuple[str, ...]:
        return options | {"action": "append", "metavar": "NAME=FILE"}
    if choices := _choices(field, kind):
        return options | {"choices": choices, "metavar": "{" + ",".join(choices) + "}"}
    kind = _if_given(kind)
    return options | {"type": kind, "metavar": kind.__name__.upper()}


def _choices(field: dataclasses.Field, kind: Any) -> tuple[str, ...]:
    """The values a field takes, from its Literal type or its declaration; () if it takes any."""
    return get_args(kind) if get_origin(kind) is Literal else field.metadata["choices"]


def _checked(field: dataclasses.Field, value: Any, kind: Any) -> Any:
    """The value, if its type fits the field; an int passes as a float. Raises UsageError."""
    name = field.name
    if choices := _choices(field, kind):
        if value not in choices:
            raise UsageError(f"{flag_name(name)} is {value!r}; use one of {', '.join(choices)}")
        return value
    if kind == tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple) and all(isinstance(item, str) for item in values):
            return tuple(values)
        raise UsageError(f"{flag_name(name)} is {value!r}; it takes a string or a list of strings")
    if value is None and kind == int | None:
        return None
    kind = _if_given(kind)
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) is not kind:
        raise UsageError(f"{flag_name(name)} is {value!r}; it takes {_A_KIND[kind]}")
    return value


def _if_given(kind: Any) -> Any:
    """The type of a value that may be left out: int for int | None."""
    return int if kind == int | None else kind


_A_KIND = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _about_unknown(token: str, parser: argparse.ArgumentParser) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; every setting is a flag, see --help"
    name = token.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {name}{_nearest(name, known) or '; see --help'}"
