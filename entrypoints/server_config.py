"""The settings of a server, one dataclass per part; `server_args.py` reads them from flags, files and keywords."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from ..runtime.config import JobConfig, KVEventConfig, ModelArgs, RecordingConfig, TierConfig, WorkerConfig
from ..runtime.constraints.item_tries import check_name
from ..runtime.lora.adapter_config import AdapterError
from ..runtime.lora.adapter_names import check_adapter_name
from ..scheduler.config import SchedulerConfig, flag
from ..scheduler.constraints.item_trie import ItemTrieError
from .fields.ignored import UnknownFields


class UsageError(ValueError):
    """A flag is unknown, has a value it does not take, or contradicts another; the message says what to change."""


SECRETS = ("api_key", "admin_api_key")
"""Settings that are never shown."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How messages become prompts, and answers become messages."""

    chat_template: str = flag("", "File with a Jinja chat template. Empty: the template in the model's folder.")
    tool_call_parser: str = flag(
        "auto",
        "Format of the model's tool calls, such as qwen25, hermes, llama3 or mistral. auto: derived from the "
        "chat template. none: tool calls are not parsed.",
    )
    reasoning_parser: str = flag(
        "auto",
        "Format of the model's reasoning, such as deepseek-r1, qwen3 or gpt-oss. auto: derived from the chat "
        "template. none: reasoning is not separated.",
    )
    no_auto_continue: bool = flag(
        False,
        "Do not let a chat continue automatically from the KV of its last turn, nor any other request from one that it "
        "extends (--max-recognized-turns 0, unless that is set).",
    )
    prepare_next_turn: Literal["auto", "off"] = flag(
        "auto",
        "Compute the beginning of a chat's next prompt while no request is open, where the chat template rewrites "
        "earlier turns (drops their reasoning). auto: for clients whose next turns use it. off: never.",
    )
    normalize_prefix: str = flag(
        "",
        "Comma-separated rules that keep text which changes with each request out of the beginning of a chat's prompt: "
        "claude-code-billing, claude-code-tokens-left, dates. See docs/harnesses.md. Empty: none.",
    )
    conversation_ttl: float = flag(
        60.0, "Seconds for which a chat's KV stays leased for its next turn; 0: no lease, it is cached like any other."
    )
    response_ttl: float = flag(
        60.0,
        "Seconds for which the KV of a stored response (/v1/responses) stays leased for a request that names "
        "it as previous_response_id; 0: no lease.",
    )
    max_stored_responses: int = flag(
        1024, "Maximum number of stored responses that can be read and continued by id. The oldest are dropped first."
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side and the supervision of the processes. Times are in seconds."""

    host: str = flag("127.0.0.1", "Address to listen on. 0.0.0.0 listens on every interface.")
    port: int = flag(30000, "TCP port to listen on. 0 picks a free port and logs it.")
    served_model_name: str = flag(
        "",
        "Name of the model in the API. Empty: the value of --model-path. If set, or once a LoRA adapter has been "
        "loaded, requests that name another model get 404.",
    )
    serve_any_model_name: bool = flag(
        False,
        "Accept requests for any model name, even if --served-model-name is set or LoRA adapters are loaded.",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Key that clients must send as 'Authorization: Bearer KEY'. Repeat the flag to accept several keys, "
        "one per client. A key on the command line is visible to other users: prefer --api-key-file or the "
        "environment variable BATON_API_KEY.",
    )
    api_key_file: str = flag(
        "",
        "File with the API key, or with one line 'name: key' per client. Without --api-key and "
        "--api-key-file, BATON_API_KEY of the environment is used; if that is not set either, no key is "
        "required.",
    )
    isolate_clients: bool = flag(False, "Give each client a cache namespace of its own, so that clients share no KV.")
    admin_api_key: str = flag(
        "",
        "Key for calls that show or change what belongs to all clients; these then reject ordinary keys. A "
        "key on the command line is visible to other users: prefer --admin-api-key-file or the environment "
        "variable BATON_ADMIN_API_KEY.",
    )
    admin_api_key_file: str = flag(
        "",
        "File with the admin key. Without --admin-api-key and --admin-api-key-file, BATON_ADMIN_API_KEY of "
        "the environment is used.",
    )
    allowed_hosts: str = flag(
        "",
        "Comma-separated host names that requests may use in their Host header, or * for any. Addresses, localhost and "
        "--host are always allowed. With an API key, every name is allowed.",
    )
    cors_origin: str = flag("", "Origin from which browsers may call the server, or * for any. Empty: none.")
    ssl_certfile: str = flag("", "PEM file with the certificate and its chain. If set, the server speaks HTTPS.")
    ssl_keyfile: str = flag(
        "", "PEM file with the private key of --ssl-certfile. Needed only if that file does not contain the key."
    )
    sampling_defaults: Literal["model", "openai"] = flag(
        "model",
        "Defaults of the OpenAI and Anthropic APIs for sampling parameters that a request leaves out. model: "
        "the values in the model's generation_config.json, where it has them. openai: OpenAI's defaults "
        "(temperature and top_p 1).",
    )
    unknown_fields: UnknownFields = flag(
        "refuse",
        "Treatment of request fields that the API does not define. refuse: answer 400. warn: ignore them and "
        "name them in the X-Baton-Warning header.",
    )
    max_prompts_per_request: int = flag(
        1024, "Maximum number of prompts in one request. Requests with more are refused."
    )
    max_body_mb: int = flag(64, "Maximum size of a request body in MiB. Larger bodies get 413 and are not read.")
    max_connections: int = flag(2048, "Maximum number of open connections. Further connections get 503.")
    header_timeout: float = flag(10.0, "Seconds within which the head of a request must arrive.")
    body_timeout: float = flag(30.0, "Seconds to receive a request body, plus 1 s per 64 KiB.")
    keep_alive_timeout: float = flag(65.0, "Seconds after which a connection without a request is closed.")
    item_trie: tuple[str, ...] = flag((), "Item trie to load at start, as NAME=FILE.npy. May be repeated.")
    max_item_tries: int = flag(64, "Maximum number of loaded item tries.")
    max_item_trie_mb: int = flag(1024, "Maximum memory of all item tries together, in MiB.")
    lora_paths: tuple[str, ...] = flag(
        (),
        "LoRA adapters to load at start, each as NAME=FOLDER, or as FOLDER, which is its name then. Requests name them "
        "in model or lora_path.",
    )
    max_loaded_loras: int = flag(0, "Maximum number of loaded adapters. 0: any number.")
    dashboard: bool = flag(True, "Serve the live dashboard at /dashboard.")
    incremental_streaming_output: bool = flag(
        False, "Send only the new text in each event of a /generate stream, instead of the whole text so far."
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "Lowest level that is logged, in all processes."
    )
    log_interval: float = flag(10.0, "Seconds between two log lines about load, while there is work. 0: no such lines.")
    log_requests: bool = flag(False, "Log each request when it arrives and when it ends.")
    log_requests_level: int = flag(
        0,
        "Contents of the lines of --log-requests. 0: lengths, reasons and times. 1: sampling parameters, too. 2: also "
        "the first 2,048 characters of prompt and output. 3: prompt and output whole.",
    )
    ready_timeout: float = flag(
        1200.0,
        "Seconds within which the server must be ready after its start, loading the model included. Otherwise"
        " it exits.",
    )
    drain_timeout: float = flag(30.0, "Seconds that open requests get to finish after SIGTERM or SIGINT.")
    watchdog_timeout: float = flag(
        300.0, "Seconds without a report from the worker after which it counts as hung and the server exits."
    )

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
    """Log lines about flags of other servers: how each was translated."""

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
            item_tries=named_files(self.server.item_trie),
            adapters=named_adapters(self.server.lora_paths),
            max_adapters=self.server.max_loaded_loras,
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


def named_adapters(settings: tuple[str, ...]) -> dict[str, str]:
    """NAME=FOLDER, or FOLDER alone, or the JSON objects of SGLang and vLLM -> name -> folder. Raises UsageError."""
    folders: dict[str, str] = {}
    for setting in settings:
        name, folder = _adapter_setting(setting)
        try:
            check_adapter_name(name)
        except AdapterError as error:
            raise UsageError(f"--lora-paths {setting}: {error}; give it as NAME=FOLDER") from None
        if folders.setdefault(name, folder) != folder:
            raise UsageError(f"--lora-paths names {name!r} twice; give each adapter its own name")
    return folders


def _adapter_setting(setting: str) -> tuple[str, str]:
    """(name, folder). Raises UsageError."""
    if not setting.startswith("{"):
        name, equals, folder = setting.partition("=")
        if not name or (equals and not folder):
            raise UsageError(f"--lora-paths is {setting!r}; it takes NAME=FOLDER")
        return (name, folder) if equals else (setting.rstrip("/"), setting)
    try:
        given = json.loads(setting)
        name = given.get("lora_name", given.get("name"))
        folder = given.get("lora_path", given.get("path"))
    except ValueError:
        name = folder = None
    if not isinstance(name, str) or not isinstance(folder, str):
        raise UsageError(f"--lora-paths is {setting!r}; it takes NAME=FOLDER")
    return name, folder
