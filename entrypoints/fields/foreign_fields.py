"""Fields that clients send because another server, or another endpoint, has them, each with its treatment here.

    used            another name for a field of this API
    names           names the conversation, and so its job: see `conversation_names`
    nothing to do   a label for routers and logs, or a request for the default
    no effect       ignored; the answer's X-Baton-Warning header and a line of the log say so
    refused         400; the message says what to use instead

null, an empty text, list or object, and every value that a row lists as ``off`` request nothing and pass. A name in no
table is refused; with ``--unknown-fields warn`` it has no effect. docs/foreign_fields.md is written
from `FOREIGN_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import SamplingParams
from ..description.json_schema import Properties, Schema, anything, either, enum
from .grammars import GRAMMARS, read_response_format, read_structured_outputs
from .ignored import Ignored
from .reading import one_of, pass_or_refuse_unknown, shown, typed

Api = Literal["generate", "sampling_params", "completions", "chat", "responses", "messages"]

GENERATE: tuple[Api, ...] = ("generate",)
SAMPLING: tuple[Api, ...] = ("sampling_params",)
COMPLETIONS: tuple[Api, ...] = ("completions",)
CHAT: tuple[Api, ...] = ("chat",)
RESPONSES: tuple[Api, ...] = ("responses",)
MESSAGES: tuple[Api, ...] = ("messages",)
TEXTS = COMPLETIONS + CHAT
OPENAI = TEXTS + RESPONSES
CHATS = CHAT + RESPONSES + MESSAGES
ENDPOINTS = GENERATE + OPENAI + MESSAGES
ALL = ENDPOINTS + SAMPLING

ENDPOINT_OF: Mapping[Api, str] = {
    "generate": "/generate",
    "sampling_params": "sampling_params",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

Outcome = Literal["used", "names", "nothing to do", "no effect", "refused"]

Read = Callable[[Any, str, Ignored], dict[str, Any]]
"""(value, name, what is ignored) -> fields of the API that mean the same. Raises RequestRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignField:
    """``of``: the server that its clients are written for. ``about``: what it is read as, why nothing happens, or what
    to use instead. ``off``: values that ask for nothing, besides null and, unless ``empty_asks``, what is empty.
    ``code``: of the refusal."""

    name: str
    outcome: Outcome
    apis: tuple[Api, ...]
    of: str
    about: str
    off: tuple = ()
    empty_asks: bool = False
    read: Read | None = None
    code: str = "unsupported_field"

    def asks(self, value: Any) -> bool:
        """Does the value ask for anything?"""
        if value is None or any(_same(value, off) for off in self.off):
            return False
        if self.empty_asks:
            return True
        # SGLang's client sends session_params with a null for each of its fields.
        is_empty = isinstance(value, dict) and all(item is None for item in value.values())
        return not (is_empty or value == "" or value == [])


def _same(value: Any, off: Any) -> bool:
    """0 == False in Python, but not for the caller of an API; 1 and 1.0 are the same number."""
    if isinstance(value, bool) or isinstance(off, bool):
        return value is off
    return value == off


# -- the table ---------------------------------------------------------------------------------------------------------


def _listed(
    outcome: Outcome,
    of: str,
    apis: tuple[Api, ...],
    names: str,
    about: str,
    *,
    off: tuple = (),
    empty_asks: bool = False,
    read: Read | None = None,
) -> list[ForeignField]:
    """One row for each of the names, which have spaces between them."""
    return [
        ForeignField(
            name=name, outcome=outcome, apis=apis, of=of, about=about, off=off, empty_asks=empty_asks, read=read
        )
        for name in names.split()
    ]


def _as(name: str) -> Read:
    """The same by another name."""
    return lambda value, _, __: {name: value}


def _max_tokens(field: str, *, unlimited: bool) -> Read:
    """llama.cpp and Ollama write a negative number for "no limit"."""

    def read(value: Any, name: str, _: Ignored) -> dict[str, Any]:
        most = typed(value, int, name)
        if most >= 0:
            return {field: most}
        if not unlimited:
            raise RequestRefused(f"{name} is {most}; use {field} with the most tokens to generate", param=name)
        return {}

    return read


def _thinks(value: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _enable_thinking(value: Any, name: str, _: Ignored) -> dict[str, Any]:
    return _thinks(typed(value, bool, name))


def _think(value: Any, name: str, _: Ignored) -> dict[str, Any]:
    """Ollama's: whether to think, or how much."""
    if isinstance(value, str):
        return {"reasoning_effort": value}
    if not isinstance(value, bool):
        raise RequestRefused(f"{name} is {shown(value)}; it takes true, false or an effort, such as low", param=name)
    return _thinks(value)


def _thinking(value: Any, name: str, ignored: Ignored) -> dict[str, Any]:
    """Anthropic's object, which other servers take with chats too."""
    if isinstance(value, bool):
        return _thinks(value)
    if not isinstance(value, dict):
        raise RequestRefused(f"{name} is {shown(value)}; it takes an object with a type", param=name)
    kind = one_of(value.get("type", "adaptive"), ("enabled", "disabled", "adaptive", "auto"), f"{name}.type")
    for other in value.keys() - {"type"}:
        if value[other] is not None:
            ignored.add_field(f"{name}.{other}", "thoughts have no limit of their own")
    return _thinks(kind == "enabled") if kind in ("enabled", "disabled") else {}


def _reasoning(value: Any, name: str, ignored: Ignored) -> dict[str, Any]:
    """OpenRouter's object."""
    if isinstance(value, bool):
        return _thinks(value)
    if not isinstance(value, dict):
        raise RequestRefused(f"{name} is {shown(value)}; it takes an object with an effort", param=name)
    read: dict[str, Any] = {}
    if (effort := value.get("effort")) is not None:
        read["reasoning_effort"] = typed(effort, str, f"{name}.effort")
    if (enabled := value.get("enabled")) is not None:
        read |= _thinks(typed(enabled, bool, f"{name}.enabled"))
    for other in value.keys() - {"effort", "enabled"}:
        if value[other] not in (None, False):
            ignored.add_field(f"{name}.{other}", "thoughts are neither cut off nor hidden")
    return read


def _reasoning_format(value: Any, name: str, ignored: Ignored) -> dict[str, Any]:
    """llama.cpp's and Groq's word for where the thoughts stand."""
    given = typed(value, str, name)
    if given in ("none", "raw"):
        return {"separate_reasoning": False}
    if given not in ("auto", "deepseek", "deepseek-legacy", "parsed"):
        ignored.add_field(name, "thoughts come as reasoning_content")
    return {}


def _usage(value: Any, name: str, _: Ignored) -> dict[str, Any]:
    """OpenRouter's way to ask for the counts, which only streams leave out."""
    include = value.get("include") if isinstance(value, dict) else value
    return {"stream_options": {"include_usage": True}} if include is True else {}


def _stops(value: Any, _: str, __: Ignored) -> dict[str, Any]:
    return {"stop_sequences": [value] if isinstance(value, str) else value}


def _output_format(value: Any, _: str, __: Ignored) -> dict[str, Any]:
    """Where Anthropic's format stood before."""
    return {"output_config": {"format": value}}


_UNCONSTRAINED = "use output_config.format"
_TEXT_ONLY = "leave it out: this server takes text only"
_ONE_WORKER = "leave it out: this server is one worker, which does both prefill and decode"
_NO_ADAPTERS = "use lora_path of the request, or the adapter's name as model"
_NO_SAMPLER = "use temperature, top_p, top_k and min_p"
_NO_SUCH_OUTPUT = "leave it out: this server has no such output"
_NO_PROCESSORS = "use logit_bias, allowed_token_ids or bad_words: there are no custom logits processors"

FOREIGN_FIELDS: tuple[ForeignField, ...] = (
    # -- labels, and what is so anyway ---------------------------------------------------------------------------------
    *_listed("nothing to do", "SGLang's routers", ENDPOINTS, "no_logs", "a label; prompts are logged with "
             "--log-requests-level 2 and 3 alone"),
    *_listed("nothing to do", "SGLang's routers", GENERATE + COMPLETIONS, "routing_key", "a label for routers"),
    *_listed("nothing to do", "smg, sglang-router", GENERATE, "model", "the one model answers, with the adapter "
             "that it names, if it names one"),
    *_listed("nothing to do", "SGLang", ALL, "custom_labels external_trace_header received_time", "labels for metrics "
             "and traces"),
    *_listed("nothing to do", "OpenAI", TEXTS + MESSAGES, "service_tier", "there is one tier"),
    *_listed("nothing to do", "OpenAI", TEXTS, "metadata store", "labels; chats are not stored"),
    *_listed("nothing to do", "OpenAI", RESPONSES, "service_tier", "there is one tier"),
    *_listed("nothing to do", "OpenAI", OPENAI, "safety_identifier", "a label"),
    *_listed("nothing to do", "OpenAI", OPENAI, "prompt_cache_retention prompt_cache_options",
             "every prefix is cached"),
    *_listed("nothing to do", "OpenAI", COMPLETIONS, "prompt_cache_key", "every prefix is cached; cache_salt keeps "
             "caches apart"),
    *_listed("nothing to do", "OpenAI", RESPONSES, "max_tool_calls", "tools are run by the client"),
    *_listed("nothing to do", "Anthropic", MESSAGES, "cache_control", "every prefix is cached, marked or not"),
    *_listed("nothing to do", "Anthropic", MESSAGES, "inference_geo user_profile_id workspace_id anthropic_version "
             "anthropic_beta betas", "labels for the provider"),
    *_listed("nothing to do", "Codex", RESPONSES, "client_metadata", "labels"),
    *_listed("nothing to do", "SGLang", OPENAI, "return_cached_tokens_details return_spec_tokens_details", "answers "
             "have the counts anyway"),
    *_listed("nothing to do", "Open WebUI, LiteLLM", OPENAI, "chat_id message_id litellm_session_id litellm_trace_id "
             "litellm_call_id litellm_metadata trace tags", "labels"),
    *_listed("nothing to do", "SGLang, vLLM", ENDPOINTS, "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
             "video_max_dynamic_patch use_audio_in_video video_config images_config mm_processor_kwargs "
             "media_io_kwargs need_wait_for_mm_inputs num_items_assigned routed_experts_start_len "
             "routed_experts_prompt_start return_mm_kwargs", "settings for pictures or experts, of which there are "
             "none"),
    *_listed("nothing to do", "SGLang, Dynamo", GENERATE, "kv_router_hint kv_hints http_worker_ipc", "hints for "
             "routers"),
    *_listed("nothing to do", "vLLM", CHAT, "length_penalty early_stopping", "a chat has no beam search"),
    # -- names of conversations ----------------------------------------------------------------------------------------
    *_listed("names", "SGLang, smg", ENDPOINTS, "conversation_id", "one conversation"),
    *_listed("names", "SGLang, vLLM, OpenRouter", ENDPOINTS, "session_id", "one conversation"),
    *_listed("names", "OpenAI", GENERATE + TEXTS + MESSAGES, "conversation", "one conversation: a string, or an object "
             "with an id"),
    *_listed("names", "SGLang's routers", CHATS, "routing_key", "a conversation, with the first message of its user"),
    *_listed("names", "OpenAI", CHAT + RESPONSES, "prompt_cache_key", "a conversation, with the first message of its "
             "user"),
    # -- read as fields of ours ----------------------------------------------------------------------------------------
    *_listed("used", "Qwen's API, SGLang, vLLM", CHAT + RESPONSES, "enable_thinking",
             "chat_template_kwargs.enable_thinking", read=_enable_thinking),
    *_listed("used", "Ollama", CHAT, "think", "chat_template_kwargs.enable_thinking, or reasoning_effort", read=_think),
    *_listed("used", "DeepSeek, GLM, LiteLLM", CHAT, "thinking", "chat_template_kwargs.enable_thinking",
             read=_thinking),
    *_listed("used", "OpenRouter", CHAT, "reasoning", "reasoning_effort, chat_template_kwargs.enable_thinking",
             read=_reasoning),
    *_listed("used", "OpenAI's chats", RESPONSES, "reasoning_effort", "reasoning.effort",
             read=lambda value, name, _: {"reasoning": {"effort": typed(value, str, name)}}),
    *_listed("used", "llama.cpp, Groq", CHAT, "reasoning_format", "separate_reasoning", read=_reasoning_format),
    *_listed("used", "vLLM", OPENAI + SAMPLING, "guided_json", "json_schema", read=_as("json_schema")),
    *_listed("used", "vLLM", OPENAI + SAMPLING, "guided_regex", "regex", read=_as("regex")),
    *_listed("used", "vLLM, llama.cpp", OPENAI + SAMPLING, "guided_grammar grammar", "ebnf", read=_as("ebnf")),
    *_listed("used", "vLLM", OPENAI + SAMPLING, "guided_choice", "choice", read=_as("choice")),
    *_listed("used", "vLLM", OPENAI + SAMPLING, "structured_outputs guided_decoding", "json_schema, regex, ebnf, "
             "choice, structural_tag", read=read_structured_outputs),
    *_listed("used", "OpenAI's chats", COMPLETIONS + SAMPLING, "response_format", "json_schema",
             read=lambda value, name, _: read_response_format(value, name)),
    *_listed("used", "MiniMax", CHAT, "reasoning_split", "separate_reasoning", read=_as("separate_reasoning")),
    *_listed("used", "OpenRouter", TEXTS, "usage", "stream_options.include_usage", read=_usage),
    *_listed("used", "llama.cpp, Ollama", OPENAI + MESSAGES + SAMPLING, "repeat_penalty", "repetition_penalty",
             read=_as("repetition_penalty")),
    *_listed("used", "llama.cpp, Ollama", CHAT, "n_predict num_predict", "max_tokens; a negative number is no limit",
             read=_max_tokens("max_tokens", unlimited=True)),
    *_listed("used", "llama.cpp, Ollama", COMPLETIONS, "n_predict num_predict", "max_tokens",
             read=_max_tokens("max_tokens", unlimited=False)),
    *_listed("used", "TGI, SGLang, OpenAI", TEXTS, "max_new_tokens max_output_tokens", "max_tokens",
             read=_as("max_tokens")),
    *_listed("used", "OpenAI's chats", COMPLETIONS, "max_completion_tokens", "max_tokens", read=_as("max_tokens")),
    *_listed("used", "OpenAI's chats", RESPONSES, "max_tokens max_completion_tokens max_new_tokens",
             "max_output_tokens", read=_as("max_output_tokens")),
    *_listed("used", "OpenAI", SAMPLING, "max_tokens", "max_new_tokens", read=_as("max_new_tokens")),
    *_listed("used", "OpenAI", SAMPLING, "min_tokens", "min_new_tokens", read=_as("min_new_tokens")),
    *_listed("used", "Anthropic, TGI", TEXTS + RESPONSES + SAMPLING, "stop_sequences", "stop", read=_as("stop")),
    *_listed("used", "OpenAI", MESSAGES, "stop", "stop_sequences", read=_stops),
    *_listed("used", "Anthropic", MESSAGES, "output_format", "output_config.format", read=_output_format),
    *_listed("used", "Mistral", TEXTS, "random_seed", "seed", read=_as("seed")),
    # -- ignored -------------------------------------------------------------------------------------------------------
    *_listed("no effect", "Ollama", ENDPOINTS, "keep_alive", "the model stays loaded"),
    *_listed("no effect", "LM Studio", ENDPOINTS, "ttl", "the model stays loaded"),
    *_listed("no effect", "Ollama", ENDPOINTS, "options", "send what it holds as fields of the request"),
    *_listed("no effect", "Ollama", ENDPOINTS, "num_ctx", "the server's --context-length holds"),
    *_listed("no effect", "llama.cpp", ENDPOINTS, "cache_prompt", "every prefix is cached", off=(True,)),
    *_listed("no effect", "llama.cpp", ENDPOINTS, "id_slot slot_id", "there are no slots", off=(-1,)),
    *_listed("no effect", "llama.cpp", ENDPOINTS, "n_keep n_discard n_cache_reuse n_indent t_max_predict_ms min_keep",
             "it is a setting of llama.cpp's", off=(0,)),
    *_listed("no effect", "llama.cpp", ENDPOINTS, "timings_per_token return_progress return_tokens post_sampling_probs "
             "parse_tool_calls thinking_forced_open", "the answer has what this API has", off=(False,)),
    *_listed("no effect", "llama.cpp, text-generation-webui", ENDPOINTS + SAMPLING, "samplers sampler_order "
             "sampler_priority temperature_last", "the order of the samplers is fixed", off=(False,)),
    *_listed("no effect", "llama.cpp, MLX", ENDPOINTS + SAMPLING, "repeat_last_n repetition_context_size "
             "repetition_penalty_range penalize_nl penalty_prompt", "the penalty counts the prompt and all of the "
             "output"),
    *_listed("no effect", "llama.cpp, text-generation-webui", ENDPOINTS + SAMPLING, "mirostat_tau mirostat_eta "
             "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent "
             "dynatemp_low dynatemp_high smoothing_curve", "it belongs to a sampler that is off"),
    *_listed("no effect", "llama.cpp, LM Studio, MLX", ENDPOINTS, "draft_model num_draft_tokens speculative.n_max "
             "speculative.n_min speculative.p_min", "speculation is configured on the server"),
    *_listed("no effect", "OpenRouter", OPENAI + MESSAGES, "provider models route transforms plugins "
             "allow_fallbacks", "this server is the one provider, of one model"),
    *_listed("no effect", "OpenAI", TEXTS, "prediction", "speculation is configured on the server"),
    *_listed("no effect", "OpenAI", TEXTS, "verbosity", "the model is not told", off=("medium",)),
    *_listed("no effect", "OpenRouter, vLLM", CHAT + RESPONSES, "include_reasoning", "thoughts come as "
             "reasoning_content", off=(True,)),
    *_listed("no effect", "SGLang", CHAT, "stream_reasoning", "thoughts are streamed as they come", off=(True,)),
    *_listed("no effect", "vLLM, Qwen's API, SGLang", ENDPOINTS, "thinking_token_budget thinking_budget "
             "reasoning_budget max_thinking_tokens", "thoughts have no limit of their own", off=(-1,)),
    *_listed("no effect", "SGLang", GENERATE + CHAT, "require_reasoning", "the template decides", off=(False,)),
    *_listed("no effect", "SGLang", GENERATE, "log_metrics", "metrics count every request", off=(True,)),
    *_listed("no effect", "SGLang, vLLM", ENDPOINTS + SAMPLING, "stream_interval", "events come as tokens do",
             off=(1,)),
    *_listed("no effect", "vLLM", TEXTS, "repetition_detection", "max_tokens ends what repeats itself"),
    *_listed("no effect", "vLLM", OPENAI, "guided_decoding_backend guided_whitespace_pattern", "grammars are enforced "
             "in one way"),
    *_listed("no effect", "OpenAI's chats", COMPLETIONS, "reasoning_effort enable_thinking chat_template_kwargs "
             "separate_reasoning", "a completion has no chat template", off=(True,)),
    *_listed("no effect", "Mistral", CHAT, "safe_prompt prompt_mode", "use a system message", off=(False,)),
    *_listed("no effect", "TGI", CHAT, "tool_prompt guideline", "use a system message"),
    *_listed("no effect", "Qwen's API", CHAT, "incremental_output result_format", "the answer has OpenAI's form",
             off=(True, "message")),
    *_listed("no effect", "OpenAI's Python client", ENDPOINTS, "extra_headers extra_query timeout", "it is an argument "
             "of the client, not of the body"),
    *_listed("no effect", "OpenAI", RESPONSES, "context_management", "conversations are not summarised here"),
    *_listed("no effect", "Anthropic", MESSAGES, "mcp_servers", "tools are run by the client"),
    *_listed("no effect", "Anthropic", MESSAGES, "speed", "there is one speed", off=("standard",)),
    *_listed("no effect", "OpenAI", RESPONSES, "background_options", "it is read in the background by its id"),
    # -- refused -------------------------------------------------------------------------------------------------------
    *_listed("refused", "TGI, Ollama", ENDPOINTS + SAMPLING, "grammar_string format", "use json_schema, regex or ebnf"),
    *_listed("refused", "vLLM, SGLang, llama.cpp", GENERATE, "guided_json guided_regex guided_choice guided_grammar "
             "guided_decoding structured_outputs grammar response_format",
             "use json_schema, regex, ebnf or choice of sampling_params", off=({"type": "text"},)),
    *_listed("refused", "vLLM, SGLang, llama.cpp", MESSAGES, "guided_json guided_regex guided_choice "
             "guided_grammar guided_decoding structured_outputs json_schema regex ebnf choice grammar",
             _UNCONSTRAINED),
    *_listed("refused", "OpenAI's chats", RESPONSES, "response_format", "use text.format", off=({"type": "text"},)),
    *_listed("refused", "SGLang, vLLM", ENDPOINTS, "image_data video_data audio_data input_embeds prompt_embeds "
             "positional_embed_overrides mm_hashes mm_content_hashes mm_payload encoder_urls images image "
             "token_indices_to_pool multi_item_delimiter_indices", _TEXT_ONLY),
    *_listed("refused", "OpenAI", ENDPOINTS, "modalities", _TEXT_ONLY, off=(["text"],)),
    *_listed("refused", "OpenAI", CHAT, "audio", _TEXT_ONLY),
    *_listed("refused", "SGLang, vLLM", ENDPOINTS, "return_hidden_states return_routed_experts return_indexer_topk "
             "return_bytes return_entropy return_sampling_mask return_flat_raw_top_logprobs "
             "return_flat_raw_output_top_logprobs return_meta_info return_input_ids_in_sglext "
             "return_output_ids_in_sglext return_weight_versions return_token_offsets return_prompt_text",
             _NO_SUCH_OUTPUT, off=(False,)),
    *_listed("refused", "SGLang", ENDPOINTS, "return_flat_raw_top_logprobs_b64", _NO_SUCH_OUTPUT, off=(False, True)),
    *_listed("refused", "SGLang", ENDPOINTS, "sampling_logprobs_mode", _NO_SUCH_OUTPUT),
    *_listed("refused", "vLLM", TEXTS, "return_tokens_as_token_ids", "use return_token_ids", off=(False,)),
    *_listed("refused", "SGLang", TEXTS, "return_prompt_token_ids", "use return_token_ids", off=(False,)),
    *_listed("refused", "vLLM", TEXTS, "logprob_token_ids", "use token_ids_logprob of /generate"),
    *_listed("refused", "llama.cpp", TEXTS, "n_probs", "use logprobs", off=(0,)),
    *_listed("refused", "llama.cpp", ENDPOINTS, "response_fields", _NO_SUCH_OUTPUT),
    *_listed("refused", "SGLang, vLLM, llama.cpp, TGI", ENDPOINTS + SAMPLING, "lora_id lora lora_request adapter_id "
             "adapters", _NO_ADAPTERS),
    *_listed("refused", "SGLang", SAMPLING, "lora_path", _NO_ADAPTERS),
    *_listed("refused", "SGLang", ENDPOINTS, "session_params", "use continuation_of, or send the whole conversation: "
             "its beginning is cached"),
    *_listed("refused", "SGLang, vLLM", ENDPOINTS, "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key "
             "decode_tp_size kv_transfer_params ec_transfer_params", _ONE_WORKER),
    *_listed("refused", "SGLang", ENDPOINTS, "routed_dp_rank data_parallel_rank data_parallel_rank_decode "
             "disagg_prefill_dp_rank", _ONE_WORKER, off=(0, -1)),
    *_listed("refused", "SGLang, vLLM", ENDPOINTS, "custom_logit_processor logits_processors vllm_xargs",
             _NO_PROCESSORS),
    *_listed("refused", "SGLang", ENDPOINTS + SAMPLING, "custom_params", _NO_PROCESSORS),
    *_listed("refused", "SGLang, vLLM, TGI", ENDPOINTS + SAMPLING, "watermark watermarking", "leave it out: text is "
             "not watermarked", off=(False,)),
    *_listed("refused", "llama.cpp, text-generation-webui, TGI", ENDPOINTS + SAMPLING, "mirostat mirostat_mode "
             "dry_multiplier xtc_probability dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff top_a "
             "penalty_alpha no_repeat_ngram_size dynamic_temperature", _NO_SAMPLER, off=(0, False)),
    *_listed("refused", "llama.cpp, TGI", ENDPOINTS + SAMPLING, "typical_p typical tfs_z tfs guidance_scale "
             "encoder_repetition_penalty", _NO_SAMPLER, off=(1,)),
    *_listed("refused", "llama.cpp, text-generation-webui", ENDPOINTS + SAMPLING, "top_n_sigma nsigma "
             "adaptive_target", _NO_SAMPLER, off=(0, -1)),
    *_listed("refused", "text-generation-webui", ENDPOINTS, "negative_prompt", "use the prompt itself"),
    *_listed("refused", "text-generation-webui", ENDPOINTS, "custom_token_bans banned_tokens", "use bad_words, or "
             "logit_bias"),
    *_listed("refused", "text-generation-webui", ENDPOINTS, "ban_eos_token", "use ignore_eos", off=(False,)),
    *_listed("refused", "transformers, TGI", ENDPOINTS + SAMPLING, "do_sample", "use temperature: 0", off=(True,)),
    *_listed("refused", "transformers", ENDPOINTS + SAMPLING, "num_beams", "use beam_width, with n", off=(1,)),
    *_listed("refused", "transformers", TEXTS, "max_length", "use max_tokens"),
    *_listed("refused", "transformers", TEXTS, "min_length", "use min_tokens", off=(0,)),
    *_listed("refused", "TGI", ENDPOINTS, "inputs", "use text of /generate, or prompt of /v1/completions"),
    *_listed("refused", "TGI", ENDPOINTS, "parameters", "use sampling_params of /generate"),
    *_listed("refused", "TGI", ENDPOINTS, "details decoder_input_details return_full_text", _NO_SUCH_OUTPUT,
             off=(False,)),
    *_listed("refused", "vLLM", TEXTS, "truncation_side", "use truncate_prompt_tokens, which keeps the end",
             off=("left",)),
    *_listed("refused", "vLLM", CHAT, "echo", "use /v1/completions", off=(False,)),
    *_listed("refused", "vLLM", CHAT, "best_of", "use n", off=(1,)),
    *_listed("refused", "vLLM", CHAT, "use_beam_search", "use /v1/completions", off=(False,)),
    *_listed("refused", "vLLM", CHAT, "add_special_tokens", "use /v1/completions: the template writes them",
             off=(False,)),
    *_listed("refused", "vLLM", COMPLETIONS, "add_special_tokens", "use token ids as the prompt", off=(True,)),
    *_listed("refused", "vLLM", CHATS, "chat_template", "use --chat-template of the server"),
    *_listed("refused", "vLLM", MESSAGES, "chat_template_kwargs", "use thinking and output_config.effort"),
    *_listed("refused", "OpenAI", MESSAGES, "reasoning_effort", "use output_config.effort"),
    *_listed("refused", "OpenAI", MESSAGES, "max_completion_tokens max_output_tokens", "use max_tokens"),
    *_listed("refused", "Qwen's API, xAI", CHAT, "enable_search search_parameters", "use tools: the client runs them",
             off=(False, {"mode": "off"}, {"mode": "auto"})),
    *_listed("refused", "OpenAI", CHAT, "web_search_options", "use tools: the client runs them", empty_asks=True),
    *_listed("refused", "OpenAI", CHAT, "functions", "use tools"),
    *_listed("refused", "OpenAI", CHAT, "function_call", "use tool_choice", off=("none", "auto")),
    *_listed("refused", "OpenAI", COMPLETIONS, "suffix", "use prompt for all that the text is to follow"),
    *_listed("refused", "OpenAI", COMPLETIONS, "messages", "use prompt, or /v1/chat/completions"),
    *_listed("refused", "OpenAI", COMPLETIONS, "tools", "use /v1/chat/completions"),
    *_listed("refused", "OpenAI", COMPLETIONS, "tool_choice", "use /v1/chat/completions", off=("none", "auto")),
    *_listed("refused", "SGLang", COMPLETIONS, "text input_ids", "use prompt"),
    *_listed("refused", "OpenAI", COMPLETIONS, "input", "use prompt"),
    *_listed("refused", "OpenAI", CHAT, "prompt", "use messages, or /v1/completions"),
    *_listed("refused", "OpenAI", CHAT, "input", "use messages, or /v1/responses"),
    *_listed("refused", "Anthropic, Ollama", CHAT, "system", "use a message with the role system"),
    *_listed("refused", "SGLang", CHAT, "input_ids", "use messages, or /generate"),
    *_listed("refused", "OpenAI", RESPONSES, "conversation", "use previous_response_id: the items of a "
             "conversation are not stored"),
    *_listed("refused", "OpenAI", RESPONSES, "messages", "use input"),
    *_listed("refused", "OpenAI", RESPONSES, "prompt", "use input: there are no stored prompts"),
    *_listed("refused", "OpenAI", RESPONSES, "truncation", "leave it out: nothing is cut off", off=("disabled",)),
    *_listed("refused", "OpenAI", RESPONSES, "moderation access_programs", "leave it out"),
    *_listed("refused", "OpenAI", RESPONSES, "n", "use several requests", off=(1,)),
    *_listed("refused", "vLLM", RESPONSES, "enable_response_messages previous_input_messages", "use input_items of "
             "the response", off=(False,)),
    *_listed("refused", "Anthropic", MESSAGES, "container", "leave it out: tools are run by the client"),
    # By this code Anthropic's tool runner knows that it has to send whole conversations.
    ForeignField(name="thread", outcome="refused", apis=MESSAGES, of="Anthropic's Python client",
                 about="use messages, with the whole conversation", code="thread_unsupported_request"),
    *_listed("refused", "OpenAI", MESSAGES, "n", "use several requests", off=(1,)),
    *_listed("refused", "OpenAI", GENERATE, "prompt", "use text"),
    *_listed("refused", "OpenAI", GENERATE, "messages", "use /v1/chat/completions"),
    *_listed("refused", "OpenAI", GENERATE, "max_tokens max_completion_tokens", "use sampling_params.max_new_tokens"),
    *_listed("refused", "llama.cpp, Ollama", GENERATE, "n_predict num_predict", "use sampling_params.max_new_tokens"),
    *_listed("refused", "llama.cpp, Ollama", GENERATE, "repeat_penalty", "use sampling_params.repetition_penalty"),
    *_listed("refused", "SGLang", GENERATE, "background", "use /v1/responses", off=(False,)),
    *_listed("refused", "vLLM", SAMPLING, "use_beam_search", "use beam_width, the number of beams",
             off=(False,)),
    # -- fields of Baton's that belong to other endpoints --------------------------------------------------------------
    *_listed("refused", "Baton", CHAT, "continuation_of continuation_suffix continuation_ids continuation_at "
             "continuation_index keep_parent", "use messages only (a chat continues its last turn automatically), or "
             "/v1/completions", off=("finish", 0, False)),
    *_listed("refused", "Baton", RESPONSES, "continuation_of continuation_suffix continuation_ids continuation_at "
             "continuation_index keep_parent", "use previous_response_id, or /v1/completions",
             off=("finish", 0, False)),
    *_listed("refused", "Baton", MESSAGES, "continuation_of continuation_suffix continuation_ids continuation_at "
             "continuation_index keep_parent", "use messages only (a chat continues its last turn automatically), or "
             "/v1/completions", off=("finish", 0, False)),
    *(ForeignField(name=name, outcome="refused", apis=GENERATE, of="OpenAI", about=f"use sampling_params.{name}")
      for name in (*SamplingParams.__struct_fields__, *GRAMMARS, "sampling_seed")
      if name not in ("no_stop_trim", "grammar")),
)  # fmt: skip


def _by_api() -> dict[Api, dict[str, ForeignField]]:
    tables: dict[Api, dict[str, ForeignField]] = {api: {} for api in ENDPOINT_OF}
    for field in FOREIGN_FIELDS:
        for api in field.apis:
            if field.name in tables[api]:
                raise ValueError(f"{field.name} is listed twice for {api}")
            tables[api][field.name] = field
    return tables


FOREIGN_OF: Mapping[Api, Mapping[str, ForeignField]] = _by_api()
"""API -> name -> its row."""


# -- what the readers use ----------------------------------------------------------------------------------------------


def settle_fields(
    given: Mapping[str, Any], api: Api, served: Collection[str], ignored: Ignored, *, where: str = ""
) -> dict[str, Any]:
    """The fields of a request that its API has: those of ``served``, nulls included, and what foreign ones are read as.

    where: prefix of names in messages. Raises RequestRefused for foreign fields that ask for what is not served, for
    unknown ones unless ``ignored`` takes these, and where two fields that mean the same differ.
    """
    foreign = FOREIGN_OF[api]
    settled = {name: value for name, value in given.items() if name in served}
    for name, value in given.items():
        if name in served:
            continue
        field, full_name = foreign.get(name), f"{where}{name}"
        if field is None:
            pass_or_refuse_unknown(name, served, foreign, ignored, where=where)
        elif not field.asks(value) or field.outcome in ("names", "nothing to do"):
            continue
        elif field.outcome == "refused":
            off = "".join(f", {msgspec.json.encode(each).decode()}" for each in field.off)
            raise RequestRefused(
                f"{full_name} is not supported; {field.about} (accepted: null{off})",
                code=field.code,
                param=full_name,
            )
        elif field.read is None:
            ignored.add_field(full_name, field.about)
        else:
            _merge(settled, field.read(value, full_name, ignored), full_name, where)
    return settled


def _merge(settled: dict[str, Any], read: Mapping[str, Any], foreign: str, where: str) -> None:
    """Add what a foreign field was read as. Objects are joined. Raises RequestRefused where it differs from what is
    there."""
    for name, value in read.items():
        there = settled.get(name)
        if there is None:
            settled[name] = value
        elif isinstance(there, dict) and isinstance(value, dict):
            settled[name] = there = dict(there)
            _merge(there, value, foreign, f"{where}{name}.")
        elif not _same(there, value):
            raise RequestRefused(
                f"{foreign} and {where}{name} mean the same, and differ; give one of them", param=foreign
            )


def foreign_properties(api: Api) -> Properties:
    """The rows of an API, as ``/openapi.json`` describes them."""
    return {name: _schema_of(field) for name, field in FOREIGN_OF[api].items()}


def _schema_of(field: ForeignField) -> Schema:
    match field.outcome:
        case "used":
            return anything(f"Read as {field.about}. Sent by clients of {field.of}.")
        case "names":
            return anything(f"Names {field.about}. Sent by clients of {field.of}.")
        case "refused":
            about = f"Not supported; {field.about}. Accepted with a value that has no effect."
            if field.empty_asks:
                return enum(None, *field.off, about=about)
            nulls = {"type": "object", "additionalProperties": {"type": "null"}}
            return either(enum(None, "", [], *field.off), nulls, about=about)
        case outcome:
            return anything(f"Accepted, {outcome}: {field.about}.")
