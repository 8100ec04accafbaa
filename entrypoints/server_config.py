"""What the settings of a server are, part by part; `server_args.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig, WorkerConfig
from ..runtime.constraints.item_tries import check_name
from ..scheduler.config import SchedulerConfig, flag
from ..scheduler.constraints.item_trie import ItemTrieError
from .chat.config import ChatConfig
from .fields.ignored import UnknownFields


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
    serve_any_model_name: bool = flag(False, "take requests for any model name, also where --served-model-name is set")
    api_key: tuple[str, ...] = flag(
        (),
        "key that a client must send as 'Authorization: Bearer KEY'; may be given several times, for several clients. "
        "Better in a file or BATON_API_KEY",
    )
    api_key_file: str = flag(
        "",
        "file with that key, or with a line 'name: key' for each client; without either, BATON_API_KEY of the "
        "environment; else no check",
    )
    isolate_clients: bool = flag(False, "clients share no KV cache: each has a namespace of its own")
    admin_api_key: str = flag("", "asked for instead where a call shows or changes what belongs to everybody")
    admin_api_key_file: str = flag("", "file with that key; without either, BATON_ADMIN_API_KEY of the environment")
    allowed_hosts: str = flag(
        "", "names this server goes by, with commas between, or *; addresses, localhost and --host always count"
    )
    cors_origin: str = flag("", "origin that browsers may call from, or * for any; empty: none")
    ssl_certfile: str = flag("", "serve HTTPS with this certificate (PEM, with its chain)")
    ssl_keyfile: str = flag("", "private key of --ssl-certfile, where that file does not hold it")
    sampling_defaults: Literal["model", "openai"] = flag(
        "model",
        "where OpenAI's and Anthropic's APIs take sampling parameters from that a request leaves out: model: from the "
        "model's generation_config.json, as far as it has them; openai: OpenAI's (temperature and top_p 1)",
    )
    unknown_fields: UnknownFields = flag(
        "refuse", "request fields that no table lists: refuse answers 400, warn ignores them with X-Baton-Warning"
    )
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
    notes: tuple[str, ...] = field(default=(), compare=False)
    """For the log: flags of other servers, and what became of them."""

    @property
    def tokenizer_path(self) -> str:
        return self.model.tokenizer_path or self.model.model_path

    @property
    def served_model_name(self) -> str:
        return self.server.served_model_name or self.model.model_path

    @property
    def required_model_name(self) -> str:
        """The name that requests must use, if they name a model; empty for any."""
        return "" if self.server.serve_any_model_name else self.server.served_model_name

    @property
    def worker_config(self) -> WorkerConfig:
        return WorkerConfig(
            model=self.model,
            scheduler=self.scheduler,
            tiers=self.tiers,
            jobs=self.jobs,
            kv_events=self.kv_events,
            item_tries=named_files(self.server.item_trie),
            max_item_tries=self.server.max_item_tries,
            max_item_trie_bytes=self.server.max_item_trie_mb * 2**20,
            log_level=self.server.log_level,
        )


def named_files(settings: tuple[str, ...]) -> dict[str, str]:
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


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
