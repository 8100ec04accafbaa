"""Refusals in an API's own names."""

from __future__ import annotations

import pytest

from baton.entrypoints.fields.field_names import FieldNames
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused

NAMES = FieldNames(prompt="input", renamed={"max_new_tokens": "max_output_tokens"}, overflow_words=str)


@pytest.mark.parametrize(
    ("message", "param", "want", "want_param"),
    [
        ("max_new_tokens is 0", "max_new_tokens", "max_output_tokens is 0", "max_output_tokens"),
        ("sampling_params.top_p is 2", "sampling_params.top_p", "top_p is 2", "top_p"),
        (
            "sampling_params.max_new_tokens: expected int", "sampling_params.max_new_tokens",
            "max_output_tokens: expected int", "max_output_tokens",
        ),
        ("send it as text or input_ids", "continuation_of", "send it as input", "continuation_of"),
        ("input_ids holds 300", "input_ids", "input holds 300", "input"),
        ("the text is not valid Unicode", "text", "the text is not valid Unicode", "input"),
        ("my_max_new_tokens and max_new_tokens_", None, "my_max_new_tokens and max_new_tokens_", None),
        ("busy", None, "busy", None),
    ],
)  # fmt: skip
def test_field_names_in_refusals_are_translated(
    message: str, param: str | None, want: str, want_param: str | None
) -> None:
    cause = ValueError("why")
    with pytest.raises(RequestRefused) as caught, NAMES.translated():
        raise RequestRefused(message, code="duplicate_rid", param=param) from cause
    error = caught.value
    assert (error.message, error.param, status_of(error), error.code) == (want, want_param, 409, "duplicate_rid")
    assert error.__cause__ is cause


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"), NAMES.translated():
        raise ValueError("max_new_tokens")
