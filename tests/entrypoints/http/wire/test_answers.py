"""The one shape of errors."""

from __future__ import annotations

import json

import pytest

from baton.entrypoints.http.wire.answers import answer_error
from baton.scheduler.outcome import RequestRefused


@pytest.mark.parametrize(
    ("code", "status", "kind", "is_to_be_retried"),
    [
        ("unknown_field", 400, "invalid_request_error", False),
        ("request_timeout", 408, "invalid_request_error", False),
        ("queue_full", 429, "rate_limit_error", True),
        ("request_failed", 500, "server_error", False),
        ("not_ready", 503, "server_error", True),
    ],
)
def test_error_body_has_type_and_code_and_retry_after(
    code: str, status: int, kind: str, is_to_be_retried: bool
) -> None:
    answer = answer_error(RequestRefused("no", code=code, param="text"))
    assert answer.status_code == status and ("retry-after" in answer.headers) is is_to_be_retried
    error = json.loads(bytes(answer.body))["error"]
    assert error == {"message": "no", "type": kind, "code": code, "param": "text"}
