"""The fields that every API has under the same names, as ``/openapi.json`` describes them."""

from __future__ import annotations

from ..description.json_schema import (
    Properties,
    Schema,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    per_prompt,
    string,
    taken,
    whole,
)
from .continuation import MAX_RETAIN_TTL
from .jobs import EXTRA_BODY, HEADERS, MAX_JOB_CHARS
from .namespaces import MAX_KEY_CHARS
from .prompts import MAX_PRIORITY
from .reading import MAX_RID_CHARS

TOKEN_ID = whole("", 0)
"""How many ids there are depends on the model."""

IDS = list_of(TOKEN_ID)

RID = string("The request's name; the X-Request-Id header where it is missing.", least=1, most=MAX_RID_CHARS)

MODEL = string("The served model's name; any, unless --served-model-name is set without --serve-any-model-name.")

STREAM = flag("Answer with server-sent events, as tokens come.", default=False)

STREAM_OPTIONS = taken(
    {"include_usage": flag("The last event says how many tokens there were.", default=False)},
    "With stream: true only.",
    title="StreamOptions",
)

_KEY_ABOUT = "Requests share cached prefixes only where it is equal."

CONTINUATION: Properties = {
    "continuation_of": per_prompt(
        string("The rid of the request to go on from; its output, and its KV, come first.", least=1, most=MAX_RID_CHARS)
    ),
    "continuation_suffix": per_prompt(string("Text that follows the parent's output.")),
    "continuation_ids": either(
        IDS, list_of(nullable(IDS)), about="The suffix as token ids, for all prompts or a list for each."
    ),
    "continuation_at": per_prompt(
        enum("finish", "now", about="Go on from the parent's end, or from where it is.", default="finish")
    ),
    "continuation_index": per_prompt(whole("Which of the parent's samples.", 0, default=0)),
    "keep_parent": per_prompt(flag("The parent stays, for other children.", default=False)),
    "retain_ttl": per_prompt(
        number(
            "Seconds for which the output's KV is kept for a continuation; meta_info.retained says what was granted.",
            0,
            MAX_RETAIN_TTL,
        )
    ),
    "retain_n": per_prompt(whole("How many of the n outputs are kept; all, where it is missing.", 1)),
}

SHARED: Properties = {
    "cache_salt": per_prompt(string(_KEY_ABOUT, most=MAX_KEY_CHARS)),
    "extra_key": per_prompt(string(_KEY_ABOUT, most=MAX_KEY_CHARS)),
    "no_stop_trim": per_prompt(flag("Leave the stop string in the text.", default=False)),
    "priority": per_prompt(
        whole("A higher one is admitted earlier and retracted later.", -MAX_PRIORITY, MAX_PRIORITY, default=0)
    ),
    "no_reuse_from": per_prompt(
        whole(
            "Position in the request from which its KV will not be needed again once it has ended: that KV is evicted "
            "first, up to the part that others share.",
            0,
        )
    ),
    "user": string("Whose request it is: each user holds a share of the leases at most.", most=MAX_KEY_CHARS),
    "job_id": per_prompt(
        string(
            "The agent's job that this is a step of: its KV may be kept while a tool runs. The X-Job-Id header, too.",
            least=1,
            most=MAX_JOB_CHARS,
        )
    ),
    "is_last_step": per_prompt(
        flag("Nothing of the job follows, so nothing is kept for it. The X-Job-Last-Step header, too.", default=False)
    ),
    **CONTINUATION,
}


def picked(properties: Properties, names: tuple[str, ...]) -> Properties:
    """The properties with these names, in this order."""
    return {name: properties[name] for name in names}


def _of_one_prompt(schema: Schema) -> Schema:
    """The form of a `per_prompt` field in an API with one prompt per call."""
    return schema["anyOf"][0] if "anyOf" in schema else schema


SHARED_OF_CHATS: Properties = {
    name: _of_one_prompt(schema)
    for name, schema in SHARED.items()
    if name not in CONTINUATION or name.startswith("retain")
}

_JOB = ("job_id", "is_last_step")

JOB_HEADERS: Properties = {
    HEADERS["job_id"]: string("job_id, where the body has none.", least=1, most=MAX_JOB_CHARS),
    HEADERS["is_last_step"]: enum("true", "false", "1", "0", about="is_last_step, where the body has none."),
}


def with_extra_body(body: Schema) -> Schema:
    """The body of an endpoint that generates, as clients may send it: see `jobs.with_extras`."""
    fields = {name: nullable(_of_one_prompt(SHARED[name])) for name in _JOB}
    about = "Fields of this body, for clients that send what OpenAI's calls extra_body as it is. Each is given once."
    extra = {"type": ["object", "null"], "properties": fields, "description": about}
    return body | {"properties": body["properties"] | {EXTRA_BODY: extra}}
