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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ..runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig
from ..scheduler.config import SchedulerConfig
from .contradictions import refuse_contradictions
from .foreign_flags import OTHER_VALUES, SHORT, is_foreign, takes_value, translate
from .server_config import SECRETS, ChatConfig, ServerArgs, ServerConfig, UsageError, flag_name
from .version import baton_version

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


def compose(settings: Mapping[str, Any]) -> ServerArgs:
    """Settings by snake_case field name -> ServerArgs; missing ones take their defaults. Those of SGLang and vLLM are
    taken as `foreign_flags` has them.

    Raises UsageError for an unknown name, a value of the wrong type, or a contradiction.
    """
    settings, notes = own_settings(settings)
    grouped = _by_part(settings)
    args = ServerArgs(**{part: cls(**grouped[part]) for part, cls in _PARTS.items()}, notes=notes)
    refuse_contradictions(args)
    if args.chat.no_auto_continue and "max_recognized_turns" not in settings:
        args = dataclasses.replace(args, scheduler=dataclasses.replace(args.scheduler, max_recognized_turns=0))
    return args


def _by_part(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values, with their types checked, by part and name. Raises UsageError."""
    owner = {field.name: (part, field) for part, cls in _PARTS.items() for field in dataclasses.fields(cls)}
    grouped: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in settings.items():
        if name not in owner:
            raise UsageError(f"unknown setting {name!r}{_nearest(name, owner)}")
        part, field = owner[name]
        grouped[part][name] = _checked(field, value, get_type_hints(_PARTS[part])[name])
    return grouped


def own_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings by name -> (Baton's own, with unknown names as they came; what the log should say of the others).
    Raises UsageError."""
    translated = translate(given.items(), _own_names())
    settings: dict[str, Any] = {}
    for name, value in translated.settings:
        if name in settings and settings[name] != value:
            raise UsageError(
                f"{flag_name(name)} is given twice, under two names: {settings[name]} and {value}; keep one"
            )
        settings[name] = value
    return settings, tuple(translated.notes)


def with_seed(args: ServerArgs) -> ServerArgs:
    """The same settings, with a random seed if they have none: each start of a server draws its own."""
    if args.scheduler.random_seed is not None:
        return args
    return dataclasses.replace(args, scheduler=dataclasses.replace(args.scheduler, random_seed=secrets.randbits(62)))


def parse_command_line(argv: list[str]) -> ServerArgs:
    """Flags -> ServerArgs. Raises UsageError; exits only for --help and --version.

    The settings of a --config file count where the command line does not give them.
    """
    parser = build_parser()
    own = _own_names()
    flags, notes = own_flags(argv, own)
    try:
        namespace, unknown = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    given = vars(namespace)
    if unknown and not unknown[0].startswith("-") and "model_path" not in given:
        given["model_path"] = unknown.pop(0)
    if unknown:
        raise UsageError(_about_unknown(unknown[0], parser))
    _refuse_empty_keys(given)
    if (file := given.pop("config", None)) is None:
        return dataclasses.replace(compose(given), notes=notes)
    from_file, more_notes = _settings_of_file(file)
    return dataclasses.replace(compose(from_file | given), notes=(*more_notes, *notes))


def _refuse_empty_keys(given: Mapping[str, Any]) -> None:
    """Raises UsageError."""
    for name in (*SECRETS, *(f"{secret}_file" for secret in SECRETS)):
        values = given.get(name, "given nothing")
        if not all(value.strip() for value in ([values] if isinstance(values, str) else values)):  # as "$KEY" may be
            raise UsageError(f"{flag_name(name)} is empty; a server without a key is one without the flag")


_SYNONYMS = {"--lora-modules": "--lora-paths"}
"""Flags of other servers that take several values, as ours do."""


def own_flags(argv: list[str], own: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command line with Baton's flags in place of other servers', and what the log should say of these. Raises
    UsageError."""
    given: list[tuple[str, Any]] = []
    passed_on: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, equals, value = SHORT.get(token, token).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag in _SYNONYMS:
            passed_on.append(f"{_SYNONYMS[flag]}{equals}{value}")
            continue
        is_flag = flag.startswith("--") or token in SHORT
        if not is_flag or not (name in OTHER_VALUES or is_foreign(name, own)):
            passed_on.append(token)
        elif equals:
            given.append((name, value))
        elif name in OTHER_VALUES or takes_value(name):
            if (following := next(tokens, None)) is None:
                raise UsageError(f"{flag}: expected one argument")
            given.append((name, following))
        else:
            given.append((name, True))
    translated = translate(given, own)
    for name, value in translated.settings:
        passed_on.append(flag_name(name) if value is True else f"{flag_name(name)}={value}")
    return passed_on, tuple(translated.notes)


def _settings_of_file(file: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of a --config file, and notes on them for the log. Raises UsageError, with the file's name."""
    try:
        settings, notes = own_settings(read_config_file(file))
        _by_part(settings)
        _refuse_empty_keys(settings)
    except UsageError as error:
        raise UsageError(f"--config {file}: {error}") from None
    return settings, notes


def _own_names() -> dict[str, dataclasses.Field]:
    return {field.name: field for cls in _PARTS.values() for field in dataclasses.fields(cls)}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, one group per part. Flags that are not given do not appear in the namespace."""
    parser = _Parser(
        prog="baton serve",
        description="Serve a language model over HTTP. MODEL alone is --model-path MODEL; flags of SGLang and vLLM "
        "that mean the same are taken too (docs/operations.md).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"baton {baton_version()}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with flags (without leading dashes) and values; flags on the command line take precedence",
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


_SEVERAL_VALUES = ("lora_paths",)
"""Flags that take several values at once, as SGLang's does."""


def _flag_options(field: dataclasses.Field, kind: Any) -> dict[str, Any]:
    shown = "" if field.default is False or field.default in ("", (), None) else f" (default: {field.default})"
    options: dict[str, Any] = {"dest": field.name, "help": (field.metadata["help"] + shown).replace("%", "%%")}
    if kind is bool:
        # A switch that is on by default is turned off with --no-<name>.
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        return options | {"action": action}
    if kind == tuple[str, ...]:
        if field.name in _SEVERAL_VALUES:
            return options | {"action": "extend", "nargs": "+", "metavar": "NAME=FOLDER"}
        return options | {"action": "append", "metavar": "KEY" if field.name in SECRETS else "NAME=FILE"}
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
        if isinstance(value, dict) and name in _SEVERAL_VALUES:  # as SGLang's Engine takes adapters
            value = [f"{key}={item}" for key, item in value.items()]
        values = [value] if isinstance(value, str) else value or ()
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
    if not name.startswith("--"):
        return f"unknown flag {name}; flags have two dashes here, see --help"
    known = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {name}{_nearest(name, known) or '; see --help'}"


# -- --config ----------------------------------------------------------------------------------------------------------


def read_config_file(path: str) -> dict[str, Any]:
    """Read a YAML file of flags, without their dashes in front, and values: ``port: 30000``, ``item-trie: [a=a.npy]``.

    Returns name in snake_case -> value, a scalar or a list; nulls are left out. Raises UsageError, without the file's
    name.
    """
    try:
        content = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError("holds no settings; it takes lines such as 'port: 30000'")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in settings:
            raise UsageError(f"{flag_name(name)} is given twice; keep one")
        if name == "config":
            raise UsageError("names another config file; put its settings here")
        if isinstance(value, dict):
            raise UsageError(f"{flag_name(name)} has settings below it; it takes a value, or a list")
        if value is not None:
            settings[name] = value
    return settings


class _Loader(yaml.SafeLoader):
    """Loads plain data. Refuses duplicate keys, which YAML forbids and PyYAML accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
