"""Numbers at the edges of the types that a server computes with, and requests that hold them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.entrypoints.anthropic import messages
from baton.entrypoints.fields.sampling import SAMPLING
from baton.entrypoints.native import generate
from baton.entrypoints.openai import chat, completions
from baton.entrypoints.openai.responses import fields as response_fields

ITEMS = [(5, 6, 7), (5, 8, 9)]
ALLOWED = [5, 6, 7, 8]
ALLOWED_TEXT = set("&'()")
"""How the toy model's tokenizer writes them."""

_FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 2.0000001, 1 - 2**-53, 1 + 2**-52, 1 - 2**-24, 1e-6, 9.9e-7, 1e30, 1.01e30,
    65504.0, 65505.0, 65520.0, 6.1e-5, 5.96e-8, 2.9e-8,  # float16
    3.4028234663852886e38, 3.4028235677973366e38, 1e39, 1.17549435e-38, 1.4e-45, 7e-46,  # float32
    1.7976931348623157e308, 2.2250738585072014e-308, 5e-324, 100.0, 100.0001, -100.0, 10.0, -10.0, 10.0001,
]  # fmt: skip
_INTS = [
    0, 1, -1, 2, 3, 16, 512, 513, 1799, 1800, 2047, 2048, 65504, 65536, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1,
    2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30), 10**300,
]  # fmt: skip
_OTHERS: list[Any] = [True, False, "1", "", "nan", None, [], {}, [1], [0.5], {"1": 1}, "1e39", [None], [[1]]]
_RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1E+39",
    "-0",
    "-0e-400",
    "1" + "0" * 400,
    "01",
    "0x10",
    "1.",
]
"""JSON, or nearly, that Python's encoder does not write."""


@dataclass(frozen=True)
class Raw:
    """Stands in a body for this text."""

    text: str


def draw_value(rng: random.Random, *, raw: bool = True) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(_FLOATS)
    if kind < 0.8:
        return rng.choice(_INTS)
    if kind < 0.93 or not raw:
        return rng.choice(_OTHERS)
    return Raw(rng.choice(_RAW))


def draw_near_limits(rng: random.Random, schema: Any) -> Any:
    """A value at, or just inside or outside, a limit that a field's schema says; nothing in particular without one."""
    limits = list(_limits(schema))
    if not limits:
        return draw_value(rng)
    limit, is_whole = rng.choice(limits)
    kind = rng.random()
    if is_whole:
        low = min(value for value, _ in limits)
        return limit + rng.choice([0, 0, 1, -1]) if kind < 0.5 else low + rng.choice([0, 1, 2, 3])
    if kind < 0.5:
        return math.nextafter(limit, rng.choice([math.inf, -math.inf, limit]))
    if kind < 0.7:
        return limit * rng.choice([0.5, 1 - 2**-24, 1e-3, 2**-40])
    return rng.choice([5e-324, 1e-45, 1e-38, 1e-6, 0.5, 1.0, 1, -0.0])


def _limits(schema: Any) -> Iterator[tuple[float, bool]]:
    if isinstance(schema, dict):
        kind = schema.get("type", ())
        for name in ("minimum", "maximum", "exclusiveMinimum"):
            if name in schema:
                yield schema[name], "integer" in kind
        for each in schema.values():
            yield from _limits(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _limits(each)


def encode_body(body: Any) -> bytes:
    """JSON, with each `Raw` as it stands."""
    texts: list[str] = []

    def default(value: Any) -> str:
        texts.append(value.text)
        return f"\0{len(texts) - 1}\0"

    text = json.dumps(body, default=default)
    for number, raw in enumerate(texts):
        text = text.replace(f'"\\u0000{number}\\u0000"', raw)
    return text.encode()


def _is_numeric(schema: Any) -> bool:
    text = json.dumps(schema)
    return '"integer"' in text or '"number"' in text


def _names(properties: dict[str, Any]) -> list[str]:
    """The numeric fields, ten times as likely as the others."""
    return [name for name, schema in properties.items() for _ in range(10 if _is_numeric(schema) else 1)]


_FIXED = {"stream", "input_ids", "text", "prompt", "messages", "input", "model", "job_id", "is_last_step", "extra_body"}
_FIXED |= {"rid", "request_id", "background", "store", "previous_response_id", "predecessor", "continuation_of"}


@dataclass(frozen=True)
class Api:
    path: str
    base: dict[str, Any]
    properties: dict[str, Any]
    fields: list[str]
    nested: str | None = None
    """The object that some of the fields stand in."""
    nested_fields: tuple[str, ...] = ()


def _api(path: str, base: dict[str, Any], properties: dict[str, Any]) -> Api:
    return Api(
        path,
        base,
        properties,
        [name for name in _names(properties) if name not in _FIXED and name != "sampling_params"],
    )


APIS = [
    Api(
        "/generate",
        {"text": "abc"},
        generate.PROPERTIES,
        _api("", {}, generate.PROPERTIES).fields,
        nested="sampling_params",
        nested_fields=tuple(_names(SAMPLING)),
    ),
    _api("/v1/completions", {"prompt": "abc", "max_tokens": 3}, completions.PROPERTIES),
    _api(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
        chat.PROPERTIES,
    ),
    _api("/v1/responses", {"input": "abc", "max_output_tokens": 3}, response_fields.PROPERTIES),
    _api(
        "/v1/messages",
        {"model": "toy", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
        messages.PROPERTIES,
    ),
]


def draw_sampling(rng: random.Random, names: tuple[str, ...], *, raw: bool = True) -> tuple[dict[str, Any], int]:
    """Sampling parameters in SGLang's names, and how many of their values are at an edge."""
    sampling: dict[str, Any] = {"max_new_tokens": 3}
    kind = rng.random()
    if kind < 0.3:
        sampling["item_trie"] = "t"
    elif kind < 0.6:
        sampling["allowed_token_ids"] = ALLOWED
    if rng.random() < 0.25 and kind >= 0.3:
        sampling |= {"repetition_penalty": 1.5, "frequency_penalty": -2, "presence_penalty": 2}
    if rng.random() < 0.25 and not 0.3 <= kind < 0.6:
        sampling |= {"beam_width": 2, "n": 2}
    count = rng.choice([1, 1, 2, 3])
    for name in rng.sample(names, count):
        sampling[name] = draw_odd(rng, name, SAMPLING.get(name), raw=raw)
    return sampling, count


def draw_odd(rng: random.Random, name: str, schema: Any = None, *, raw: bool = True) -> Any:
    """A value for a field: of a list or of an object of numbers often one that holds it."""
    value = draw_near_limits(rng, schema) if schema and rng.random() < 0.6 else draw_value(rng, raw=raw)
    if not raw and isinstance(value, Raw):
        value = 1
    if rng.random() < 0.8:
        if name == "logit_bias":
            key = rng.choice(["5", "1799", "1800", "-1", "1e3", str(2**31), str(2**63), "9" * 30, "5.0", ""])
            return {rng.choice([key, "5", "5"]): rng.choice([value, 100, -100])}
        if name in ("stop_token_ids", "allowed_token_ids", "token_ids_logprob", "input_ids", "continuation_ids"):
            return [value, 5]
    return value


def draw_body(rng: random.Random, api: Api) -> tuple[dict[str, Any], int]:
    """A body, and how many of its values are at an edge."""
    body = dict(api.base)
    count = rng.choice([1, 1, 2, 3])
    if api.nested is not None and rng.random() < 0.75:
        sampling, count = draw_sampling(rng, api.nested_fields)
        return body | {api.nested: sampling}, count
    if api.nested is not None:
        body[api.nested] = {"max_new_tokens": 3}
        if rng.random() < 0.5:
            body["return_logprob"] = True
        if rng.random() < 0.2:
            del body["text"]
            body["input_ids"] = [5, draw_value(rng)]
    elif "allowed_token_ids" in api.fields and rng.random() < 0.5:
        body["allowed_token_ids"] = ALLOWED
    for name in rng.sample(api.fields, count):
        body[name] = draw_odd(rng, name, api.properties[name])
    return body, count


def find_outputs(answer: Any) -> Iterator[tuple[list[int] | None, str]]:
    """(ids if they are there, text) of each output of an answer of /generate or /v1/completions."""
    for each in answer if isinstance(answer, list) else [answer]:
        if "output_ids" in each:
            yield each["output_ids"], each["text"]
        for choice in each.get("choices", ()):
            if "text" in choice:
                yield None, choice["text"]
