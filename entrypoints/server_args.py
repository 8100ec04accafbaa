"""All settings of a server. CLI flags and `Engine` keywords come from the same dataclass fields.

Nothing is declared twice: each flag takes its name, type, default and help from a field of `ModelArgs`,
`SchedulerConfig`, `TierConfig`, `JobConfig`, `KVEventConfig`, `ChatConfig` or `ServerConfig`. ``compose`` is pure; it
refuses bad combinations before any process starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig, WorkerConfig
from ..runtime.constraints.item_tries import check_name
from ..runtime.kv_events.endpoints import refusal
from ..scheduler.config import SchedulerConfig, flag
from ..scheduler.constraints.item_trie import ItemTrieError
from ..scheduler.policies.registry import NEEDS_HOST_TIER, PINNING
from .chat.config import ChatConfig


class UsageError(ValueError):
    """A flag is unknown, has a value it does not take, or contradicts another; the message says what to change."""


SECRETS = ("api_key", "admin_api_key")
"""Settings that are never shown."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side and the supervision of the processes. Times are in seconds."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 listens on every interface")
    port: int = flag(30000, "port to listen on; 0 takes a free one and logs it")
    served_model_name: str = flag("", "the model's name in the API; default: --model-path")
    api_key: str = flag("", "clients must send it as 'Authorization: Bearer KEY'; better in a file or BATON_API_KEY")
    api_key_file: str = flag("", "file with that key; without either, BATON_API_KEY of the environment; else no check")
    admin_api_key: str = flag("", "asked for instead where a call changes the server for everybody")
    admin_api_key_file: str = flag("", "file with that key; without either, BATON_ADMIN_API_KEY of the environment")
    allowed_hosts: str = flag(
        "", "names this server goes by, with commas between, or *; addresses, localhost and --host always count"
    )
    cors_origin: str = flag("", "origin that browsers may call from, or * for any; empty: none")
    ssl_certfile: str = flag("", "serve HTTPS with this certificate (PEM, with its chain)")
    ssl_keyfile: str = flag("", "private key of --ssl-certfile, where that file does not hold it")
    max_prompts_per_request: int = flag(1024, "prompts in one request; more are refused")
    max_body_mb: int = flag(64, "larger request bodies are answered with 413, unread")
    max_connections: int = flag(2048, "open at the same time; more are answered with 503")
    header_timeout: float = flag(10.0, "a request's head must have arrived within this time")
    body_timeout: float = flag(30.0, "and its body, beyond a second for each 64 KiB")
    keep_alive_timeout: float = flag(65.0, "connections between two requests are closed after this time")
    item_trie: tuple[str, ...] = flag((), "NAME=FILE.npy, an item trie to start with; may be given several times")
    max_item_tries: int = flag(64, "item tries that may be loaded at the same time")
    max_item_trie_mb: int = flag(1024, "memory of all item tries together")
    dashboard: bool = flag(True, "serve a page that shows the server at work, at /dashboard")
    incremental_streaming_output: bool = flag(False, "stream only what is new in each event, not the text so far")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "of all processes")
    ready_timeout: float = flag(1200.0, "the model must be loaded within this time")
    drain_timeout: float = flag(30.0, "open requests get this long to finish after SIGTERM")
    watchdog_timeout: float = flag(300.0, "a worker without a sign of life for this long counts as hung")

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb * 2**20


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """All settings, one frozen dataclass per part."""

    model: ModelArgs
    scheduler: SchedulerConfig
    tiers: TierConfig
    jobs: JobConfig
    kv_events: KVEventConfig
    chat: ChatConfig
    recording: RecordingConfig
    server: ServerConfig

    @property
    def tokenizer_path(self) -> str:
        return self.model.tokenizer_path or self.model.model_path

    @property
    def served_model_name(self) -> str:
        return self.server.served_model_name or self.model.model_path

    @property
    def worker_config(self) -> WorkerConfig:
        return WorkerConfig(
            model=self.model,
            scheduler=self.scheduler,
            tiers=self.tiers,
            jobs=self.jobs,
            kv_events=self.kv_events,
            item_tries=_named_files(self.server.item_trie),
            max_item_tries=self.server.max_item_tries,
            max_item_trie_bytes=self.server.max_item_trie_mb * 2**20,
            log_level=self.server.log_level,
        )


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
    _refuse_contradictions(args)
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
            raise UsageError(f"{_flag_name(name)} is empty; a server without a key is one without the flag")
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
            group.add_argument(_flag_name(field.name), **_flag_options(field, types[field.name]))
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
            raise UsageError(f"{_flag_name(name)} is {value!r}; use one of {', '.join(choices)}")
        return value
    if kind == tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple) and all(isinstance(item, str) for item in values):
            return tuple(values)
        raise UsageError(f"{_flag_name(name)} is {value!r}; it takes a string or a list of strings")
    if value is None and kind == int | None:
        return None
    kind = _if_given(kind)
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) is not kind:
        raise UsageError(f"{_flag_name(name)} is {value!r}; it takes {_A_KIND[kind]}")
    return value


def _if_given(kind: Any) -> Any:
    """The type of a value that may be left out: int for int | None."""
    return int if kind == int | None else kind


_A_KIND = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _named_files(settings: tuple[str, ...]) -> dict[str, str]:
    """NAME=FILE, … -> name -> file. Raises UsageError."""
    files: dict[str, str] = {}
    for setting in settings:
        name, equals, file = setting.partition("=")
        if not (equals and file):
            raise UsageError(f"--item-trie is {setting!r}; it takes NAME=FILE.npy")
        try:
            check_name(name)
        except ItemTrieError as error:
            raise UsageError(f"--item-trie {setting}: {error}") from None
        if name in files:
            raise UsageError(f"--item-trie names {name!r} twice; give each trie its own name")
        files[name] = file
    return files


def _flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _about_unknown(token: str, parser: argparse.ArgumentParser) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; every setting is a flag, see --help"
    name = token.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return f"unknown flag {name}{_nearest(name, known) or '; see --help'}"


def _refuse_contradictions(args: ServerArgs) -> None:
    _check_model(args.model)
    _check_scheduler(args.scheduler)
    _check_tiers(args.tiers, args.scheduler)
    refused = refusal(args.kv_events, args.scheduler.page_size, cached=not args.scheduler.disable_radix_cache)
    _need(refused is None, refused or "")
    _at_least(args.chat, 0, ("conversation_ttl", "response_ttl", "max_stored_responses"))
    _check_recording(args.recording)
    _check_server(args.server)


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(message)


def _at_least(part: Any, least: int, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(part, name)
        _need(value >= least, f"{_flag_name(name)} is {value}; use {least} or more")


def _check_model(model: ModelArgs) -> None:
    _need(bool(model.model_path), "--model-path is missing; give a Hugging Face folder")
    _need(
        0.0 < model.mem_fraction_static < 1.0,
        f"--mem-fraction-static is {model.mem_fraction_static}; use a share between 0 and 1, such as 0.85",
    )
    for name in ("cuda_graph_max_bs", "cuda_graph_max_tokens"):
        value = getattr(model, name)
        _need(value >= 0, f"{_flag_name(name)} is {value}; use 0 for no graphs, or the size of the largest")


def _check_tiers(tiers: TierConfig, scheduler: SchedulerConfig) -> None:
    _at_least(tiers, 0, ("host_cache_gb", "host_cache_ratio"))
    for name in ("host_cache_gb", "host_cache_ratio"):
        _need(
            not (getattr(tiers, name) and scheduler.disable_radix_cache),
            f"{_flag_name(name)} keeps what the radix cache holds; leave it out, or --disable-radix-cache",
        )
    _at_least(tiers, 0, ("disk_cache_gb", "remote_cache_ttl"))
    _need(math.isfinite(tiers.disk_cache_gb), f"--disk-cache-gb is {tiers.disk_cache_gb}; use a number of GiB")
    _need(
        bool(tiers.disk_cache_path) == bool(tiers.disk_cache_gb),
        "--disk-cache-path and --disk-cache-gb go together; set both, or neither",
    )
    for name in ("disk_cache_path", "remote_cache_url"):
        _need(
            not getattr(tiers, name) or bool(tiers.host_cache_gb or tiers.host_cache_ratio),
            f"{_flag_name(name)} is filled from the host cache; set --host-cache-gb or --host-cache-ratio too",
        )
    _need(
        not (tiers.host_cache_gb and tiers.host_cache_ratio),
        "--host-cache-gb and --host-cache-ratio both size the host cache; set one of them",
    )
    _need(
        scheduler.schedule_policy not in NEEDS_HOST_TIER or bool(tiers.host_cache_gb or tiers.host_cache_ratio),
        f"--schedule-policy {scheduler.schedule_policy} goes by a host cache; set --host-cache-gb or "
        "--host-cache-ratio too",
    )


def _check_recording(recording: RecordingConfig) -> None:
    most, is_on = recording.record_requests_gb, bool(recording.record_requests)
    _need(0 < most < math.inf, f"--record-requests-gb is {most}; use a number of GiB above 0")
    _need(is_on or not recording.record_requests_hashed, "--record-requests-hashed needs --record-requests PATH")


def _check_pins(scheduler: SchedulerConfig) -> None:
    policy, why = scheduler.schedule_policy, f"pins nothing; use {', '.join(PINNING)}"
    for name in ("pin_time", "pin_seconds"):
        value = getattr(scheduler, name)
        is_heeded = policy in PINNING or value == getattr(SchedulerConfig, name)
        _need(is_heeded, f"{_flag_name(name)} is {value}, but --schedule-policy {policy} {why}")


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    _check_pins(scheduler)
    page, total, seed = scheduler.page_size, scheduler.max_total_tokens, scheduler.random_seed
    _need(page >= 1 and page & (page - 1) == 0, f"--page-size is {page}; use a power of two, such as 1, 16 or 64")
    for name in ("context_length", "max_total_tokens", "chunked_prefill_size"):
        value = getattr(scheduler, name)
        _need(value >= 0, f"{_flag_name(name)} is {value}; use a positive number, or 0 for automatic")
    for name in ("max_leased_ratio", "max_client_leased_ratio"):
        value = getattr(scheduler, name)
        _need(0.0 <= value <= 1.0, f"{_flag_name(name)} is {value}; use a share between 0 and 1")
    sizes = ("max_running_requests", "speculative_num_draft_tokens")
    _at_least(scheduler, 1, (*sizes, "decode_interval", "max_jobs"))
    counts = ("max_queued_requests", "max_leased_requests", "max_leases_per_client", "max_logprobs")
    records = ("max_finished_requests", "max_finished_tokens")
    times = ("request_timeout", "pin_seconds", "provisional_ttl", "lease_protection")
    _at_least(scheduler, 0, (*counts, *records, *times, "default_retain_ttl", "max_retain_ttl"))
    _need(
        not scheduler.learn_tools or find_spec("sklearn") is not None,
        "--learn-tools needs scikit-learn, which is not there: pip install 'baton[learned]', or leave it out",
    )
    _need(
        total == 0 or total >= page,
        f"--max-total-tokens is {total} and --page-size is {page}; the pool must hold at least one page",
    )
    _need(seed is None or seed >= 0, f"--random-seed is {seed}; use 0 or more, or leave it out")


def _check_server(server: ServerConfig) -> None:
    _need(0 <= server.port <= 65535, f"--port is {server.port}; use 0 to 65535")
    for name in SECRETS:
        both = bool(getattr(server, name) and getattr(server, f"{name}_file"))
        _need(not both, f"{_flag_name(name)} and {_flag_name(name)}-file are both given; keep one")
    _need(
        not server.ssl_keyfile or bool(server.ssl_certfile), "--ssl-keyfile is given without --ssl-certfile; add that"
    )
    _at_least(server, 1, ("max_prompts_per_request", "max_body_mb", "max_connections"))
    _at_least(server, 0, ("max_item_tries", "max_item_trie_mb", "drain_timeout"))
    for name in ("ready_timeout", "watchdog_timeout", "header_timeout", "body_timeout", "keep_alive_timeout"):
        value = getattr(server, name)
        _need(value > 0, f"{_flag_name(name)} is {value}; use a positive number of seconds")
    _need(
        server.watchdog_timeout > 2,
        f"--watchdog-timeout is {server.watchdog_timeout}; the worker reports once a second, use more than 2",
    )
    _named_files(server.item_trie)
