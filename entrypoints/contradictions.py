"""Checks of settings: values that one does not take, and settings that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from ..runtime.config import ModelArgs, RecordingConfig, TierConfig
from ..runtime.kv_events.endpoints import refusal
from ..scheduler.config import SchedulerConfig
from ..scheduler.policies.registry import PINNING
from .chat.prefix_rules import PrefixRuleError, read_rules
from .server_config import (
    SECRETS,
    ChatConfig,
    ServerArgs,
    ServerConfig,
    UsageError,
    flag_name,
    named_adapters,
    named_files,
)


def refuse_contradictions(args: ServerArgs) -> None:
    """Raises UsageError for the first thing that is wrong."""
    _check_model(args.model)
    check_scheduler(args.scheduler)
    _check_tiers(args.tiers, args.scheduler)
    refused = refusal(args.kv_events, args.scheduler.page_size, cached=not args.scheduler.disable_radix_cache)
    _need(refused is None, refused or "")
    _check_chat(args.chat)
    _check_recording(args.recording)
    _check_server(args.server)


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(message)


def _at_least(part: Any, least: int, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(part, name)
        _need(value >= least, f"{flag_name(name)} is {value}; use {least} or more")


def _check_chat(chat: ChatConfig) -> None:
    _at_least(chat, 0, ("conversation_ttl", "response_ttl", "max_stored_responses"))
    try:
        rules = read_rules(chat.normalize_prefix)
    except PrefixRuleError as error:
        raise UsageError(f"--normalize-prefix {error}") from None
    fixed = [rule.name for rule in rules if rule.effect == "fixed"]
    _need(
        not (fixed and chat.no_auto_continue),
        f"--normalize-prefix {', '.join(fixed)} keeps a value of a conversation's first turn; leave it out, or leave "
        "out --no-auto-continue",
    )


def _check_model(model: ModelArgs) -> None:
    _need(bool(model.model_path), "--model-path is missing; give a Hugging Face folder or a GGUF file")
    _need(
        0.0 < model.mem_fraction_static < 1.0,
        f"--mem-fraction-static is {model.mem_fraction_static}; use a share between 0 and 1, such as 0.85",
    )
    sparse = [field.name for field in fields(model) if field.name.startswith("ds_")]
    given = [name for name in sparse if getattr(model, name) != getattr(ModelArgs, name)]
    _need(
        model.enable_double_sparsity or not given,
        f"{', '.join(map(flag_name, given))}: no effect without --enable-double-sparsity",
    )
    _need(
        not model.enable_double_sparsity or bool(model.ds_channel_config_path),
        "--enable-double-sparsity needs --ds-channel-config-path; baton ds-channels makes the file",
    )
    _at_least(model, 1, ("ds_heavy_channel_num", "ds_heavy_token_num", "ds_sparse_decode_threshold"))
    for name in ("cuda_graph_max_bs", "cuda_graph_max_tokens"):
        value = getattr(model, name)
        _need(value >= 0, f"{flag_name(name)} is {value}; use 0 for no graphs, or the size of the largest")


def _check_tiers(tiers: TierConfig, scheduler: SchedulerConfig) -> None:
    _at_least(tiers, 0, ("host_cache_gb", "host_cache_ratio"))
    for name in ("host_cache_gb", "host_cache_ratio"):
        _need(
            not (getattr(tiers, name) and scheduler.disable_radix_cache),
            f"{flag_name(name)} keeps what the radix cache holds; leave it out, or leave out --disable-radix-cache",
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
            f"{flag_name(name)} is filled from the host cache; set --host-cache-gb or --host-cache-ratio too",
        )
    _need(
        not (tiers.host_cache_gb and tiers.host_cache_ratio),
        "--host-cache-gb and --host-cache-ratio both size the host cache; set one of them",
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
        _need(is_heeded, f"{flag_name(name)} is {value}, but --schedule-policy {policy} {why}")


def check_scheduler(scheduler: SchedulerConfig) -> None:
    """Raises UsageError."""
    _check_pins(scheduler)
    page, total, seed = scheduler.page_size, scheduler.max_total_tokens, scheduler.random_seed
    _need(page >= 1 and page & (page - 1) == 0, f"--page-size is {page}; use a power of two, such as 1, 16 or 64")
    for name in ("context_length", "max_total_tokens", "max_states", "chunked_prefill_size"):
        value = getattr(scheduler, name)
        _need(value >= 0, f"{flag_name(name)} is {value}; use a positive number, or 0 for automatic")
    for name in ("max_leased_ratio", "max_client_leased_ratio", "hit_rate_alert", "swa_full_tokens_ratio"):
        value = getattr(scheduler, name)
        _need(0.0 <= value <= 1.0, f"{flag_name(name)} is {value}; use a share between 0 and 1")
    sizes = ("max_running_requests", "speculative_num_draft_tokens")
    _at_least(scheduler, 1, (*sizes, "decode_interval", "max_jobs"))
    counts = ("max_queued_requests", "max_leased_requests", "max_leases_per_client", "max_logprobs")
    records = ("max_finished_requests", "max_finished_tokens", "max_recognized_turns")
    times = ("request_timeout", "pin_seconds", "provisional_ttl", "lease_protection")
    _at_least(scheduler, 0, (*counts, *records, *times, "default_retain_ttl", "max_retain_ttl"))
    _need(
        not scheduler.learn_tools or find_spec("sklearn") is not None,
        "--learn-tools needs scikit-learn, which is not there: pip install 'baton-serve[learned]', or leave it out",
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
        _need(not both, f"{flag_name(name)} and {flag_name(name)}-file are both given; keep one")
    _need(
        not server.ssl_keyfile or bool(server.ssl_certfile), "--ssl-keyfile is given without --ssl-certfile; add that"
    )
    _at_least(server, 1, ("max_prompts_per_request", "max_body_mb", "max_connections"))
    _at_least(server, 0, ("max_item_tries", "max_item_trie_mb", "max_loaded_loras", "drain_timeout"))
    for name in ("ready_timeout", "watchdog_timeout", "header_timeout", "body_timeout", "keep_alive_timeout"):
        value = getattr(server, name)
        _need(value > 0, f"{flag_name(name)} is {value}; use a positive number of seconds")
    _need(
        server.watchdog_timeout > 2,
        f"--watchdog-timeout is {server.watchdog_timeout}; the worker reports once a second, use more than 2",
    )
    _need(
        math.isfinite(server.log_interval) and server.log_interval >= 0,
        f"--log-interval is {server.log_interval}; use a number of seconds, or 0 for no lines",
    )
    _need(
        0 <= server.log_requests_level <= 3,
        f"--log-requests-level is {server.log_requests_level}; use 0 to 3",
    )
    named_files(server.item_trie)
    adapters = named_adapters(server.lora_paths)
    _need(
        not server.max_loaded_loras or len(adapters) <= server.max_loaded_loras,
        f"--lora-paths names {len(adapters)} adapters, more than --max-loaded-loras {server.max_loaded_loras}",
    )
    _need(
        server.served_model_name not in adapters,
        f"--lora-paths names an adapter {server.served_model_name!r}, as --served-model-name names the model",
    )
