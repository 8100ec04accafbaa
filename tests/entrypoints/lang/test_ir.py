"""Expressions are plain data, and what cannot be served is refused where it is written."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.lang import assistant, beam, gen, role_message, select, user
from baton.entrypoints.lang.ir import Beam, Gen, RoleBegin, RoleEnd, Select, steps_of


def test_expressions_add_up() -> None:
    expr = "a" + gen("x") + "b" + (user("c") + assistant(gen("y") + "d"))
    assert list(steps_of(expr)) == [
        "a",
        Gen("x"),
        "b",
        RoleBegin("user"),
        "c",
        RoleEnd("user"),
        RoleBegin("assistant"),
        Gen("y"),
        "d",
        RoleEnd("assistant"),
    ]
    assert list(steps_of(role_message("tool"))) == [RoleBegin("tool"), "", RoleEnd("tool")]
    with pytest.raises(TypeError, match="unsupported operand"):
        gen("x") + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="int cannot be appended to a state"):
        list(steps_of(5))  # type: ignore[arg-type]


def test_gen_takes_sampling_parameters() -> None:
    expr = gen(
        "x", max_tokens=3, min_tokens=1, n=2, stop=("a", "b"), stop_token_ids=(5,), temperature=0.0, top_k=4,
        logit_bias={7: 1.5}, return_logprob=True, top_logprobs_num=2, regex=None,
    )  # fmt: skip
    assert expr == Gen(
        "x",
        {
            "max_new_tokens": 3,
            "min_new_tokens": 1,
            "n": 2,
            "stop": ["a", "b"],
            "stop_token_ids": [5],
            "temperature": 0.0,
            "top_k": 4,
            "logit_bias": {"7": 1.5},
        },
        {"return_logprob": True, "top_logprobs_num": 2},
    )
    assert gen() == Gen(None)


def test_beam_takes_what_a_search_takes() -> None:
    assert beam("x", 4) == Beam("x", {"beam_width": 4, "n": 4})
    expr = beam(
        "x", width=8, max_tokens=3, item_trie="items", n=2, length_penalty=0.0, early_stopping="never", stop=("a",),
        stop_token_ids=(5,), logit_bias={7: 1.5}, ignore_eos=True, return_logprob=True, top_logprobs_num=2,
    )  # fmt: skip
    assert expr == Beam(
        "x",
        {
            "beam_width": 8,
            "n": 2,
            "max_new_tokens": 3,
            "item_trie": "items",
            "length_penalty": 0.0,
            "early_stopping": "never",
            "stop": ["a"],
            "stop_token_ids": [5],
            "logit_bias": {"7": 1.5},
            "ignore_eos": True,
        },
        {"return_logprob": True, "top_logprobs_num": 2},
    )
    assert list(steps_of("a" + beam(None, 2) + "b")) == ["a", Beam(None, {"beam_width": 2, "n": 2}), "b"]
    assert gen("x", item_trie="items") == Gen("x", {"item_trie": "items"})


def test_choices() -> None:
    assert select("x", choices=["a", "b"]) == Select("x", ("a", "b")) == gen("x", choices=["a", "b"], temperature=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gen("x", regex="[0-9]"), ValueError, "regex is not supported: constrained"),
        (lambda: gen("x", json_schema="{}"), ValueError, "json_schema is not supported"),
        (lambda: gen("x", dtype=int), ValueError, "dtype is not supported"),
        (lambda: gen("x", max_token=3), TypeError, "no parameter 'max_token'"),
        (lambda: gen(""), ValueError, "name of a variable is ''"),
        (lambda: beam("", 2), ValueError, "name of a variable is ''"),
        (lambda: beam("x", 2, temperature=0.5), TypeError, "temperature"),  # type: ignore[call-arg]
        (lambda: beam("x"), TypeError, "width"),  # type: ignore[call-arg]
        (lambda: select("x"), ValueError, "at least one non-empty string"),
        (lambda: select("x", choices="ab"), ValueError, "choices is 'ab'"),
        (lambda: select("x", choices=["a", ""]), ValueError, "non-empty"),
        (lambda: select("x", ["a"], temperature=1.0), ValueError, "temperature is 1.0"),
        (lambda: select("x", ["a"], choices_method="greedy_token_selection"), ValueError, "choices_method is 'greedy"),
    ],
)
def test_what_cannot_be_served(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
