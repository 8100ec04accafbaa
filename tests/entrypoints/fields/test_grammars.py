"""What says how outputs look: read from the fields of every API, and refused where it can be no grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.entrypoints.fields import grammars
from baton.entrypoints.fields.grammars import read_response_format, read_structured_outputs, take_grammar
from baton.entrypoints.fields.ignored import Ignored
from baton.scheduler.outcome import RequestRefused
from tests.doubles.byte_matcher import takes


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"type": "object"}},
        {"json_schema": True},
        {"json_schema": '{"type": "integer"}'},
        {"regex": "[ab]{2}/x"},
        {"ebnf": 'root ::= "a" | root "b"'},
        {"ebnf": 'start: "a" start?'},
        {"choice": ["a", 'say "b"', "c\\d\n", "é"]},
    ],
    ids=str,
)
def test_forms_become_grammars(form: dict[str, Any]) -> None:
    values = {**form, "temperature": 1.0}
    grammar = take_grammar(values, "sampling_params.")
    assert grammar is not None and values == {"temperature": 1.0}
    assert grammar.name == f"sampling_params.{next(iter(form))}" and not LLMatcher.validate_grammar(grammar.source)


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"\d{3}", "123", "12٣"),
        (r"[\d.x-z]+", "1.5y", "٣"),
        (r"[]\d]+", "]1", "٣"),
        (r"\\d\d", "\\d1", "\\11"),
        (r"[^\d]", "٣", "3"),
        (r"\w+", "größe1", "-"),
    ],
)
def test_digits_of_a_regex_are_ascii(regex: str, taken: str, refused: str) -> None:
    grammar = take_grammar({"regex": regex}, "")
    assert takes(grammar, taken) and not takes(grammar, refused)


def test_nothing_is_no_form() -> None:
    values: dict[str, Any] = {"regex": None, "json_schema": "", "top_k": 3}
    assert take_grammar(values, "") is None and values == {"top_k": 3}


_DEEP: Any = True
for _ in range(5000):
    _DEEP = {"not": _DEEP}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json_schema": {"minimum": float("nan")}}, "cannot be written as JSON"),
        ({"json_schema": _DEEP}, "cannot be written as JSON"),
        ({"json_schema": "[" * 100_000}, "is not valid JSON"),
        ({"json_schema": {"enum": [f"v{number}" for number in range(60_000)]}}, "use at most 300000"),
        ({"json_schema": [1]}, "takes a JSON Schema"),
        ({"json_schema": False}, "no output fulfils it"),
        ({"json_schema": {"not": {"uniqueItems": True}}}, "not at #/not cannot be enforced"),
        ({"regex": 5}, "takes a string"),
        ({"regex": "a" * 300_001}, "use at most 300000"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"ebnf": "root ::= " + "(" * 20_000}, "ebnf: "),
        ({"ebnf": "root ::= missing"}, "missing"),
        ({"ebnf": '{"baton_checks": 1}\nstart: "a"'}, "it takes GBNF or Lark"),
        ({"ebnf": ' {"grammars": []}\nstart: "a"'}, "it takes GBNF or Lark"),
        ({"ebnf": "".join(f"r{n} ::= r{n + 1}\n" for n in range(9000))}, "of GBNF; use at most 50000"),
        ({"choice": "ab"}, "a list of texts"),
        ({"choice": []}, "a list of texts"),
        ({"choice": ["a" * 100_000] * 4}, "use at most 300000"),
        ({"choice": ["a"] * 10_001}, "use at most 10000"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf both say"),
    ],
    ids=range(20),
)
def test_what_can_be_no_grammar_is_refused(form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        take_grammar(dict(form), "")
    assert words in refused.value.message and len(refused.value.message) < 400


def test_options_in_a_schema_have_no_effect() -> None:
    options = {"lenient": True, "key_separator": "=>", "item_separator": ";", "json_allowed_escapes": "u"}
    grammar = take_grammar({"json_schema": {"colour": "red", "x-guidance": options}}, "")
    assert takes(grammar, '{"a": [1, 2]}') and not takes(grammar, '{"a"=>[1, 2]}')
    assert grammar is not None
    used = json.loads(grammar.source)["grammars"][0]["json_schema"]["x-guidance"]
    assert used == grammars.JSON_OPTIONS, "llguidance has an option that this server does not set"


A = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (A, r'{"\u0061": "x"}'),
        (A, r'{"a": 1, "\u0061": "x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b": "x"}'),
        ({"properties": {"\n": {"type": "integer"}}}, r'{"\u000a": "x"}'),
        ({"not": {"required": ["a"]}}, r'{"\u0061": 1}'),
        ({"dependentRequired": {"a": ["b"]}}, r'{"\u0061": 1}'),
        ({**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, r'{"\u0061": 1}'),
    ],
    ids=str,
)
def test_no_name_has_a_second_spelling(schema: dict[str, Any], wrong: str) -> None:
    grammar = take_grammar({"json_schema": {"type": "object", **schema}}, "")
    assert not takes(grammar, wrong)
    assert takes(grammar, r'{"größe": "x", "\"quoted\"": 1, "back\\slash": 2}')


def test_schemas_of_a_structural_tag_share_their_work() -> None:
    schema: Any = {"type": "null"}
    for _ in range(7):
        schema = {"if": schema, "then": {"type": ["null", "string"]}, "else": {"type": ["object", "array"]}}
    tags = [{"begin": f"<a{number}>", "schema": schema, "end": "</a>"} for number in range(100)]
    with pytest.raises(RequestRefused, match=r"structures\.\d+\.schema: it takes more than 8000 steps to read"):
        take_grammar({"structural_tag": {"structures": tags, "triggers": ["<a"]}}, "")


def test_whitespace_is_bounded() -> None:
    assert grammars.JSON_OPTIONS["whitespace_pattern"] == r"[ ]|\n{1,2}[ \t]{0,20}"


def test_response_formats() -> None:
    schema = {"type": "integer"}
    assert read_response_format({"type": "text"}) == {}
    assert read_response_format({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    assert read_response_format({"type": "json_object", "schema": schema}) == {"json_schema": schema}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert read_response_format(wrapped) == {"json_schema": schema}
    assert read_response_format({"type": "json_schema", "schema": schema}, "text.format") == {"json_schema": schema}
    for wrong in (
        "xml",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 3}},
    ):
        with pytest.raises(RequestRefused, match="response_format"):
            read_response_format(wrong)


def test_structured_outputs() -> None:
    ignored = Ignored()
    given = {"json": None, "regex": "a", "backend": "xgrammar", "disable_fallback": False}
    assert read_structured_outputs(given, "structured_outputs", ignored) == {"regex": "a"}
    assert list(ignored.reasons) == ["structured_outputs.backend"]
    assert read_structured_outputs({"json_object": True}, "x", ignored) == {"json_schema": {"type": "object"}}
    compact = {"json": '{"type": "array"}', "disable_any_whitespace": True}
    grammar = take_grammar(read_structured_outputs(compact, "x", ignored), "")
    assert takes(grammar, "[1,2]") and not takes(grammar, "[1, 2]")
    spaced = take_grammar(read_structured_outputs({**compact, "disable_any_whitespace": False}, "x", ignored), "")
    assert takes(spaced, "[1, 2]") and list(ignored.reasons) == ["structured_outputs.backend"]
    with pytest.raises(RequestRefused, match=r"x\.yaml is not supported; it takes json, regex"):
        read_structured_outputs({"yaml": "y"}, "x", ignored)
    with pytest.raises(RequestRefused, match="takes an object"):
        read_structured_outputs("y", "x", ignored)
