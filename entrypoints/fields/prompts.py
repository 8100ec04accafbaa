"""A parsed request of any API, and the readers that all APIs share: prompts, logprobs, rids, salts, leases.

An API translates its own fields into these (``text`` or ``input_ids``, sampling parameters in SGLang's names) and reads
them here. Refusals use these names too; `field_names.FieldNames` turns them into the API's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ...runtime.lora.adapter_names import MAX_NAME_CHARS
from ...runtime.prompt import Prompt
from ...scheduler.outcome import RequestRefused
from ...scheduler.request_spec import LogprobOptions, RequestSpec
from ..description.json_schema import Properties, Schema, flag, nullable, per_prompt, string, whole
from .continuation import (
    CONTINUATION,
    continuation_batch_size,
    read_continuations,
    read_retain_ns,
    read_retain_states,
    read_retain_ttls,
)
from .conversation_names import NO_NAMES, ConversationNames
from .ignored import Ignored
from .jobs import EXTRA_BODY, MAX_JOB_CHARS, read_jobs
from .namespaces import MAX_KEY_CHARS, read_client, read_namespaces
from .reading import PerPrompt, read_rids, shown, typed
from .sampling import read_sampling_params

MAX_PRIORITY = 1_000_000

MAX_NAMED_TOKENS = 128
"""Ids of ``token_ids_logprob``: as many numbers for each token of prompt and output."""

_KEY_ABOUT = "Requests share cached prefixes only where it is equal."

SHARED: Properties = {
    "cache_salt": per_prompt(string(_KEY_ABOUT, most=MAX_KEY_CHARS)),
    "extra_key": per_prompt(string(_KEY_ABOUT, most=MAX_KEY_CHARS)),
    "lora_path": per_prompt(
        string(
            "Name of the adapter that computes it; `model` may name it, too. Requests with different adapters share no "
            "cached prefixes.",
            least=1,
            most=MAX_NAME_CHARS,
        )
    ),
    "no_stop_trim": per_prompt(flag("Leave the stop string in the text.", default=False)),
    "priority": per_prompt(
        whole(
            "Requests with a higher priority are admitted earlier and retracted later.",
            -MAX_PRIORITY,
            MAX_PRIORITY,
            default=0,
        )
    ),
    "no_reuse_from": per_prompt(
        whole(
            "Position in the request from which its KV will not be needed again once it has ended: that KV is evicted "
            "first, up to the part that others share.",
            0,
        )
    ),
    "return_cache_report": flag(
        "Report why prompt tokens were not found in the cache. /generate does so unless this is false, the other "
        "endpoints only if it is true."
    ),
    "user": string(
        "The user of the request; the leases of each user are limited. In a chat it also names the conversation, with "
        "the first message.",
        most=MAX_KEY_CHARS,
    ),
    "job_id": per_prompt(
        string(
            "The agent's job that this is a step of: its KV may be kept while a tool runs. The X-Job-Id header, too.",
            least=1,
            most=MAX_JOB_CHARS,
        )
    ),
    "parent_job_id": per_prompt(
        string(
            "The job that started this one and waits for it, as an agent does for a subagent. The X-Parent-Job-Id "
            "header, too.",
            least=1,
            most=MAX_JOB_CHARS,
        )
    ),
    "is_last_step": per_prompt(
        flag("The last step of the job, so nothing is kept for it. The X-Job-Last-Step header, too.", default=False)
    ),
    **CONTINUATION,
}


def _of_one_prompt(schema: Schema) -> Schema:
    """The form of a `per_prompt` field in an API with one prompt per call."""
    return schema["anyOf"][0] if "anyOf" in schema else schema


SHARED_OF_CHATS: Properties = {
    name: _of_one_prompt(schema)
    for name, schema in SHARED.items()
    if name not in CONTINUATION or name.startswith("retain")
}

_JOB = ("job_id", "parent_job_id", "is_last_step")


def with_extra_body(body: Schema) -> Schema:
    """The body of an endpoint that generates, as clients may send it: see `jobs.with_extras`."""
    fields = {name: nullable(_of_one_prompt(SHARED[name])) for name in _JOB}
    about = "Fields of this body, for clients that send what OpenAI's calls extra_body as it is. Each is given once."
    extra = {"type": ["object", "null"], "properties": fields, "description": about}
    return body | {"properties": body["properties"] | {EXTRA_BODY: extra}}


@dataclass(slots=True, frozen=True)
class PromptBatch:
    """The prompts of one request. ``is_list``: it is answered with a list (a batch, or n > 1). rid: the caller's name
    for it."""

    prompts: list[Prompt]
    stream: bool
    is_list: bool
    rid: str


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """The source of the prompts' tokens: ``texts`` or ``id_lists``, one per prompt; neither for prompts that only
    continue a parent."""

    size: int
    is_batch: bool
    texts: list[str] | None = None
    id_lists: list[list[int]] | None = None


@dataclass(slots=True, frozen=True)
class LogprobFields:
    """The logprobs that one prompt asks for; see `LogprobOptions`."""

    wanted: bool = False
    start_len: int = -1
    top: int = 0
    with_text: bool = False
    prompt_top: int | None = None
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestRefused."""
        if self.start_len < -1:
            raise RequestRefused(
                f"logprob_start_len is {self.start_len}; use a prompt position, or -1 for output tokens only",
                param="logprob_start_len",
            )
        if self.top < 0:
            raise RequestRefused(f"top_logprobs_num is {self.top}; use 0 or more", param="top_logprobs_num")
        if len(self.token_ids) > MAX_NAMED_TOKENS:
            name = "token_ids_logprob"
            raise RequestRefused(f"{name} has {len(self.token_ids)} ids; use at most {MAX_NAMED_TOKENS}", param=name)
        # SGLang's clients send a start_len even where they want no logprobs.
        if not self.wanted and (self.top > 0 or self.token_ids):
            name = "top_logprobs_num" if self.top > 0 else "token_ids_logprob"
            raise RequestRefused(f"{name} is set without return_logprob; add return_logprob: true", param=name)

    @property
    def options(self) -> LogprobOptions | None:
        return LogprobOptions(self.start_len, self.top, self.prompt_top, self.token_ids) if self.wanted else None


def read_prompts(
    fields: dict[str, Any],
    tokens: PromptTokens,
    sampling: Any,
    logprobs: list[LogprobFields],
    *,
    rid: Any,
    returns_prompt: bool = False,
    truncate_to: int | None = None,
    clamps_output: bool | None = None,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> PromptBatch:
    """The prompts of a request, from ``stream``, `SHARED` and what its API has read already.

    fields: without nulls. sampling: parameters in SGLang's names, one object for all prompts or a list of them.
    logprobs: one per prompt. rid: the name, or names, that the caller gave; None makes one. returns_prompt: the
    prompts' ids are wanted back. truncate_to: see `Prompt`. clamps_output: the limit of the output is a
    default, see `RequestSpec`; None: where ``sampling`` has none. names: those of the conversation. ignored: gets what
    has no effect. Raises RequestRefused.
    """
    group, rids = read_rids(rid, tokens.size, tokens.is_batch)
    stream = typed(fields.get("stream", False), bool, "stream")
    per_prompt = PerPrompt(fields, tokens.size, tokens.is_batch)
    continuations = read_continuations(fields, per_prompt)
    samplings = read_sampling_params(sampling, per_prompt, ignored)
    objects = sampling if isinstance(sampling, list) else [sampling] * tokens.size
    clamps = [_has_no_limit(given) if clamps_output is None else clamps_output for given in objects]
    namespaces = read_namespaces(per_prompt)
    adapters = per_prompt.read_values("lora_path", read_adapter, "")
    client = read_client(fields)
    for asked, params in zip(logprobs, samplings, strict=True):
        if asked.token_ids and params.beam_width is not None:
            name = "token_ids_logprob"
            raise RequestRefused(f"{name} does not go with beam_width; use top_logprobs_num", param=name)
    retain_ttls = read_retain_ttls(per_prompt)
    retain_ns = read_retain_ns(per_prompt)
    retain_states = read_retain_states(per_prompt)
    priorities = per_prompt.read_values("priority", read_priority, 0)
    jobs = read_jobs(per_prompt, names)
    reuse_ends = per_prompt.read_values("no_reuse_from", _position, None)
    cache_report = fields.get("return_cache_report")
    if cache_report is not None:
        typed(cache_report, bool, "return_cache_report")
    prompts = [
        Prompt(
            spec=RequestSpec(
                rid=rids[i],
                sampling=samplings[i],
                namespace=namespaces[i],
                adapter=adapters[i],
                logprobs=logprobs[i].options,
                returns_prompt=returns_prompt,
                continuation=continuations[i].spec,
                retain_ttl=retain_ttls[i],
                retain_n=retain_ns[i],
                retain_states=retain_states[i],
                client=client or namespaces[i],
                priority=priorities[i],
                job_id=jobs[i].job_id,
                parent_job_id=jobs[i].parent_job_id,
                is_last_step=jobs[i].is_last_step,
                no_reuse_from=reuse_ends[i],
                clamps_output=clamps[i],
            ),
            group=group,
            text=None if tokens.texts is None else tokens.texts[i],
            input_ids=None if tokens.id_lists is None else tokens.id_lists[i],
            suffix_ids=continuations[i].suffix_ids,
            return_text_in_logprobs=logprobs[i].with_text,
            truncate_to=truncate_to,
            return_cache_report=cache_report,
        )
        for i in range(tokens.size)
    ]
    is_list = tokens.is_batch or any(sampling.n > 1 for sampling in samplings)
    return PromptBatch(prompts, stream, is_list, group)


def read_tokens(fields: dict[str, Any], max_prompts: int | None = None) -> PromptTokens:
    """The prompts of ``text`` or ``input_ids``, or as many as the continuation fields list. Raises RequestRefused, also
    for more than ``max_prompts``."""
    tokens = _find_tokens(fields)
    if max_prompts is not None and tokens.size > max_prompts:
        name = next((name for name in ("text", "input_ids") if name in fields), "continuation_of")
        raise RequestRefused(
            f"{name} holds {tokens.size} prompts; send at most {max_prompts} in one request "
            "(--max-prompts-per-request)",
            param=name,
        )
    return tokens


def _find_tokens(fields: dict[str, Any]) -> PromptTokens:
    if "text" in fields and "input_ids" in fields:
        raise RequestRefused("give the prompt as text or as input_ids; both are given", param="text")
    parents = continuation_batch_size(fields)
    if "text" in fields:
        name, tokens = "text", _texts(fields["text"])
    elif "input_ids" in fields:
        name, tokens = "input_ids", _id_lists(fields["input_ids"])
    else:
        alone = PromptTokens(parents or 1, is_batch=parents is not None)
        if "continuation_of" in fields:
            return alone
        # If continuation fields are there without continuation_of, report that instead.
        read_continuations(fields, PerPrompt(fields, alone.size, alone.is_batch))
        raise RequestRefused("give the prompt as text or as input_ids; both are missing", param="text")
    if parents is not None and (not tokens.is_batch or tokens.size != parents):
        raise RequestRefused(
            f"the continuation fields list {parents} prompts and {name} holds {tokens.size}; give one {name} for each, "
            "or none",
            param=name,
        )
    if "continuation_of" in fields and not all(tokens.texts or tokens.id_lists or ()):
        raise RequestRefused(f"{name} is empty; leave it out, or give the whole prompt", param=name)
    return tokens


def _texts(text: Any) -> PromptTokens:
    if isinstance(text, str):
        return PromptTokens(1, is_batch=False, texts=[text])
    if not isinstance(text, list) or not all(isinstance(item, str) for item in text):
        raise RequestRefused("text takes a string, or a list of strings for a batch", param="text")
    if not text:
        raise RequestRefused("text is an empty list; give at least one prompt", param="text")
    return PromptTokens(len(text), is_batch=True, texts=text)


def _id_lists(ids: Any) -> PromptTokens:
    if not isinstance(ids, list):
        raise RequestRefused(f"input_ids is {shown(ids)}; it takes a list of token ids", param="input_ids")
    is_batch = bool(ids) and isinstance(ids[0], list)
    try:
        # One by one: msgspec holds the GIL while it works, in a thread too.
        id_lists = [msgspec.convert(each, list[int]) for each in (ids if is_batch else [ids])]
    except msgspec.ValidationError:
        raise RequestRefused(
            "input_ids takes a list of whole numbers, or a list of such lists for a batch", param="input_ids"
        ) from None
    return PromptTokens(len(id_lists), is_batch, id_lists=id_lists)


def _has_no_limit(sampling: Any) -> bool:
    return not isinstance(sampling, dict) or not {"max_new_tokens", "max_tokens"} & sampling.keys()


def _position(value: Any, name: str) -> int:
    if typed(value, int, name) < 0:
        raise RequestRefused(f"{name} is {value}; it takes a number of tokens, 0 or more", param=name)
    return value


def read_adapter(value: Any, name: str) -> str:
    if not 0 < len(typed(value, str, name)) <= MAX_NAME_CHARS:
        raise RequestRefused(f"{name} is {shown(value)}; it takes the name of a loaded adapter", param=name)
    return value


def read_priority(value: Any, name: str) -> int:
    if not -MAX_PRIORITY <= typed(value, int, name) <= MAX_PRIORITY:
        raise RequestRefused(f"{name} is {value}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", param=name)
    return value
