"""Each row of the table of other servers' fields is tried in each API that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema_rs
import pytest

from baton.entrypoints.anthropic import messages
from baton.entrypoints.fields.foreign_fields import FOREIGN_FIELDS, FOREIGN_OF, Api, ForeignField
from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.fields.sampling import SAMPLING, parse_sampling_params
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native import generate
from baton.entrypoints.openai import chat, completions
from baton.entrypoints.openai.responses import fields as responses
from baton.scheduler.outcome import RequestRefused

ASKED = [{"role": "user", "content": "x"}]


class Reader(NamedTuple):
    """``read(body, ignored)`` gives what can be compared."""

    read: Callable[[dict[str, Any], Ignored], Any]
    served: tuple[str, ...]
    smallest: dict[str, Any]
    schema: Any
    """A validator; None for parts of a body."""


READERS: dict[Api, Reader] = {
    "generate": Reader(
        lambda body, ignored: generate.parse_generate(body, rid="r", ignored=ignored),
        tuple(generate.PROPERTIES), {"text": "x"}, jsonschema_rs.validator_for(generate.BODY),
    ),
    "sampling_params": Reader(
        lambda body, ignored: parse_sampling_params(body, ignored=ignored),
        tuple(SAMPLING), {}, None,
    ),
    "completions": Reader(
        lambda body, ignored: completions.parse_completion(body, rid="r", ignored=ignored),
        tuple(completions.PROPERTIES), {"prompt": "x"}, jsonschema_rs.validator_for(completions.BODY),
    ),
    "chat": Reader(
        lambda body, ignored: chat.parse_chat(body, rid="r", ignored=ignored),
        tuple(chat.PROPERTIES), {"messages": ASKED}, jsonschema_rs.validator_for(chat.BODY),
    ),
    "responses": Reader(
        lambda body, ignored: responses.parse_response(body, rid="r", ignored=ignored),
        tuple(responses.PROPERTIES), {"input": "x"}, jsonschema_rs.validator_for(responses.BODY),
    ),
    "messages": Reader(
        lambda body, ignored: messages.parse_messages(body, rid="r", ignored=ignored),
        tuple(messages.PROPERTIES), {"model": "m", "messages": ASKED, "max_tokens": 9},
        jsonschema_rs.validator_for(messages.BODY),
    ),
}  # fmt: skip

ECHOED = ("prompt_cache_key", "safety_identifier")
"""Labels that a response repeats."""


def read(api: Api, ignored: Any = None, **fields: Any) -> Any:
    reader = READERS[api]
    return reader.read(reader.smallest | fields, ignored or Ignored())


def rows(*outcomes: str) -> pytest.MarkDecorator:
    """Each row of the table with such an outcome; a test tries it in all of its APIs, as a case for each of the
    thousand pairs would take longer to collect and report than to run."""
    listed = [field for field in FOREIGN_FIELDS if field.outcome in outcomes or not outcomes]
    return pytest.mark.parametrize("field", listed, ids=[f"{field.name}-{field.apis[0]}" for field in listed])


@rows()
def test_neutral_values_of_foreign_fields_are_accepted_silently(field: ForeignField) -> None:
    empty = () if field.empty_asks else ("", [], {}, {"a": None})
    for api in field.apis:
        nothing = repr(read(api))
        for value in (None, *empty, *field.off):
            ignored = Ignored()
            assert repr(read(api, ignored, **{field.name: value})) == nothing, (api, value)
            assert not ignored.reasons, (api, value)
            if (schema := READERS[api].schema) is not None:
                assert schema.is_valid(READERS[api].smallest | {field.name: value}), (api, value)


@rows("refused")
def test_refused_foreign_fields_name_the_alternative(field: ForeignField) -> None:
    assert field.about.startswith(("use ", "leave it out"))
    for api in field.apis:
        with pytest.raises(RequestRefused) as refused:
            read(api, **{field.name: "something"})
        where = "sampling_params." if api == "sampling_params" else ""
        assert status_of(refused.value) == 400 and refused.value.code == field.code, api
        assert refused.value.param == f"{where}{field.name}"
        assert refused.value.message.startswith(f"{where}{field.name} is not supported; {field.about}")


@rows("no effect", "nothing to do")
def test_ignored_foreign_fields_have_no_effect(field: ForeignField) -> None:
    for api in field.apis:
        ignored = Ignored()
        answer = read(api, ignored, **{field.name: "something"})
        if not (api == "responses" and field.name in ECHOED):
            assert repr(answer) == repr(read(api)), api
        assert [name.split(".", 1)[-1] if api == "sampling_params" else name for name in ignored.reasons] == (
            [field.name] if field.outcome == "no effect" else []
        ), api


USED: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    ("chat", {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    (
        "chat",
        {"enable_thinking": True, "chat_template_kwargs": {"a": 1, "enable_thinking": True}},
        {"chat_template_kwargs": {"a": 1, "enable_thinking": True}},
    ),
    ("responses", {"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ("chat", {"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ("chat", {"think": "low"}, {"reasoning_effort": "low"}),
    ("chat", {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("chat", {"thinking": {"type": "adaptive"}}, {}),
    ("chat", {"thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ("chat", {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ("chat", {"reasoning": {"enabled": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("responses", {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
    ("chat", {"reasoning_format": "none"}, {"separate_reasoning": False}),
    ("chat", {"reasoning_format": "deepseek"}, {}),
    ("chat", {"reasoning_split": False}, {"separate_reasoning": False}),
    (
        "chat",
        {"usage": {"include": True}, "stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    ("chat", {"usage": {"include": True}}, {}),
    ("chat", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ("messages", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ("sampling_params", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ("chat", {"n_predict": 5}, {"max_tokens": 5}),
    ("chat", {"n_predict": -1}, {}),
    ("chat", {"num_predict": -2}, {}),
    ("chat", {"max_completion_tokens": 5, "n_predict": 5}, {"max_tokens": 5}),
    ("completions", {"n_predict": 5}, {"max_tokens": 5}),
    ("completions", {"max_completion_tokens": 5}, {"max_tokens": 5}),
    ("chat", {"max_new_tokens": 5}, {"max_tokens": 5}),
    ("chat", {"max_output_tokens": 5}, {"max_tokens": 5}),
    ("responses", {"max_tokens": 5}, {"max_output_tokens": 5}),
    ("sampling_params", {"max_tokens": 5, "min_tokens": 2}, {"max_new_tokens": 5, "min_new_tokens": 2}),
    ("chat", {"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ("messages", {"stop": "a"}, {"stop_sequences": ["a"]}),
    (
        "messages",
        {"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"effort": "low"}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}}},
    ),
    ("chat", {"random_seed": 3}, {"seed": 3}),
    ("chat", {"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
    ("completions", {"guided_regex": "a+"}, {"regex": "a+"}),
    ("responses", {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ("sampling_params", {"guided_grammar": 'start: "a"'}, {"ebnf": 'start: "a"'}),
    ("chat", {"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ("chat", {"structured_outputs": {"json": {"type": "object"}, "regex": None}}, {"json_schema": {"type": "object"}}),
    ("completions", {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, {"choice": ["a"]}),
    ("sampling_params", {"guided_decoding": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    ("completions", {"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    ("completions", {"response_format": {"type": "text"}}, {}),
    ("chat", {"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    ("responses", {"text": {"format": {"type": "json_object"}}}, {"json_schema": {"type": "object"}}),
]


@pytest.mark.parametrize(("api", "given", "meant"), USED)
def test_aliased_fields_are_read(api: Api, given: dict[str, Any], meant: dict[str, Any]) -> None:
    def comparable(answer: Any) -> Any:
        call = getattr(answer, "call", None)
        return answer if call is None else (call, getattr(answer, "include_usage", None))

    assert comparable(read(api, **given)) == comparable(read(api, **meant))


def test_every_used_foreign_field_is_tested() -> None:
    tried = {name for _, given, _ in USED for name in given}
    assert {field.name for field in FOREIGN_FIELDS if field.outcome == "used"} <= tried


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty and repetition_penalty mean the same"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "mean the same, and differ"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict and max_tokens mean the same"),
        ({"n_predict": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens differ"),
        ({"enable_thinking": "yes"}, 'enable_thinking is "yes"; it takes true or false'),
        ({"think": 3}, "think is 3; it takes true, false or an effort"),
        ({"thinking": {"type": "hard"}}, "thinking.type is"),
        ({"reasoning": "high"}, "reasoning is"),
        ({"reasoning_format": 3}, "reasoning_format is 3; it takes a string"),
    ],
)
def test_malformed_foreign_fields_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read("chat", **given)
    assert words in refused.value.message and status_of(refused.value) == 400


def test_unlimited_n_predict_is_refused_for_completions() -> None:
    with pytest.raises(RequestRefused, match="n_predict is -1; use max_tokens"):
        read("completions", n_predict=-1)


def test_ineffective_subfields_are_reported() -> None:
    ignored = Ignored()
    read("chat", ignored, reasoning={"effort": "low", "exclude": True, "max_tokens": 5, "summary": None})
    read("chat", ignored, thinking={"type": "enabled", "budget_tokens": 100}, reasoning_format="hidden")
    assert set(ignored.reasons) == {
        "reasoning.exclude", "reasoning.max_tokens", "thinking.budget_tokens", "reasoning_format",
    }  # fmt: skip


@pytest.mark.parametrize("api", READERS)
def test_no_field_is_both_served_and_foreign(api: Api) -> None:
    assert not set(READERS[api].served) & set(FOREIGN_OF[api])


def test_zero_is_distinguished_from_false() -> None:
    for name, value in (("return_hidden_states", 0), ("routed_dp_rank", False), ("do_sample", 1)):
        with pytest.raises(RequestRefused, match=f"{name} is not supported"):
            read("generate", **{name: value})
    read("generate", typical_p=1, tfs_z=1.0)


@pytest.mark.parametrize("api", READERS)
def test_unknown_fields_are_refused_or_reported(api: Api) -> None:
    where = "sampling_params." if api == "sampling_params" else ""
    with pytest.raises(RequestRefused) as refused:
        read(api, colour="red")
    assert refused.value.code == "unknown_field" and refused.value.param == f"{where}colour"
    ignored = Ignored("warn")
    assert repr(read(api, ignored, colour="red")) == repr(read(api))
    assert ignored.reasons == {f"{where}colour": "unknown"}


def test_unknown_sampling_params_can_be_ignored_too() -> None:
    ignored = Ignored("warn")
    read("generate", ignored, sampling_params={"colour": "red", "temperature": 0})
    assert ignored.reasons == {"sampling_params.colour": "unknown"}


TOOL = {"name": "ls", "input_schema": {"type": "object"}}
NESTED: list[tuple[Api, dict[str, Any], dict[str, Any], str]] = [
    ("messages", {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive", "colour": 1}}, "thinking"),
    ("messages", {"metadata": {"user_id": "u"}}, {"metadata": {"user_id": "u", "colour": 1}}, "metadata"),
    ("messages", {"output_config": {"effort": "low"}}, {"output_config": {"effort": "low", "colour": 1}},
     "output_config"),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "auto"}},
     {"tools": [TOOL], "tool_choice": {"type": "auto", "colour": 1}}, "tool_choice"),
    ("messages", {"tools": [TOOL]}, {"tools": [TOOL | {"colour": 1}]}, "tools[0]"),
    ("messages", {"context_management": {"edits": []}}, {"context_management": {"edits": [], "colour": 1}},
     "context_management"),
    ("responses", {"text": {"format": {"type": "text"}}}, {"text": {"format": {"type": "text"}, "colour": 1}}, "text"),
    ("responses", {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low", "colour": 1}}, "reasoning"),
    ("responses", {"stream_options": {}}, {"stream_options": {"colour": 1}}, "stream_options"),
    ("chat", {"stream_options": {}}, {"stream_options": {"colour": 1}}, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("api", "plain", "more", "where"), NESTED)
def test_unknown_nested_fields_are_refused_or_reported(api: Api, plain: dict, more: dict, where: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(api, **more)
    assert refused.value.code == "unknown_field" and refused.value.param == f"{where}.colour"
    ignored = Ignored("warn")
    found = read(api, ignored, **more)
    assert ignored.reasons == {f"{where}.colour": "unknown"}
    if api == "messages":  # a response repeats its settings
        assert repr(found) == repr(read(api, **plain))


# -- whole bodies, as programs send them -------------------------------------------------------------------------------

BODIES: dict[str, tuple[Api, dict[str, Any], set[str]]] = {
    "smg and sglang-router": (
        "generate",
        {"model": "unknown", "text": "x", "return_text_in_logprobs": False, "stream": False, "log_metrics": True,
         "return_hidden_states": False, "background": False, "no_logs": False, "return_bytes": False,
         "return_entropy": False, "sampling_params": {"temperature": 0.0, "sampling_seed": None}},
        set(),
    ),
    "SGLang's own dataclass, with all of its defaults": (
        "generate",
        {"text": "x", "input_ids": None, "input_embeds": None, "image_data": None, "session_id": None,
         "use_audio_in_video": False, "video_config": None, "watermark": None, "return_logprob": None,
         "logprob_start_len": None, "return_sampling_mask": None, "sampling_logprobs_mode": None,
         "return_flat_raw_top_logprobs": False, "return_flat_raw_output_top_logprobs": False,
         "return_flat_raw_top_logprobs_b64": False, "stream": False, "log_metrics": True,
         "return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0,
         "return_indexer_topk": False, "modalities": None, "session_params": None, "lora_path": None,
         "custom_logit_processor": None, "bootstrap_host": None, "routed_dp_rank": None, "routing_key": None,
         "background": False, "require_reasoning": False, "max_thinking_tokens": None, "priority": None,
         "no_logs": False, "custom_labels": None, "return_bytes": False, "return_entropy": False,
         "return_prompt_token_ids": False, "external_trace_header": None, "received_time": None,
         "token_indices_to_pool": None, "cache_salt": None, "kv_hints": None},
        set(),
    ),
    "vLLM's defaults": (
        "chat",
        {"logit_bias": None, "logprobs": False, "top_logprobs": 0, "n": 1, "response_format": None, "seed": None,
         "stop": [], "stream": False, "stream_options": None, "tools": None, "tool_choice": "none",
         "reasoning_effort": None, "thinking_token_budget": None, "include_reasoning": True,
         "parallel_tool_calls": True, "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [],
         "truncate_prompt_tokens": None, "truncation_side": None, "prompt_logprobs": None, "allowed_token_ids": None,
         "bad_words": [], "echo": False, "add_generation_prompt": True, "continue_final_message": False,
         "add_special_tokens": False, "documents": None, "chat_template": None, "chat_template_kwargs": None,
         "media_io_kwargs": None, "mm_processor_kwargs": None, "structured_outputs": None, "priority": 0,
         "return_tokens_as_token_ids": None, "return_token_ids": None, "cache_salt": None,
         "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None},
        set(),
    ),
    "llama.cpp's page": (
        "chat",
        {"stream": True, "reasoning_format": "auto", "temperature": 0.8, "max_tokens": 9, "dynatemp_range": 0,
         "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0,
         "xtc_threshold": 0.1, "typical_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
         "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
         "dry_penalty_last_n": -1, "samplers": ["top_k", "temperature"], "timings_per_token": True,
         "cache_prompt": True},
        {"dynatemp_exponent", "xtc_threshold", "repeat_last_n", "dry_base", "dry_allowed_length",
         "dry_penalty_last_n", "samplers", "timings_per_token"},
    ),
    "OpenRouter": (
        "chat",
        {"provider": {"order": ["a"]}, "models": ["a", "b"], "route": "fallback", "transforms": ["middle-out"],
         "reasoning": {"effort": "low"}, "usage": {"include": True}, "session_id": "s", "user": "u"},
        {"provider", "models", "route", "transforms"},
    ),
    "Ollama": (
        "chat", {"think": False, "keep_alive": "5m", "options": {"num_ctx": 4096}, "format": ""},
        {"keep_alive", "options"},
    ),
    "OpenAI's clients, nulls written out": (
        "chat",
        {"logit_bias": None, "response_format": {"type": "text"}, "stream": False, "stream_options": None,
         "modalities": ["text"], "audio": None, "prediction": None, "function_call": None, "functions": None,
         "store": False, "metadata": {}, "service_tier": "auto", "verbosity": "medium"},
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", BODIES)
def test_request_bodies_of_known_clients_are_accepted(program: str) -> None:
    api, body, without_effect = BODIES[program]
    ignored = Ignored()
    READERS[api].read(READERS[api].smallest | body, ignored)
    assert set(ignored.reasons) == without_effect
