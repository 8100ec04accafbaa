"""The tables of fields say what the readers do: each limit is tried on both of its sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from baton.entrypoints.anthropic import messages
from baton.entrypoints.description.json_schema import Properties, Schema
from baton.entrypoints.fields.grammars import GRAMMARS
from baton.entrypoints.fields.sampling import SAMPLING, SAMPLING_ALIASES, parse_sampling_params
from baton.entrypoints.native import generate
from baton.entrypoints.openai import chat, completions
from baton.entrypoints.openai.common import VLLM, VLLM_NAMES
from baton.entrypoints.openai.responses import fields as responses
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams

ASKED = [{"role": "user", "content": "x"}]

READERS: dict[str, tuple[Callable[[dict[str, Any]], Any], Properties, Schema, dict[str, Any]]] = {
    "sampling_params": (parse_sampling_params, SAMPLING, {}, {}),
    "generate": (generate.parse_generate, generate.PROPERTIES, generate.BODY, {"text": "x"}),
    "completions": (completions.parse_completion, completions.PROPERTIES, completions.BODY, {"prompt": "x"}),
    "chat": (chat.parse_chat, chat.PROPERTIES, chat.BODY, {"messages": ASKED}),
    "responses": (responses.parse_response, responses.PROPERTIES, responses.BODY, {"input": "x"}),
    "messages": (
        messages.parse_messages,
        messages.PROPERTIES,
        messages.BODY,
        {"model": "m", "messages": ASKED, "max_tokens": 9},
    ),
}
"""Name -> (reader, its table, the schema of its whole body, the smallest body)."""

BESIDE: dict[str, dict[str, Any]] = {
    "beam_width": {"temperature": 0},
    "length_penalty": {"beam_width": 2, "temperature": 0},
    "early_stopping": {"beam_width": 2, "temperature": 0},
    "top_logprobs_num": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "continuation_index": {"continuation_of": "parent"},
    "continuation_at": {"continuation_of": "parent"},
    "best_of": {"n": 1},
    "parent_job_id": {"job_id": "j"},
}
"""Field -> what else a body needs, as far as its API has it."""

TOOLS = {
    "chat": [{"type": "function", "function": {"name": "f"}}],
    "responses": [{"type": "function", "name": "f"}],
    "messages": [{"name": "f", "input_schema": {}}],
}

SAME = {"sampling_seed": "seed", "max_completion_tokens": "max_tokens", "best_of": "n"}
"""Field -> the name that a refusal may give it."""

SPREAD = 2**40
"""Instead of limits beyond it, which no reader should need to know."""


def edges(schema: Schema) -> Iterator[tuple[Any, bool]]:
    """(value, is it allowed) on both sides of each limit."""
    step = 1 if schema.get("type") == "integer" else 1e-3
    for name, sign in (("minimum", -1), ("maximum", 1)):
        if name in schema and abs(schema[name]) < SPREAD:
            yield schema[name], True
            yield schema[name] + sign * step, False
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], False
        yield schema["exclusiveMinimum"] + step, True
    if "minLength" in schema:
        yield "x" * schema["minLength"], True
        yield "", False
    if "maxLength" in schema:
        yield "x" * schema["maxLength"], True
        yield "x" * (schema["maxLength"] + 1), False
    if "maxItems" in schema:
        item = "x" if schema["items"]["type"] == "string" else 1
        yield [item] * schema["maxItems"], True
        yield [item] * (schema["maxItems"] + 1), False
    if "maxProperties" in schema and "propertyNames" in schema:
        yield {str(n): "1" if schema["additionalProperties"]["type"] == "string" else 1 for n in range(
            schema["maxProperties"])}, True  # fmt: skip
        yield {str(n): 1 for n in range(schema["maxProperties"] + 1)}, False
    for value in schema.get("enum", ()):
        yield value, True
    if "enum" in schema:
        yield "no such value", False
    for other in schema.get("anyOf", ()):
        yield from ((value, allowed) for value, allowed in edges(other) if not isinstance(value, dict))


CASES = [
    pytest.param(api, name, value, allowed, id=f"{api}-{name}-{str(value)[:12]}-{len(str(value))}-{allowed}")
    for api, (_, table, _, _) in READERS.items()
    for name, schema in table.items()
    for value, allowed in edges(schema)
]


@pytest.mark.parametrize(("api", "name", "value", "allowed"), CASES)
def test_schema_limits_match_the_reader(api: str, name: str, value: Any, allowed: bool) -> None:
    read, table, _, smallest = READERS[api]
    beside = {other: given for other, given in BESIDE.get(name, {}).items() if other in table}
    if name == "best_of" and allowed:
        beside["n"] = value
    if name == "tool_choice":
        beside["tools"] = TOOLS[api]
    body = smallest | beside | {name: value}
    assert jsonschema_rs.is_valid(table[name], value) == allowed
    if allowed:
        read(body)
    else:
        with pytest.raises(RequestRefused) as refusal:
            read(body)
        param = (refusal.value.param or "").removeprefix("sampling_params.")
        assert param.split("[")[0] in (name, SAME.get(name)), refusal.value


@pytest.mark.parametrize("api", list(READERS)[1:])
def test_smallest_body_is_valid_and_readable(api: str) -> None:
    read, _, body, smallest = READERS[api]
    assert jsonschema_rs.is_valid(body, smallest)
    read(smallest)


@pytest.mark.parametrize("api", list(READERS))
def test_documented_defaults_are_accepted(api: str) -> None:
    read, table, _, smallest = READERS[api]
    defaults = {name: schema["default"] for name, schema in table.items() if "default" in schema}
    for name, default in defaults.items():
        assert default is None or jsonschema_rs.is_valid(table[name], default), name
        without = {other: given for other, given in smallest.items() if other != name}
        read(without | {name: default} if default is not None else smallest | {name: None})


def test_every_sampling_parameter_is_described() -> None:
    fields = {*SamplingParams.__struct_fields__} - {"grammar"}
    assert set(SAMPLING) == {*fields, *GRAMMARS, *SAMPLING_ALIASES}
    assert set(VLLM) == set(VLLM_NAMES)


def test_documented_sampling_defaults_match_sampling_params() -> None:
    for name, schema in SAMPLING.items():
        default = None if name in GRAMMARS else getattr(SamplingParams(), SAMPLING_ALIASES.get(name, name))
        expected = list(default) if isinstance(default, tuple) else default
        assert schema["default"] == (None if name == "allowed_token_ids" else expected), name
