"""Flags of SGLang, vLLM and llama.cpp, so that their command lines, config files and `Engine` keywords work here.

Each flag has one of three meanings: another name for a flag of Baton's (`Alias`); a request for the default or for
nothing (`NoEffect`); or a request for something that Baton lacks (`Refused`, and the names at the end of this file),
which is an error that says what to do instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """about: why it changes nothing. only: the values for which that is so; () for a flag that stands alone, or for any
    value, where it takes one."""

    about: str
    only: tuple[str, ...] = ()
    takes_any: bool = False

    @property
    def takes_value(self) -> bool:
        return self.takes_any or bool(self.only)


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


_ONE_DEVICE = "one server runs one model on one device; tensor, pipeline and data parallelism are not supported yet"
_STEP_TOKENS = "new prompt tokens of a step; tokens of running requests are not counted"
_WHOLE_MODEL = "the whole model is on one device, which --device selects"
_ALL_LORAS = "every loaded adapter stays on the device, and any number of them may be in one step"
_NO_REMOTE = "the model's folder must be on this machine"

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
    "tokenizer_mode": NoEffect("every tokenizer is a fast one, from the library tokenizers", ("auto", "hf")),
    "skip_tokenizer_init": Refused("a server without a tokenizer is not supported; text and ids are both taken"),
    "revision": Refused(f"{_NO_REMOTE}: download that revision and give its folder as --model-path"),
    "tokenizer_revision": Refused(f"{_NO_REMOTE}: download that revision and give its folder as --tokenizer-path"),
    "download_dir": Refused("set HF_HOME, or HF_HUB_CACHE, in the environment"),
    "hf_token": Refused("set HF_TOKEN in the environment"),
    "runner": NoEffect("a server generates and embeds, as far as the model can", ("auto", "generate", "pooling")),
    "is_embedding": NoEffect("every model embeds"),
    "enable_lora": NoEffect("adapters can always be loaded, with --lora-paths or POST /load_lora_adapter"),
    "lora_modules": Alias("lora_paths"),
    "max_loras_per_batch": NoEffect(_ALL_LORAS, takes_any=True),
    "max_loras": NoEffect(_ALL_LORAS, takes_any=True),
    "max_cpu_loras": Alias("max_loaded_loras"),
    "max_lora_rank": NoEffect("adapters of any rank are served", takes_any=True),
    "lora_target_modules": Refused("every linear layer of attention and MLPs may be a target; leave it out"),
    "lora_backend": NoEffect("there is one implementation", takes_any=True),
    "cpu_offload_gb": NoEffect("no weights are offloaded", ("0", "0.0")),
    "enable_torch_compile": Refused("steps are recorded instead, on a GPU and on a CPU; leave it out"),
    "sampling_backend": Refused("the fastest backend that works is chosen at the start; leave it out"),
    "grammar_backend": NoEffect("llguidance enforces grammars", ("none", "llguidance", "xgrammar", "outlines", "auto")),
    # -- scheduling and the cache --------------------------------------------------------------------------------------
    "max_num_seqs": Alias("max_running_requests"),
    "max_num_queued_reqs": Alias("max_queued_requests"),
    "max_num_batched_tokens": Alias("chunked_prefill_size", convert=_tokens, about=_STEP_TOKENS),
    "max_prefill_tokens": Refused("--chunked-prefill-size bounds the new prompt tokens of a step"),
    "disable_hybrid_swa_memory": Alias("swa_full_tokens_ratio", 1.0),
    "disable_hybrid_kv_cache_manager": Alias("swa_full_tokens_ratio", 1.0),
    "block_size": Alias("page_size"),
    "num_gpu_blocks_override": Refused("--max-total-tokens sets the pool in tokens"),
    "kv_cache_memory_bytes": Refused("--max-total-tokens sets the pool in tokens"),
    "scheduling_policy": Alias("schedule_policy", values={"fcfs": "fcfs"}),
    "schedule_conservativeness": Refused("memory is allocated as it is needed; leave it out"),
    "enable_priority_scheduling": NoEffect("every policy honours the priority of requests"),
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
    "hicache_io_backend": Refused("the copy method is chosen at the start; leave it out"),
    "hicache_mem_layout": Refused("the host's layout is fixed; leave it out"),
    "kv_offloading_size": Alias("host_cache_gb"),
    "kv_offloading_backend": NoEffect("KV goes to the host by Baton's own copies", ("native",)),
    "swap_space": Refused("--host-cache-gb keeps KV in host memory"),
    "enable_lmcache": Refused("--host-cache-gb, --disk-cache-path and --remote-cache-url are Baton's own tiers"),
    "kv_transfer_config": Refused("--host-cache-gb, --disk-cache-path and --remote-cache-url are Baton's own tiers"),
    "kv_events_config": Refused("use --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic"),
    "speculative_config": Refused("use --speculative-algorithm NGRAM and --speculative-num-draft-tokens"),
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
    "override_generation_config": Refused("edit generation_config.json, or set the values in requests"),
    "preferred_sampling_params": Refused("set them in requests, or in generation_config.json (--sampling-defaults)"),
    "enable_auto_tool_choice": NoEffect("the model may call tools in every request that offers some"),
    "hf_chat_template_name": Refused("requests with tools use the template tool_use, others default; leave it out"),
    "chat_template_content_format": NoEffect("messages reach the template as strings", ("auto", "string")),
    "enable_cache_report": NoEffect("every usage says how many tokens were cached"),
    "enable_prompt_tokens_details": NoEffect("every usage says how many tokens were cached"),
    "stream_interval": NoEffect("a stream sends every token as it is sampled", ("1",)),
    "allowed_origins": Alias("cors_origin", convert=_one_origin),
    "allowed_methods": NoEffect("--cors-origin allows every method", ('["*"]', "*")),
    "allowed_headers": NoEffect("--cors-origin allows every header", ('["*"]', "*")),
    "enable_request_id_headers": NoEffect("X-Request-Id is returned with every answer"),
    "shutdown_timeout": Alias("drain_timeout"),
    "skip_server_warmup": NoEffect("the warm-up is a single token"),
    # -- logs and metrics ----------------------------------------------------------------------------------------------
    "enable_metrics": NoEffect("GET /metrics is always there"),
    "enable_metrics_for_all_schedulers": NoEffect("there is one scheduler, and its metrics are always there"),
    "disable_log_requests": NoEffect("requests are logged with --log-requests alone"),
    "no_enable_log_requests": NoEffect("requests are logged with --log-requests alone"),
    "decode_log_interval": NoEffect("a line about load comes every --log-interval seconds", takes_any=True),
    "disable_log_stats": Alias("log_interval", 0.0),
    "disable_uvicorn_access_log": NoEffect("only --log-level debug logs calls"),
    "enable_log_requests": Alias("log_requests", True),
    "uvicorn_log_level": Refused("--log-level is that of all processes"),
    "log_level_http": Refused("--log-level is that of all processes"),
    # -- llama.cpp -----------------------------------------------------------------------------------------------------
    "ctx_size": Alias("context_length"),
    "parallel": Alias("max_running_requests"),
    "alias": Alias("served_model_name"),
    "chat_template_file": Alias("chat_template"),
    "jinja": NoEffect("chat templates are always Jinja's"),
    "cont_batching": NoEffect("requests are always batched continuously"),
    "flash_attn": NoEffect("the fastest attention that works is chosen at the start", ("on", "auto", "1")),
    "n_gpu_layers": Refused(_WHOLE_MODEL),
    "gpu_layers": Refused(_WHOLE_MODEL),
    "hf_repo": Refused("give the repository's name, a folder, or a GGUF file as --model-path"),
    "threads": Refused("the number of threads is chosen by measurement while serving; taskset limits the cores"),
    "batch_size": Refused("--chunked-prefill-size bounds the new prompt tokens of a step"),
    "n_predict": Refused("set max_tokens in requests"),
    "cache_type_k": Refused("KV has the weights' type, --dtype"),
    "cache_type_v": Refused("KV has the weights' type, --dtype"),
}  # fmt: skip
"""By name, in snake_case."""

OTHER_VALUES: dict[str, dict[str, str]] = {
    "load_format": {"safetensors": "auto"},
    "dtype": {"half": "float16", "float": "float32"},
    # The names of a checkpoint's own format: it is read from its files.
    "quantization": dict.fromkeys(
        ("none", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "w8a8_int8", "w8a8_fp8"),
        "auto",
    ),
    "model_impl": {"sglang": "auto", "vllm": "auto"},
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
            if name in OTHER_VALUES and value is None:
                continue  # it asks for nothing, as keywords of an Engine may
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
            if not known.takes_value and value is not True:
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


# -- flags of SGLang (0.5.23) and vLLM (0.33.0) without a row above: an error names the server of each -----------------

_SGLANG = """
    abort_on_priority_when_disabled allow_auto_truncate allowed_media_domains asr_max_buffer_seconds
    asr_max_concurrent_sessions attention_context_parallel_size attention_data_parallel_size attn_cp_size
    attn_dp_size aux_hidden_state_capture base_gpu_id batch_notify_size bf16_gemm_backend boundary_reduction
    bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token c128_page_size
    checkpoint_engine_wait_weights_before_ready completion_template constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern context_bucket cp_strategy
    crash_dump_folder cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode
    cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
    cuda_graph_prefill_max_context custom_sigquit_handler custom_weight_loader dcp_comm_backend dcp_replicate_q_proj
    dcp_size debug_cuda_graph debug_tensor_dump_input_file debug_tensor_dump_layers debug_tensor_dump_output_folder
    decode_attention_backend decode_context_parallel_size decoupled_spec_bind_endpoint
    decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role decrypted_config_file
    decrypted_draft_config_file deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode
    default_chat_template_kwargs default_priority_value delete_ckpt_after_loading detokenizer_worker_num
    disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather
    disable_chunked_prefix_cache disable_cuda_graph_padding disable_decode_cuda_graph disable_fast_image_processor
    disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather
    disable_outlines_disk_cache disable_prefill_cuda_graph disable_priority_preemption disable_shared_experts_fusion
    disable_tokenizer_batch_decode disaggregation_bootstrap_port disaggregation_decode_allocation_policy
    disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
    disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
    disaggregation_decode_polling_interval disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
    disaggregation_ib_device disaggregation_mode disaggregation_transfer_backend dist_init_addr dist_timeout
    dllm_algorithm dllm_algorithm_config dllm_fdfo dsa_decode_backend dsa_paged_mqa_logits_backend
    dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend dwdp_size
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout elastic_ep_backend
    elastic_ep_initial_size elastic_ep_scale_timeout enable_adaptive_dispatch_to_encoder
    enable_aiter_allreduce_fusion enable_amd_monokernel enable_attn_tp_input_scattered
    enable_broadcast_mm_inputs_process enable_cp_decode_attn_tp enable_cp_tp_group_sharing enable_cudagraph_gc
    enable_custom_logit_processor enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer
    enable_dense_mlp_attn_tp enable_deterministic_inference enable_dp_attention
    enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_draft_weights_cpu_backup
    enable_dsa_cache_layer_split enable_dsa_fused_indexer enable_dynamic_batch_tokenizer enable_dynamic_chunking
    enable_elastic_expert_backup enable_encoder_swa_bounded_replay enable_eplb enable_flashinfer_allreduce_fusion
    enable_flexkv enable_forward_pass_metrics enable_fp32_lm_head enable_fused_moe_sum_all_reduce
    enable_fused_qk_norm_rope enable_hisparse enable_http2 enable_http_worker_reuseport enable_int8_mamba_checkpoint
    enable_kv_cache_sharding enable_layernorm_sp enable_layerwise_nvtx_marker enable_lean_attention
    enable_linear_replayssm enable_linear_replayssm_spec enable_linker_mla_dedup enable_lora_overlap_loading
    enable_mamba_cache_stochastic_rounding enable_megamoe_for_layernorm_sp enable_memory_saver enable_mfu_metrics
    enable_mis enable_mm_global_cache enable_mscclpp enable_multi_layer_eagle enable_multimodal enable_nccl_nvls
    enable_nvidia_megakernel enable_p2p_check enable_page_major_kv_layout enable_paged_experts enable_pd_role_switch
    enable_pdmux enable_precise_embedding_interpolation enable_prefill_cp enable_prefill_delayer
    enable_prefix_mm_cache enable_profile_cuda_graph enable_quant_communications enable_request_time_stats_logging
    enable_response_store enable_return_aux_hidden_states enable_return_hidden_states enable_return_indexer_topk
    enable_return_routed_experts enable_scattered_sconv enable_session_radix_cache enable_shared_experts_attn_tp
    enable_single_batch_overlap enable_ssl_refresh enable_streaming_session enable_strict_thinking enable_symm_mem
    enable_tf32_matmul enable_tokenizer_batch_encode enable_torch_compile_debug_mode enable_torch_symm_mem
    enable_tp_lm_head_all_to_all enable_trace enable_two_batch_overlap enable_unified_cache_external_linker
    enable_unified_memory enable_w4a4_mxfp4_megamoe enable_waterfill enable_watermark enable_weights_cpu_backup
    encoder_bootstrap_port encoder_only encoder_register_urls encoder_transfer_backend encoder_urls
    enforce_disable_flashinfer_allreduce_fusion enforce_shared_experts_fusion engine_info_bootstrap_port
    ep_dispatch_algorithm ep_join_mode ep_join_rank_offset ep_num_redundant_experts eplb_algorithm
    eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
    expert_balancedness_report_mode expert_distribution_recorder_buffer_size expert_distribution_recorder_mode
    experts_shared_outer_loras export_metrics_to_file export_metrics_to_file_dir extra_metric_labels
    fastapi_root_path file_storage_path flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend
    flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged flashinfer_mxfp4_moe_precision flexkv_config_file
    forward_hooks forward_pass_metrics_ipc_name forward_pass_metrics_worker_id fp4_gemm_runner_backend
    fp8_gemm_runner_backend fuseep_mode gated_launch_port gc_threshold gc_warning_threshold_secs
    generation_tokens_buckets gpu_id_step grpc_http_sidecar_port grpc_mode grpc_port grpc_response_timeout_secs
    grpc_worker_threads hicache_host_memory_fraction hicache_host_memory_mode hicache_storage_backend_extra_config
    hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
    hicache_storage_prefetch_retry_poll_interval hierarchical_sparse_attention_extra_config hisparse_config
    http2_initial_connection_window_size http2_max_concurrent_streams image_processor_backend init_expert_location
    int8_mamba_ckpt_size json_model_override_args kt_cpuinfer kt_max_deferred_experts_per_token kt_method
    kt_num_gpu_experts kt_threadpool_count kt_weight_path kv_canary kv_canary_real_data kv_canary_sweep_interval
    language_model_only language_only limit_mm_data_per_request linear_attn_backend linear_attn_decode_backend
    linear_attn_prefill_backend linear_attn_verify_backend linear_replayssm_cache_len lmcache_config_file
    load_balance_method load_publish_endpoint load_snapshot_publish_interval log_requests_format
    log_requests_target lora_drain_wait_threshold lora_eviction_policy lora_strict_loading
    lora_use_virtual_experts mamba_backend mamba_cache_philox_rounds mamba_full_memory_ratio
    mamba_max_states_per_path mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval max_ep_size
    max_lora_chunk_size max_mamba_cache_size
    media_url_max_file_size_mb min_free_slots_delay mlx_enable_sampling mm_attention_backend mm_enable_dp_encoder
    mm_feature_transport mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb mm_process_config
    mm_processor_worker_num model_checksum model_config_parser model_loader_extra_config modelexpress_config
    modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path modelopt_quant
    moe_a2a_backend moe_data_parallel_size moe_dense_tp_size moe_dp_size moe_runner_backend mooncake_ib_device
    msprobe_dump_config nccl_init_addr nccl_port num_reserved_decode_tokens numa_node offload_group_size
    offload_mode offload_num_in_group offload_prefetch_step optimistic_prefill_attempts otlp_service_name
    otlp_traces_endpoint paged_experts_num_resident pdmux_config_path ple_offload_backend ple_offload_dir
    ple_offload_embedding pp_async_batch_depth pp_max_micro_batch_size pre_warm_nccl prefill_attention_backend
    prefill_decode_interval prefill_decode_interval_min_bs prefill_delayer_forward_passes_buckets
    prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
    prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets prefill_kv_cache_dequant_dtype
    prefill_max_requests prefill_only_disable_kv_cache priority_scheduling_preemption_threshold
    prompt_tokens_buckets qsa_indexer_dtype quantization_param_path quantize_and_serve radix_cache_backend
    radix_eviction_policy_config remote_instance_weight_loader_backend
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_start_seed_via_transfer_engine retraction_policy return_aux_hidden_state_layer_ids
    return_hidden_states_mode return_input_ids return_output_ids rl_on_policy_target rl_quant_profile
    sampling_mask_max_tokens schedule_low_priority_values_first scheduler_recv_interval shared_experts_tp_size
    show_time_cost sidecar sidecar_args sleep_on_idle sm_group_num smg_grpc_mode smg_http_sidecar_port
    soft_watchdog_timeout spec_trace_dir speculative_accept_threshold_acc speculative_accept_threshold_single
    speculative_adaptive speculative_adaptive_config speculative_attention_mode speculative_boundary_reduction
    speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_draft_attention_backend
    speculative_draft_kv_cache_dtype speculative_draft_load_format speculative_draft_model
    speculative_draft_model_quantization speculative_draft_model_revision speculative_draft_sink_size
    speculative_draft_window_size speculative_dsa_topk_backend speculative_dspark_align_verify_tokens_to_graph_tier
    speculative_dspark_block_size speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path
    speculative_eagle_topk speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend
    speculative_moe_runner_backend speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
    speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget speculative_ngram_match_type
    speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth
    speculative_num_steps speculative_token_map speculative_use_block_verification
    speculative_use_rejection_sampling ssl_ca_certs ssl_keyfile_password startup_weight_load_mode stat_loggers
    stream_response_default_include_usage strip_thinking_cache swa_prefix_tails
    tbo_token_distribution_threshold tokenizer_backend tokenizer_metrics_allowed_custom_labels
    tokenizer_metrics_custom_labels_header tool_server torch_compile_max_bs trace_modules
    triton_attention_num_kv_splits triton_attention_reduce_in_fp32 triton_attention_split_tile_size
    trust_mm_content_hashes trust_request_chat_template unified_cache_external_linker_backend
    unified_cache_external_linker_config uno_lora_path use_ray uses_mamba_radix_cache
    uvicorn_access_log_exclude_prefixes warmups watermark_config watermark_context_window watermark_default_enabled
    watermark_enforce_all watermark_key watermark_key_b watermark_max_probability watermark_mixing_probability
    weight_cache_mode weight_cache_socket weight_cache_timeout weight_loader_disable_mmap
    weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_version
"""
_VLLM = """
    additional_config aggregate_engine_logging all2all_backend allow_credentials allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains anthropic_disabled_thinking_effort attention_config
    aux_output_config code_revision cohere_format cohere_is_reasoning_model collect_detailed_traces
    compilation_config config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
    cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address
    data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rpc_port data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
    decode_context_parallel_size default_chat_template_kwargs default_mm_loras device_ids diffusion_config
    disable_access_log_for_endpoints disable_cascade_attn disable_chunked_mm_input disable_fastapi_docs
    disable_nccl_for_dp_synchronization disable_sliding_window
    distributed_timeout_seconds dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_sync_interval ec_manager_config ec_transfer_config elastic_ep_max_dp_size
    enable_batch_sharded_sampling enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter
    enable_eplb enable_expert_parallel enable_fault_tolerance enable_flash_late_interaction
    enable_flashinfer_autotune enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing
    enable_log_deltas enable_log_outputs enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_moe_shared_loras enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics
    enable_prompt_embeds enable_return_routed_experts enable_scale_out enable_server_load_tracking
    enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint
    enable_tower_connector_lora enable_trace_replay engram_config eplb_config exclude_tools_when_tool_choice_none
    expert_placement_strategy fail_on_environ_validation fault_tolerance_config fingerprint_mode fingerprint_value
    fully_sharded_loras gdn_prefill_backend grpc grpc_port h11_max_header_count h11_max_incomplete_event_size
    headless hf_config_path hf_overrides ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority
    jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample kv_sharing_fast_prefill language_model_only
    limit_mm_per_prompt log_config_file log_error_stack logging_config logits_processors logprobs_mode
    long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype mamba_backend
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype
    mamba_ssu_algorithm master_addr master_port max_log_len max_lora_cls_labels
    max_num_active_seqs max_num_queued_tokens max_num_scheduled_tokens max_parallel_loading_workers
    media_io_kwargs middleware mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides
    model_loader_extra_config moe_backend monokernel numa_bind numa_bind_cpus numa_bind_nodes offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
    otlp_traces_endpoint per_request_spec_decode_metrics performance_mode pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_match_unit
    profiler_config pt_load_map_location quantization_config ray_workers_use_nsight reasoning_config
    reasoning_effort_map reasoning_parser_plugin renderer_num_workers replayssm_buffer_len response_role
    return_sampling_mask return_tokens_as_token_ids root_path safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
    show_hidden_metrics_for_version skip_mm_profiling sleep_mode_backend sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
    specialize_active_lora sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_ciphers structured_outputs_config
    swa_bounded_replay tokens_only tool_parser_plugin tool_server tool_strict_level trust_request_chat_template
    trust_request_mm_kwargs ubatch_size uds use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method
    video_pruning_rate watchdog_config watermark watermark_config weight_transfer_config worker_cls
    worker_extension_cls
"""

SGLANG_NAMES = frozenset(_SGLANG.split())
VLLM_NAMES = frozenset(_VLLM.split())
