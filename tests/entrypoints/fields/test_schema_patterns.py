r"""Expressions have ECMAScript's meaning, or are refused; formats let nothing pass that is none."""

from __future__ import annotations

import datetime
import itertools
import json
from typing import Any

import jsonschema_rs
import pytest

from baton.entrypoints.fields.grammars import take_grammar
from baton.entrypoints.fields.schema_patterns import translate_pattern
from baton.scheduler.outcome import RequestRefused
from tests.doubles.byte_matcher import takes


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"^[[a]]$", ["[]", "a]"], ["a", "["]),
        (r"^[a&&b]+$", ["a", "&", "b"], ["c"]),
        (r"^[\w~~a]$", ["~", "b"], ["-"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^[a\-z]$", ["a", "-", "z"], ["b"]),
        (r"^[\d-]$", ["1", "-"], ["٣"]),
        (r"^[-a]$", ["a", "-"], ["b"]),
        (r"^[^\d\s]$", ["a", "٣"], ["1", " ", "\u3000"]),
        (r"^\s$", [" ", "\n", "\u00a0", "\ufeff"], ["\u0085", "a"]),
        (r"^[\S]$", ["a", "\u0085"], ["\u2003"]),
        (r"^.$", ["a", "é", "😀"], ["\n", "\r", "\u2028"]),
        (r"^[\D]\W$", ["aé", "٣ "], ["1é", "aa"]),
        (r"^\u0061\x62\u{63}\cJ\/\.\-$", ["abc\n/.-"], ["abc\n/x-"]),
        (r"^[\u0061-\x63\b]$", ["b", "\b"], ["d"]),
        (r"^\ud83d\ude00$", ["😀"], []),
        (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "Éa"]),
        (r"^a{2}b{1,}c{0,1}?(?:d|e)*(?<n>f)$", ["aabcddf"], ["abf"]),
        (r"^a{x}]}$", ["a{x}]}"], ["a"]),
        (r"x|^$", ["", "axb"], ["a"]),
        (r"(?i)^[a-c]x$", ["Ax", "bX"], ["dx"]),
        (r"^a(?i:b)(?P<n>c)$", ["aBc", "abc"], ["abC", "Abc"]),
        (r"^\^\$\(\[$", ["^$(["], ["("]),
    ],
)
def test_pattern_is_read_as_ecmascripts(pattern: str, taken: list[str], refused: list[str]) -> None:
    names = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    for schema in ({"type": "string", "pattern": pattern}, names):
        grammar = take_grammar({"json_schema": schema}, "")
        for text in taken + refused:
            written = json.dumps(text, ensure_ascii=False)
            assert takes(grammar, written if "pattern" in schema else f"{{{written}:1}}") == (text in taken), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\Aa", r"\A is no escape"), (r"a\z", r"\z is no escape"), (r"\Qa", "is no escape"),
        ("a(?i)b", "another dialect"), ("(?x) a", "another dialect"), ("(?s).", "another dialect"),
        ("(?#a)", "another dialect"), ("a(?=b)", "look-around"), ("(?<!b)a", "look-around"), (r"\bword", "look around"),
        (r"(a)\1", "refers back"), (r"(?<n>a)\k<n>", "refers back"), ("a{,3}", "write {0,n}"),
        ("a*+", "repeats nothing"), ("*a", "repeats nothing"),
        ("[]a]", "escape the ]"), ("[^]", "escape the ]"), ("[a", "ends within"), ("a\\", "ends within"),
        (r"[\d-z]", "a range"), (r"\ud800", "is no character"),
    ],
)  # fmt: skip
def test_pattern_with_another_meaning_is_refused(pattern: str, words: str) -> None:
    for schema, place in (({"pattern": pattern}, "pattern at #/items"),
                          ({"patternProperties": {pattern: {}}}, "patternProperties at #/items")):  # fmt: skip
        with pytest.raises(RequestRefused) as refused:
            take_grammar({"json_schema": {"items": schema}}, "")
        assert words in refused.value.message and f"{place} cannot be enforced" in refused.value.message


def test_patterns_that_become_the_same_hold_both() -> None:
    schema = {"type": "object", "additionalProperties": False,
              "patternProperties": {r"^\d$": {"minimum": 3}, "^[0-9]$": {"maximum": 5}}}  # fmt: skip
    grammar = take_grammar({"json_schema": schema}, "")
    assert takes(grammar, '{"1": 4}') and not takes(grammar, '{"1": 2}') and not takes(grammar, '{"1": 6}')


def test_simple_patterns_stay_as_they_are() -> None:
    assert translate_pattern("^(red|green)/a-b$") == "^(red|green)/a-b$"


def of_format(name: str, text: str) -> bool:
    return takes(take_grammar({"json_schema": {"type": "string", "format": name}}, ""), json.dumps(text))


def test_dates_are_those_of_the_calendar() -> None:
    grammar = take_grammar({"json_schema": {"type": "string", "format": "date"}}, "")
    for year, month in itertools.product((0, 1, 4, 10, 1600, 1900, 2000, 2023, 2024, 2100, 9999), range(14)):
        for day in (0, 1, 28, 29, 30, 31, 32):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                datetime.date.fromisoformat(text)
            except ValueError:
                assert not takes(grammar, f'"{text}"'), text
            else:
                assert takes(grammar, f'"{text}"'), text


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("time", ["12:00:59Z", "00:00:00.123456789+14:00"], ["12:00:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"],
         ["2023-02-29T12:00:00Z", "0000-01-01T00:00:00Z", "2024-01-01T12:00:60Z"]),
        ("hostname", ["a", "a-b.example", "1a.2", "ab-c", "a" * 63, ".".join(["a" * 49] * 5)],
         ["", "-a", "a-", "a..b", "a_b", "xn--a", "a" * 64, ".".join(["a" * 63] * 4), ".".join(["a" * 62] * 5)]),
        ("email", ["a@b", "a.b+c@d-e.example", "a@[127.0.0.1]", "a" * 64 + "@b.c", "a.bc.d.e@" + "b" * 63],
         ["", "a", "@b", "a@", ".a@b", "a.@b", "a..b@c", "a@-b", "a@b..c", "a@[1.2.3]", "a" * 65 + "@b.c",
          "a.b" * 22 + "@c", "a@" + "b" * 64, "a@" + ".".join(["b" * 63] * 4)]),
    ],
)  # fmt: skip
def test_formats_take_what_is_one(name: str, taken: list[str], refused: list[str]) -> None:
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    for text in taken:
        assert of_format(name, text) and validator.is_valid(text), text
    assert not any(of_format(name, text) for text in refused)


@pytest.mark.parametrize(
    "beside",
    [
        {"pattern": "^2024"},
        {"maxLength": 5},
        {"minLength": 30, "maxLength": 300},
        {"pattern": "b.c$"},
        {"type": ["string", "null"]},
    ],
)
@pytest.mark.parametrize("name", ["date", "hostname", "email"])
def test_formats_hold_beside_other_keywords(name: str, beside: dict[str, Any]) -> None:
    schema = {"type": "string", "format": name, **beside}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = ["2024-02-29", "2023-02-28", "a.b", "2024-", ".".join(["a" * 49] * 5), ".".join(["a" * 59] * 5), "a@b.c",
             "2024@" + "b" * 60]  # fmt: skip
    if not any(map(validator.is_valid, texts)):
        return
    grammar = take_grammar({"json_schema": schema}, "")
    for text in texts:
        assert takes(grammar, json.dumps(text)) == validator.is_valid(text), text
