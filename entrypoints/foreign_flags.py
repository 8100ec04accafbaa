"""Flags of SGLang, vLLM and llama.cpp, so that their command lines, config files and `Engine` keywords work here.

Each has one of three meanings: it is one of Baton's under another name (`Alias`); it asks for what is the case anyway,
or for nothing (`NoEffect`); or it asks for something that is not there (`Refused`, and all that `foreign_flag_names`
lists), which is an error that says what to do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .foreign_flag_names import SGLANG_NAMES, VLLM_NAMES
from .server_config import UsageError, flag_name


@dataclass(frozen=True, slots=True)
class Alias:
    """Baton's field ``to`` by another name.

    value: what the flag sets, for one that stands alone (None: it takes a value). values: for values that have other
    names here; convert: for those that are written otherwise, raises ValueError with what to write. unless: fields that
    make the flag superfluous. about: where the meaning is not quite the same.
    """

    to: str
    value: Any = None
    values: Mapping[str, Any] | None = None
    convert: Callable[[Any], Any] | None = None
    unless: tuple[str, ...] = ()
    about: str = ""

    @property
    def takes_value(self) -> bool:
        return self.value is None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """about: why it changes nothing. only: the values for which that is so; () for a flag that stands alone."""

    about: str
    only: tuple[str, ...] = ()

    @property
    def takes_value(self) -> bool:
        return bool(self.only)


@dataclass(frozen=True, slots=True)
class Refused:
    """instead: what to do."""

    instead: str


Foreign = Alias | NoEffect | Refused


def _tokens(value: Any) -> Any:
    """vLLM's way to write lengths: 32k is 32000, 32K is 32768; auto and -1 are the model's own."""
    if not isinstance(value, str):
        return 0 if value == -1 else value
    if value.lower() in ("auto", "-1"):
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value)
    if found is None:
        raise ValueError("use a number of tokens, such as 32768 or 32k")
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(found[1]) * units[found[2]])


def _one_origin(value: Any) -> Any:
    """vLLM takes a JSON list of origins."""
    try:
        origins = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    except ValueError:
        origins = None
    origins = [origins] if isinstance(origins, str) else origins
    if not isinstance(origins, list) or len(origins) != 1 or not isinstance(origins[0], str):
        raise ValueError("use one origin, or *")
    return origins[0]


_ONE_DEVICE = "one server runs one model on one device; tensor, pipeline and data parallelism are not there yet"
_STEP_TOKENS = "new prompt tokens of a step; tokens of running requests come on top"
_WHOLE_MODEL = "a model is on one device as a whole; --device says which"
_NO_LORA = "adapters are not supported yet; merge the adapter into the weights"
_NO_REMOTE = "the model's folder must be on this machine"
_LOGGED = "prompts and answers are never logged; --record-requests FILE keeps token ids"

FOREIGN: dict[str, Foreign] = {
    # -- the model -----------------------------------------------------------------------------------------------------
    "model": Alias("model_path"),
    "tokenizer": Alias("tokenizer_path"),
    "max_model_len": Alias("context_length", convert=_tokens),
    "seed": Alias("random_seed"),
    "enforce_eager": Alias("disable_cuda_graph", True),
    "max_cudagraph_capture_size": Alias("cuda_graph_max_bs"),
    "cuda_graph_max_bs_decode": Alias("cuda_graph_max_bs"),
    "gpu_memory_utilization": Alias("mem_fraction_static", about="a share of the memory that is free at the start"),
    "device_memory_utilization": Alias("mem_fraction_static", about="a share of the memory that is free at the start"),
    "kv_cache_dtype": NoEffect("KV has the weights' type, --dtype", ("auto",)),
    "quantization": Refused("quantised weights are not supported yet; give a float16, bfloat16 or float32 checkpoint"),
    "trust_remote_code": Refused(
        "no code of a checkpoint is ever run here; leave it out: the models that are supported need none"
    ),
    "tokenizer_mode": NoEffect("every tokenizer is a fast one, of the library tokenizers", ("auto", "hf")),
    "skip_tokenizer_init": Refused("a server without a tokenizer is not supported; text and ids are both taken"),
    "revision": Refused(f"{_NO_REMOTE}: download that revision and give its folder as --model-path"),
    "tokenizer_revision": Refused(f"{_NO_REMOTE}: download that revision and give its folder as --tokenizer-path"),
    "download_dir": Refused("set HF_HOME, or HF_HUB_CACHE, in the environment"),
    "hf_token": Refused("set HF_TOKEN in the environment"),
    "model_impl": NoEffect("the models are Baton's own", ("auto", "sglang", "vllm")),
    "runner": NoEffect("models generate text here", ("auto", "generate")),
    "is_embedding": Refused("embeddings are not supported yet"),
    "enable_lora": Refused(_NO_LORA),
    "lora_paths": Refused(_NO_LORA),
    "lora_modules": Refused(_NO_LORA),
    "cpu_offload_gb": NoEffect("no weights are offloaded", ("0", "0.0")),
    "enable_torch_compile": Refused("steps are recorded instead, on a GPU and on a CPU; leave it out"),
    "sampling_backend": Refused("the fastest way that works is found at the start; leave it out"),
    "grammar_backend": NoEffect("text is not constrained by grammars yet", ("none",)),
    # -- scheduling and the cache --------------------------------------------------------------------------------------
    "max_num_seqs": Alias("max_running_requests"),
    "max_num_queued_reqs": Alias("max_queued_requests"),
    "max_num_batched_tokens": Alias("chunked_prefill_size", convert=_tokens, about=_STEP_TOKENS),
    "max_prefill_tokens": Refused("--chunked-prefill-size bounds the new prompt tokens of a step"),
    "block_size": Alias("page_size"),
    "num_gpu_blocks_override": Refused("--max-total-tokens sets the pool in tokens"),
    "kv_cache_memory_bytes": Refused("--max-total-tokens sets the pool in tokens"),
    "scheduling_policy": Alias("schedule_policy", values={"fcfs": "fcfs"}),
    "schedule_conservativeness": Refused("memory is taken as it is needed; leave it out"),
    "enable_priority_scheduling": NoEffect("priority of a request counts under every policy"),
    "num_continuous_decode_steps": NoEffect("every step is followed by the next decision", ("1",)),
    "async_scheduling": Alias("overlap_schedule", "on"),
    "no_async_scheduling": Alias("overlap_schedule", "off"),
    "disable_overlap_schedule": Alias("overlap_schedule", "off"),
    "enable_chunked_prefill": NoEffect("long prompts are always computed in chunks"),
    "no_enable_chunked_prefill": Refused("a --chunked-prefill-size as large as the context computes prompts at once"),
    "enable_prefix_caching": NoEffect("the radix cache is on unless --disable-radix-cache turns it off"),
    "no_enable_prefix_caching": Alias("disable_radix_cache", True),
    "prefix_caching_hash_algo": NoEffect("the radix tree compares tokens, not hashes", ("builtin", "sha256")),
    "enable_hierarchical_cache": Alias(
        "host_cache_ratio", 2.0, unless=("host_cache_ratio", "host_cache_gb"), about="SGLang's default size"
    ),
    "enable_hicache": Alias(
        "host_cache_ratio", 2.0, unless=("host_cache_ratio", "host_cache_gb"), about="SGLang's default size"
    ),
    "hicache_ratio": Alias("host_cache_ratio"),
    "hicache_size": Alias("host_cache_gb"),
    "hicache_write_policy": Alias("host_write_policy"),
    "hicache_storage_backend": Refused("--disk-cache-path and --disk-cache-gb, or --remote-cache-url, keep KV further"),
    "hicache_io_backend": Refused("the way of copies is found at the start; leave it out"),
    "hicache_mem_layout": Refused("the host's layout is fixed; leave it out"),
    "kv_offloading_size": Alias("host_cache_gb"),
    "kv_offloading_backend": NoEffect("KV goes to the host by Baton's own copies", ("native",)),
    "swap_space": Refused("--host-cache-gb keeps KV in host memory"),
    "enable_lmcache": Refused("--host-cache-gb, --disk-cache-path and --remote-cache-url are Baton's own tiers"),
    "kv_transfer_config": Refused("--host-cache-gb, --disk-cache-path and --remote-cache-url are Baton's own tiers"),
    "kv_events_config": Refused("--kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic say the same"),
    "speculative_config": Refused("--speculative-algorithm NGRAM and --speculative-num-draft-tokens guess tokens"),
    "speculative_draft_model_path": Refused("there are no draft models; --speculative-algorithm NGRAM needs none"),
    # -- several devices -----------------------------------------------------------------------------------------------
    **{
        name: NoEffect(_ONE_DEVICE, ("1",))
        for name in (
            "tp_size", "tp", "tensor_parallel_size", "pp_size", "pp", "pipeline_parallel_size", "dp_size", "dp",
            "data_parallel_size", "data_parallel_size_local", "ep_size", "ep", "expert_parallel_size", "nnodes",
            "api_server_count", "tokenizer_worker_num",
        )
    },
    "node_rank": NoEffect(_ONE_DEVICE, ("0",)),
    "data_parallel_rank": NoEffect(_ONE_DEVICE, ("0",)),
    "distributed_executor_backend": NoEffect(_ONE_DEVICE, ("mp", "uni")),
    "disable_custom_all_reduce": NoEffect("there is one device, and nothing to reduce"),
    # -- the API -------------------------------------------------------------------------------------------------------
    "generation_config": Alias("sampling_defaults", values={"auto": "model", "vllm": "openai"}),
    "override_generation_config": Refused("edit generation_config.json, or let requests say it"),
    "preferred_sampling_params": Refused("requests say it, or generation_config.json does (--sampling-defaults)"),
    "enable_auto_tool_choice": NoEffect("models may call tools wherever a request offers some"),
    "hf_chat_template_name": Refused("tool_use is taken where a request brings tools, default elsewhere; leave it out"),
    "chat_template_content_format": NoEffect("messages reach the template as strings", ("auto", "string")),
    "enable_cache_report": NoEffect("every usage says how many tokens were cached"),
    "enable_prompt_tokens_details": NoEffect("every usage says how many tokens were cached"),
    "stream_interval": NoEffect("a stream brings every token as it is sampled", ("1",)),
    "allowed_origins": Alias("cors_origin", convert=_one_origin),
    "allowed_methods": NoEffect("--cors-origin allows every method", ('["*"]', "*")),
    "allowed_headers": NoEffect("--cors-origin allows every header", ('["*"]', "*")),
    "enable_request_id_headers": NoEffect("X-Request-Id is returned with every answer"),
    "shutdown_timeout": Alias("drain_timeout"),
    "skip_server_warmup": NoEffect("the warm-up is a single token"),
    # -- logs and metrics ----------------------------------------------------------------------------------------------
    "enable_metrics": NoEffect("GET /metrics is always there"),
    "enable_metrics_for_all_schedulers": NoEffect("there is one scheduler, and its metrics are always there"),
    "disable_log_requests": NoEffect("requests are not logged"),
    "no_enable_log_requests": NoEffect("requests are not logged"),
    "disable_log_stats": NoEffect("statistics are at GET /metrics, not in the log"),
    "disable_uvicorn_access_log": NoEffect("only --log-level debug logs calls"),
    "enable_log_requests": Refused(_LOGGED),
    "log_requests": Refused(_LOGGED),
    "uvicorn_log_level": Refused("--log-level is that of all processes"),
    "log_level_http": Refused("--log-level is that of all processes"),
    # -- llama.cpp -----------------------------------------------------------------------------------------------------
    "ctx_size": Alias("context_length"),
    "parallel": Alias("max_running_requests"),
    "alias": Alias("served_model_name"),
    "chat_template_file": Alias("chat_template"),
    "jinja": NoEffect("chat templates are always Jinja's"),
    "cont_batching": NoEffect("requests are always batched continuously"),
    "flash_attn": NoEffect("the fastest attention that works is found at the start", ("on", "auto", "1")),
    "n_gpu_layers": Refused(_WHOLE_MODEL),
    "gpu_layers": Refused(_WHOLE_MODEL),
    "hf_repo": Refused("give the repository's name, or a folder, as --model-path; GGUF files are not supported yet"),
    "threads": Refused("the threads are chosen by measurement; taskset limits the cores"),
    "batch_size": Refused("--chunked-prefill-size bounds the new prompt tokens of a step"),
    "n_predict": Refused("a request's max_tokens says it"),
    "cache_type_k": Refused("KV has the weights' type, --dtype"),
    "cache_type_v": Refused("KV has the weights' type, --dtype"),
}  # fmt: skip
"""By name, in snake_case."""

OTHER_VALUES: dict[str, dict[str, str]] = {
    "load_format": {"safetensors": "auto"},
    "dtype": {"half": "float16", "float": "float32"},
    "log_level": {"critical": "error", "warn": "warning"},
    "schedule_policy": {"lmcache-like": "fcfs"},  # a former name
}
"""Baton's own flags -> other names of their values: those of other servers, and former ones."""

SHORT = {
    "-tp": "tp", "-pp": "pp", "-dp": "dp", "-q": "quantization", "-m": "model", "-c": "ctx_size", "-np": "parallel",
    "-a": "alias", "-fa": "flash_attn", "-cb": "cont_batching", "-ngl": "n_gpu_layers", "-hf": "hf_repo",
    "-t": "threads", "-b": "batch_size", "-n": "n_predict", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
}  # fmt: skip


@dataclass(slots=True)
class Translation:
    """settings: (field, value), Baton's. notes: for the log, one for each flag that was another server's."""

    settings: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_foreign(name: str, own: Collection[str]) -> bool:
    """Is it a flag, in snake_case, of another server, and none of Baton's?"""
    return name not in own and (name in FOREIGN or _base(name) in FOREIGN or _servers_that_have(name) != "")


def takes_value(name: str) -> bool:
    """Does a flag for which `is_foreign` is true need a value? Those that are refused anyway take none."""
    known = FOREIGN.get(name)
    return isinstance(known, Alias | NoEffect) and known.takes_value


def translate(given: Iterable[tuple[str, Any]], own: Collection[str]) -> Translation:
    """(name in snake_case, value) -> Baton's settings. A flag that stands alone has the value True. Names that neither
    Baton (``own``) nor another server has are passed on. Raises UsageError."""
    result, last = Translation(), []
    for name, value in given:
        if not is_foreign(name, own):
            meant = OTHER_VALUES[name].get(value, value) if _has_others(name, value) else value
            result.settings.append((name, meant))
            if meant is not value:
                result.notes.append(f"{flag_name(name)} {value} is {meant} here")
        elif isinstance(known := FOREIGN.get(name), Alias) and known.unless:
            last.append((name, known, value))
        else:
            _translate_one(name, value, result)
    for name, known, value in last:
        if value and not any(other in known.unless and _is_some(size) for other, size in result.settings):
            _translate_one(name, value, result)
    return result


def _has_others(name: str, value: Any) -> bool:
    return name in OTHER_VALUES and isinstance(value, str)


def _is_some(size: Any) -> bool:
    try:
        return float(size) != 0
    except (TypeError, ValueError):
        return True  # composing the settings refuses it


def _translate_one(name: str, value: Any, result: Translation) -> None:
    flag, known = flag_name(name), FOREIGN.get(name)
    if known is None and name.startswith("no_enable_"):
        result.notes.append(f"{flag} has no effect: it is not there")
        return
    if value is None or value is False or value in ("", [], {}):
        return  # it asks for nothing, as keywords of an Engine may
    match known:
        case Alias():
            setting = _setting(flag, known, value)
            result.settings.append((known.to, setting))
            meant = flag_name(known.to) if known.takes_value else f"{flag_name(known.to)} {_shown(known.value)}".strip()
            result.notes.append(f"{flag} is {meant} here{known.about and f' ({known.about})'}")
        case NoEffect():
            if known.only and str(value).lower() not in known.only:
                raise UsageError(f"{flag} is {value}; only {' or '.join(known.only)} is supported: {known.about}")
            if not known.only and value is not True:
                raise UsageError(f"{flag} takes no value, and has no effect: {known.about}")
            result.notes.append(f"{flag} has no effect: {known.about}")
        case Refused():
            raise UsageError(f"{flag} is not supported: {known.instead}")
        case None:
            raise UsageError(
                f"{flag}, a flag of {_servers_that_have(name)}, is not supported yet; see --help for all flags"
            )


def _setting(flag: str, known: Alias, value: Any) -> Any:
    if not known.takes_value:
        if value is not True:
            raise UsageError(f"{flag} takes no value; it is {flag_name(known.to)} {_shown(known.value)}".rstrip())
        return known.value
    if known.values is not None:
        if value not in known.values:
            raise UsageError(
                f"{flag} is {value}; use {' or '.join(known.values)}, or {flag_name(known.to)}, as it is called here"
            )
        return known.values[value]
    try:
        return known.convert(value) if known.convert else value
    except ValueError as error:
        raise UsageError(f"{flag} is {value}; {error}") from None


def _shown(value: Any) -> str:
    return "" if value is True else str(value)


def _base(name: str) -> str:
    """no_enable_x -> enable_x: vLLM's way to turn off what is off here."""
    return name.removeprefix("no_") if name.startswith("no_enable_") else name


def _servers_that_have(name: str) -> str:
    servers = (("SGLang", SGLANG_NAMES), ("vLLM", VLLM_NAMES))
    return " and ".join(server for server, names in servers if _base(name) in names)
