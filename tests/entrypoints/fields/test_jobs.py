"""Fields that come in ``extra_body`` or as headers."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.jobs import with_extras
from baton.scheduler.outcome import RequestRefused


def test_body_without_extras_is_unchanged() -> None:
    fields = {"text": "a", "job_id": "j"}
    assert with_extras(fields, {}) == fields


def test_extra_body_is_merged_into_the_body() -> None:
    given = {"text": "a", "extra_body": {"job_id": "j", "is_last_step": True}}
    assert with_extras(given, {}) == {"text": "a", "job_id": "j", "is_last_step": True}
    assert with_extras({"text": "a", "extra_body": None}, {}) == {"text": "a"}
    assert with_extras({"job_id": "j", "extra_body": {"job_id": "j"}}, {}) == {"job_id": "j"}


def test_job_headers_fill_missing_fields() -> None:
    headers = {"x-job-id": "h", "x-parent-job-id": "p"}
    assert with_extras({}, headers) == {"job_id": "h", "parent_job_id": "p"}
    headers = {"x-job-id": "h", "x-job-last-step": "True"}
    assert with_extras({}, headers) == {"job_id": "h", "is_last_step": True}
    assert with_extras({"job_id": "j", "is_last_step": False}, headers) == {"job_id": "j", "is_last_step": False}
    assert with_extras({"job_id": None}, {"x-job-id": "h"}) == {"job_id": "h"}
    assert with_extras({}, {"x-job-id": "", "x-parent-job-id": ""}) == {}
    assert with_extras({}, {"x-job-last-step": " 0 "}) == {"is_last_step": False}


def test_job_header_is_decoded_as_utf8_or_latin1() -> None:
    """A server reads the bytes of a header as latin-1; clients send UTF-8, and old ones latin-1."""
    for sent in ("jöb 日本 😀".encode(), b"plain"):
        assert with_extras({}, {"x-job-id": sent.decode("latin-1")}) == {"job_id": sent.decode()}
    assert with_extras({}, {"x-job-id": "jöb"}) == {"job_id": "jöb"}


@pytest.mark.parametrize(
    ("fields", "headers", "param", "words"),
    [
        ({"extra_body": [1]}, {}, "extra_body", "takes an object"),
        ({"extra_body": "x"}, {}, "extra_body", "takes an object"),
        ({"job_id": "a", "extra_body": {"job_id": "b"}}, {}, "job_id", "give it once"),
        ({}, {"x-job-last-step": "maybe"}, "is_last_step", "true or false"),
    ],
)
def test_invalid_extra_body_and_job_headers_are_refused(
    fields: dict[str, Any], headers: dict[str, str], param: str, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        with_extras(fields, headers)
    assert caught.value.param == param
