"""Reads what an output must look like: a JSON schema, a regular expression, a grammar, or one of some texts.

SGLang's names are this server's; those of vLLM, OpenAI and llama.cpp are read into them:

    json_schema   guided_json, structured_outputs.json, response_format json_schema and json_object
    regex         guided_regex, structured_outputs.regex
    ebnf          guided_grammar, structured_outputs.grammar, grammar (GBNF, or Lark)
    choice        guided_choice, structured_outputs.choice
    structural_tag    structured_outputs.structural_tag, response_format structural_tag

The grammar is passed on in llguidance's form; a worker compiles it, and refuses what it cannot enforce.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, grammar_from

from ...runtime.constraints.json_checks import Beginning, JSONChecks, wrap
from ...runtime.constraints.lark import ascii_digits
from ...runtime.constraints.structural_tags import to_source
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import Grammar
from ..description.json_schema import Properties, either, enum, list_of, open_object, opened, string, taken
from .ignored import Ignored
from .reading import shown
from .schema_rewriting import Rewritten, Work, rewrite_for_reader, rewrite_schema
from .structural_tags import read_structural_tag

MAX_GRAMMAR_CHARS = 300_000
"""Most characters of a schema, an expression, a list of choices, or a Lark grammar, all of which are read on the
server's loop."""

MAX_GBNF_CHARS, MAX_GBNF_RULES = 50_000, 400
"""To turn GBNF into Lark takes time with the square of its rules, on the server's loop."""

MAX_CHOICES = 10_000

ANY_OBJECT = {"type": "object"}

GRAMMARS: Properties = {
    "json_schema": either(
        string(),
        open_object(),
        about="JSON Schema that the output fulfils, as an object or as its text.",
    ),
    "regex": string("Regular expression that the whole output matches (the syntax of Rust's regex)."),
    "ebnf": string("Grammar of the output: GBNF, or Lark as llguidance reads it."),
    "choice": list_of(string(), "The output is one of these texts.", least=1, most=MAX_CHOICES),
    "structural_tag": either(
        string(),
        open_object(),
        about="Text in which tags hold JSON of a schema, or other forms, in XGrammar's form, as an object or text.",
    ),
}


RESPONSE_FORMAT = either(
    taken({"type": enum("text")}, required=("type",)),
    taken({"type": enum("json_object"), "schema": open_object("What the object looks like.")}, required=("type",)),
    taken(
        {
            "type": enum("json_schema"),
            "json_schema": opened(taken({"schema": open_object(), "name": string()}, required=("schema",))),
        },
        required=("type", "json_schema"),
    ),
    opened(taken({"type": enum("structural_tag")}, required=("type",))),
    about="What the answer looks like: any text, a JSON object, JSON of a schema, or text with structural tags.",
)


TEXT_FORMAT = either(
    taken({"type": enum("text")}, required=("type",)),
    taken({"type": enum("json_object")}, required=("type",)),
    opened(
        taken({"type": enum("json_schema"), "schema": open_object(), "name": string()}, required=("type", "schema"))
    ),
    about="What the text looks like: anything, a JSON object, or JSON that fulfils a schema.",
)
"""As the Responses API writes it; Anthropic's has the last form."""


JSON_OPTIONS: Any = {
    # Every option of llguidance is set: a schema may hold options of its own, under x-guidance.
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # Without a bound, small models write spaces until they are cut off. This one is llama.cpp's.
    "whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,20}",
    "lenient": False,
    "coerce_one_of": False,
    # No \u: "\u0061" would be another spelling of the name "a", which is then held to the schema of other names.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}

_ONE_SPELLING: Any = {
    # As Python writes JSON. Where values are compared, spaces would only make more tokens to try out.
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def take_grammar(values: dict[str, Any], where: str) -> Grammar | None:
    """Take the fields above out of ``values``; None without one. where: prefix of names in messages. Raises
    RequestRefused."""
    given = {name: values.pop(name) for name in GRAMMARS if name in values}
    given = {name: value for name, value in given.items() if value is not None and value != ""}
    if not given:
        return None
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestRefused(
            f"{where}{first} and {where}{second} both say what the output looks like; give one of them",
            param=f"{where}{second}",
        )
    ((name, value),) = given.items()
    return Grammar(f"{where}{name}", _SOURCES[name](value, f"{where}{name}"))


def _read_schema(value: Any, name: str, *, reads: bool = True, work: Work | None = None) -> str:
    """reads: the output is read beside the grammar, for keywords that compare values. work: if several schemas of a
    request share it."""
    if isinstance(value, str):
        text = _text(value, name)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"{name} is not valid JSON: {error}", param=name) from None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        if value is False:
            raise RequestRefused(f"{name} is false; no output fulfils it", code="invalid_grammar", param=name)
        raise RequestRefused(f"{name} is {shown(value)}; it takes a JSON Schema", param=name)
    text = _text(_dumped(value, name), name)
    try:
        value = json.loads(text)
        schema, checked = rewrite_for_reader(value, work) if reads else Rewritten(rewrite_schema(value, work), False)
        options: Any = JSON_OPTIONS | (_ONE_SPELLING if checked else {})
        if value.get("x-guidance") == _COMPACT:
            options = JSON_OPTIONS | {"whitespace_pattern": None, **_COMPACT}
        source = LLMatcher.grammar_from_json_schema(_text(json.dumps(schema), name), overrides=options)
        return wrap(source, JSONChecks(schema, Beginning())) if isinstance(schema, dict) and checked else source
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"{name}: {error}", code="invalid_grammar", param=name) from None


def _regex_source(value: Any, name: str) -> str:
    return grammar_from("regex", ascii_digits(_text(value, name)))


def _ebnf_source(value: Any, name: str) -> str:
    text = _text(value, name)
    if text.lstrip().startswith("{"):  # llguidance's own form, and this server's, which no client may write
        raise RequestRefused(f"{name} is {shown(text)}; it takes GBNF or Lark", param=name)
    if "::=" in text and len(text) > MAX_GBNF_CHARS:
        raise RequestRefused(f"{name} has {len(text)} characters of GBNF; use at most {MAX_GBNF_CHARS}", param=name)
    if (rules := text.count("::=")) > MAX_GBNF_RULES:
        raise RequestRefused(
            f"{name} has {rules} rules of GBNF; use at most {MAX_GBNF_RULES}, or Lark, which has no limit of rules",
            param=name,
        )
    try:
        return grammar_from("ebnf", text)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"{name}: {error}", param=name) from None


def _choice_source(value: Any, name: str) -> str:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise RequestRefused(f"{name} is {shown(value)}; it takes a list of texts", param=name)
    if len(value) > MAX_CHOICES:
        raise RequestRefused(f"{name} has {len(value)} texts; use at most {MAX_CHOICES}", param=name)
    _text("".join(value), name)
    return grammar_from("lark", "start: " + " | ".join(map(json.dumps, value)))


def _tag_source(value: Any, name: str) -> str:
    _text(value if isinstance(value, str) else _dumped(value, name), name)
    read_schema = partial(_read_schema, reads=False, work=Work())
    return _text(to_source(read_structural_tag(value, name, read_schema, _ebnf_source)), name)


def _dumped(value: Any, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # an Engine's caller may give anything
        raise RequestRefused(f"{name} cannot be written as JSON: {error}", param=name) from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{name} is {shown(value)}; it takes a string", param=name)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise RequestRefused(f"{name} has {len(value)} characters; use at most {MAX_GRAMMAR_CHARS}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"{name} is not valid Unicode: {error}", param=name) from None
    return value


_SOURCES: Mapping[str, Callable[[Any, str], str]] = {
    "json_schema": _read_schema,
    "regex": _regex_source,
    "ebnf": _ebnf_source,
    "choice": _choice_source,
    "structural_tag": _tag_source,
}


# -- other servers' names ----------------------------------------------------------------------------------------------

_VLLM = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
"""Fields of vLLM's structured_outputs."""

_NO_EFFECT = ("backend", "disable_fallback", "disable_additional_properties")

_COMPACT = {"whitespace_flexible": False}
"""Option of llguidance: no space between two tokens of JSON."""


def read_structured_outputs(value: Any, name: str, ignored: Ignored) -> dict[str, Any]:
    """vLLM's structured_outputs, and guided_decoding before it -> fields of this server. Raises RequestRefused."""
    if not isinstance(value, dict):
        raise RequestRefused(f"{name} is {shown(value)}; it takes an object", param=name)
    found: dict[str, Any] = {}
    for key, item in value.items():
        if item is None or item is False:
            continue
        if key in _VLLM:
            found[_VLLM[key]] = item
        elif key == "disable_any_whitespace":
            pass
        elif key == "json_object":
            found["json_schema"] = ANY_OBJECT
        elif key in _NO_EFFECT:
            ignored.add_field(f"{name}.{key}", "grammars are enforced in one way")
        else:
            raise RequestRefused(
                f"{name}.{key} is not supported; it takes {', '.join((*_VLLM, 'json_object'))}",
                code="unsupported_field",
                param=f"{name}.{key}",
            )
    if value.get("disable_any_whitespace") and "json_schema" in found:
        found["json_schema"] = _compact(found["json_schema"])
    return found


def _compact(schema: Any) -> Any:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema  # refused where it is read
    return {**schema, "x-guidance": _COMPACT} if isinstance(schema, dict) else schema


def read_response_format(value: Any, name: str = "response_format") -> dict[str, Any]:
    """OpenAI's response_format -> fields of this server. Raises RequestRefused."""
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return {}
        case "json_object":
            # llama.cpp and Fireworks take a schema here.
            schema = value.get("schema")
            return {"json_schema": ANY_OBJECT if schema is None else schema}
        case "json_schema":
            # The Responses and the Messages API have the schema beside the type.
            wrapped, where = value, f"{name}.schema"
            if name == "response_format":
                wrapped, where = value.get("json_schema"), f"{name}.json_schema.schema"
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict):
                raise RequestRefused(f"{where} is {shown(schema)}; it takes a JSON Schema", param=where)
            return {"json_schema": schema}
        case "structural_tag" if name == "response_format":
            return {"structural_tag": {key: item for key, item in value.items() if key != "type"}}
    kinds = "text, json_object, json_schema" + (", structural_tag" if name == "response_format" else "")
    raise RequestRefused(
        f"{name} is {shown(value)}; its type is one of {kinds}",
        param=name,
    )
