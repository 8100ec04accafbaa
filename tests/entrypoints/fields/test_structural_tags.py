"""Structural tags in XGrammar's two forms: which texts they take, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.entrypoints.fields.grammars import take_grammar
from baton.scheduler.outcome import RequestRefused
from tests.doubles.byte_matcher import is_begun, takes

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
OLD = {
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "object", "maxProperties": 0}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
JSON_CITY = {"type": "json_schema", "json_schema": CITY}
WEATHER = {"type": "tag", "begin": "<weather>", "content": JSON_CITY, "end": "</weather>"}
NOTE = {"begin": "<note>", "content": {"type": "any_text"}, "end": ["</note>", "<|end|>"]}
CALL = {"type": "tag", "begin": "[TOOL_CALLS]weather", "content": JSON_CITY, "end": "<|end|>"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tagged(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<"], "tags": [*tags], **more}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLD,
        [
            "",
            "no call",
            '<function=weather>{"city": "Bonn"}</function>',
            'a <function=weather>{"city": "Bonn"}</function>, b < c <function=time>{}</function> end',
        ],
        [
            '<function=weather>{"city": 1}</function>',
            "<function=other>{}</function>",
            "x <function=time>{}",
            "<function=",
        ],
    ),
    ({"format": const("só")}, ["só"], ["", "so", "sósó"]),
    ({"format": JSON_CITY}, ['{"city": "Bonn"}'], ["{}", "x"]),
    ({"format": {"type": "regex", "pattern": "a+/\\d"}}, ["a/1", "aaa/2"], ["a/", "/1", "a/٣"]),
    ({"format": {"type": "grammar", "grammar": 'root ::= "x" | "(" root ")"'}}, ["x", "((x))"], ["(x", ""]),
    ({"format": {"type": "any_text"}}, ["", "anything\n<x>"], []),
    ({"format": WEATHER}, ['<weather>{"city": ""}</weather>'], ["<weather>", '<weather>{"city": ""}', ""]),
    (
        {"format": NOTE},
        ["<note></note>", "<note>a\nb</note>", "<note>a<|end|>", "<note></not</note>"],
        ["<note>", "<note>a</note>b", "<note>a</note></note>"],
    ),
    (
        {"format": {"type": "sequence", "elements": [const("a: "), NOTE, const("; "), {"type": "any_text"}]}},
        ["a: <note>x</note>; the rest", "a: <note></note>; "],
        ["a: x; y", "a: <note>x</note>"],
    ),
    (
        {"format": {"type": "or", "elements": [WEATHER, {"type": "sequence", "elements": [const("no"), const("ne")]}]}},
        ["none", '<weather>{"city": "a"}</weather>'],
        ["no", "nonone", ""],
    ),
    (
        {"format": tagged(WEATHER, NOTE)},
        ["", "text", 'a <note>b</note> c <weather>{"city": "d"}</weather>', "<note><weather></note>"],
        ["<", "a <b>", "<note>", "<weather>{}</weather>"],
    ),
    (
        {"format": tagged(WEATHER, NOTE, at_least_one=True)},
        ["<note></note>", "<note></note> text <note></note>"],
        ["", "text", "text <note></note>"],
    ),
    (
        {"format": tagged(WEATHER, NOTE, stop_after_first=True)},
        ["<note></note>", "some text <note>a</note>"],
        ["<note></note> ", "text", "<note></note><note></note>"],
    ),
    (
        {"format": tagged(WEATHER, NOTE, at_least_one=True, stop_after_first=True)},
        ["<note></note>"],
        ["", "text <note></note>", "<note></note> "],
    ),
    (
        {"format": {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "tags": [CALL]}},
        ["text", 'so: [TOOL_CALLS]weather{"city": "a"}<|end|>', 'so: [TOOL_CALLS]weather{"city": "a"}<|end|> and so'],
        ["[TOOL_CALLS]", "<|end|>", '[TOOL_CALLS]time{"city": "a"}<|end|>'],
    ),
    (
        {"format": {"type": "tags_with_separator", "tags": [WEATHER, NOTE], "separator": ", "}},
        ["", "<note>a</note>", '<note>a</note>, <weather>{"city": ""}</weather>'],
        ["<note>a</note>, ", "text", "<note>a</note><note>b</note>"],
    ),
    (
        {"format": {"type": "tags_with_separator", "tags": [NOTE], "separator": "", "at_least_one": True}},
        ["<note></note>", "<note></note><note>b</note>"],
        ["", "<note></note>,"],
    ),
    (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [NOTE],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ["<note></note>"],
        ["", "<note></note>,<note></note>"],
    ),
    (
        {"format": {"begin": "<a>", "content": tagged(NOTE), "end": "</a>"}},
        ["<a></a>", "<a>x <note>y</note> z</a>", "<a><note></a></note></a>"],
        ["<a>x", "<a><note></a>", "<a></a>x"],
    ),
    (
        {"format": {"begin": "<a>", "content": {"type": "regex", "pattern": ".*"}, "end": "</a>"}},
        ["<a></a>", "<a>x</a>"],
        ["<a>x</a>y</a>", "<a>x\n</a>"],
    ),
    (
        {"format": {"begin": "<think>", "content": {"type": "any_text"}, "end": ""}},
        ["<think>", "<think>so </think>"],
        ["x", ""],
    ),
    ({"format": {"type": "star", "content": NOTE}}, ["", "<note></note><note></note>"], ["x", "<note>"]),
    ({"format": {"type": "plus", "content": const("ab")}}, ["ab", "abab"], ["", "aba"]),
    ({"format": {"type": "optional", "content": const("ab")}}, ["", "ab"], ["abab"]),
    ({"format": {"type": "repeat", "content": const("a"), "min": 1, "max": 2}}, ["a", "aa"], ["", "aaa"]),
    ({"format": {"type": "repeat", "content": const("a"), "min": 2, "max": -1}}, ["aa", "aaaaa"], ["a"]),
]


@pytest.mark.parametrize(("form", "right", "wrong"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
def test_tags_take_their_texts_only(form: dict[str, Any], right: list[str], wrong: list[str], is_text: bool) -> None:
    grammar = take_grammar({"structural_tag": json.dumps(form) if is_text else form}, "")
    for text in right:
        assert takes(grammar, text), text
    for text in wrong:
        assert not takes(grammar, text), text


def test_mark_within_text_begins_a_tag() -> None:
    grammar = take_grammar({"structural_tag": OLD}, "")
    assert is_begun(grammar, "a < b <functio n") and not is_begun(grammar, "a < b <function= ")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (5, "takes an object with format"),
        ("{", "is not valid JSON"),
        ({}, "takes an object with format"),
        ({"structures": [], "triggers": ["<"]}, "structures is []; it takes a list with one entry"),
        ({"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": []}, "triggers is []"),
        ({"structures": [{"begin": "<a>", "end": 3}], "triggers": ["<"]}, "structures.0.end is 3; it takes a string"),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["["]}, "begins with none of the triggers"),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<", "["]}, "no tag begins with the trigger"),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": [""]}, "no tag begins with the trigger"),
        (
            {"structures": [{"begin": "<a>", "schema": {"uniqueItems": True}, "end": ""}], "triggers": ["<"]},
            "structures.0.schema: uniqueItems",
        ),
        ({"format": {"type": "xml"}}, 'format.type is "xml"; it is const_string'),
        ({"format": {"type": "regex"}}, "format.pattern is null"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "format.grammar"),
        ({"format": {"type": "any_text", "excludes": ["a"]}}, "excludes is not supported"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, const("a")]}},
            "elements.0 is text without an end",
        ),
        ({"format": {"type": "star", "content": {"type": "any_text"}}}, "content is text without an end"),
        ({"format": tagged({"begin": "<a>", "content": {"type": "any_text"}, "end": ""})}, "tags.0 is text without an"),
        ({"format": {"begin": "<a>", "content": const(""), "end": ["", "b"]}}, 'has "" among others'),
        ({"format": {"type": "repeat", "content": const("a"), "min": 3, "max": 2}}, "max is 2, less than min"),
        ({"format": {"type": "repeat", "content": const("a"), "min": 1e9}}, "takes 0 to 10000"),
        ({"format": tagged(WEATHER, at_least_one=1)}, "at_least_one is 1; it takes true or false"),
    ],
    ids=range(21),
)
def test_what_is_no_structural_tag_is_refused_by_name(form: Any, words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        take_grammar({"structural_tag": form}, "")
    assert words in str(refused.value), str(refused.value)


def test_deep_formats_are_refused() -> None:
    form: dict[str, Any] = const("a")
    for _ in range(200):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(RequestRefused, match="nested more than 30 deep"):
        take_grammar({"structural_tag": {"format": form}}, "")
