"""Reads which job a request is a step of: fields, which clients may also send as headers, and where there are none the
names that `conversation_names` finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import Properties, enum, string
from .conversation_names import NAME_HEADERS, ConversationNames, as_utf8
from .reading import PerPrompt, shown, typed

MAX_JOB_CHARS = 512

EXTRA_BODY = "extra_body"
"""OpenAI's client puts what is in its argument of this name beside the other fields. Clients that post JSON themselves
send it as it is."""

HEADERS = {"job_id": "X-Job-Id", "parent_job_id": "X-Parent-Job-Id", "is_last_step": "X-Job-Last-Step"}
"""Taken where the body does not have the field. An empty id says nothing."""

JOB_HEADERS: Properties = {
    HEADERS["job_id"]: string("job_id, where the body has none."),
    HEADERS["parent_job_id"]: string("parent_job_id, where the body has none."),
    HEADERS["is_last_step"]: enum("true", "false", "1", "0", about="is_last_step, where the body has none."),
    **NAME_HEADERS,
}

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class JobFields(NamedTuple):
    """See `RequestSpec`."""

    job_id: str | None
    parent_job_id: str | None
    is_last_step: bool


def read_jobs(per_prompt: PerPrompt, names: ConversationNames) -> list[JobFields]:
    """One per prompt. Raises RequestRefused."""
    ids = per_prompt.read_values("job_id", _job_id, names.job_id)
    parents = per_prompt.read_values("parent_job_id", _job_id, names.parent_job_id)
    lasts = per_prompt.typed("is_last_step", bool, names.is_last_step)
    jobs = [JobFields(*fields) for fields in zip(ids, parents, lasts, strict=True)]
    for job in jobs:
        if job.job_id is None and (job.is_last_step or job.parent_job_id is not None):
            name = "is_last_step" if job.is_last_step else "parent_job_id"
            raise RequestRefused(
                f"{name} is set without job_id; add job_id: the name that the job's other steps have", param=name
            )
    return jobs


def with_extras(fields: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a body, with those that came in ``extra_body`` and in headers. What stands in the body itself goes
    before a header. Raises RequestRefused where it differs from ``extra_body``."""
    extra = fields.get(EXTRA_BODY)
    if extra is not None and not isinstance(extra, dict):
        raise RequestRefused(f"{EXTRA_BODY} is {shown(extra)}; it takes an object of fields", param=EXTRA_BODY)
    merged = {name: value for name, value in fields.items() if name != EXTRA_BODY}
    for name, value in (extra or {}).items():
        if name in merged and merged[name] != value:
            raise RequestRefused(f"{name} differs from {EXTRA_BODY}.{name}; give it once", param=name)
        merged[name] = value
    for name, header in HEADERS.items():
        given = headers.get(header.lower())
        if given is None or (not given and name != "is_last_step"):
            continue
        value = _flag(given, header) if name == "is_last_step" else as_utf8(given)
        if merged.get(name) is None:
            merged[name] = value
    return merged


def _job_id(value: Any, name: str) -> str:
    job_id = typed(value, str, name)
    if not 1 <= len(job_id) <= MAX_JOB_CHARS:
        raise RequestRefused(f"{name} has {len(job_id)} characters; use 1 to {MAX_JOB_CHARS}", param=name)
    return job_id


def _flag(given: str, header: str) -> bool:
    if (value := _FLAGS.get(given.strip().lower())) is None:
        raise RequestRefused(f"the header {header} is {shown(given)}; it takes true or false", param="is_last_step")
    return value
