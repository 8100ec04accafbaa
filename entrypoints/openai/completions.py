"""``POST /v1/completions``: OpenAI's fields in, OpenAI's objects out. No HTTP, no model.

A call is translated into the native one, whose rules then hold for both: sampling, batches, continuations, names.
What is refused is said in the caller's words (`in_openai_words`).
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...runtime.prompt import Prompt
from ...runtime.text.tokenizer import Tokenizer
from ...scheduler.refusal import RequestRefused
from ..fields.continuation import CONTINUATION_FIELDS
from ..fields.reading import RESPONSE_ID_PREFIX, read_rid, refuse_unserved, shown, typed
from ..native.generate import GenerateCall, parse_generate
from .logprobs import LogprobsBuilder

_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
    # Not OpenAI's, under the names that SGLang and vLLM gave them:
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "beam_width", "length_penalty", "early_stopping", "item_trie",
)  # fmt: skip
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_OF_THE_CALL = ("stream", "cache_salt", "extra_key", "no_stop_trim", *CONTINUATION_FIELDS)

FIELDS = (
    "model", "prompt", "stream_options", "logprobs", "echo", "best_of", "use_beam_search", "rid", "request_id",
    *_RENAMED, *_SAMPLING, *_OF_THE_CALL,
)  # fmt: skip

UNSUPPORTED: dict[str, tuple] = {
    # Field -> the values, beside null, that ask for nothing.
    "suffix": ("",), "response_format": (), "json_schema": ("",), "regex": ("",), "ebnf": ("",),
    "structural_tag": ("",), "lora_path": ("",), "session_params": ({},), "allowed_token_ids": ([],),
    "bad_words": ([],), "include_stop_str_in_output": (False,), "prompt_logprobs": (), "add_special_tokens": (True,),
    "truncate_prompt_tokens": (), "return_hidden_states": (False,), "priority": (0,),
}  # fmt: skip

WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "routing_key",
    "conversation_id", "no_logs",
)  # fmt: skip
"""Labels."""

_BATON_META = ("continuation", "retained", "cumulative_logprob", "sequence_score", "beam_search")
"""What else of ``meta_info`` goes into a choice, under ``baton``."""

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5


@dataclass(slots=True, frozen=True)
class CompletionCall:
    """A parsed call. ``logprobs``: alternatives per token; None for no logprobs at all."""

    generate: GenerateCall
    model: str | None
    echo: bool
    logprobs: int | None
    include_usage: bool

    @property
    def response_id(self) -> str:
        return f"{RESPONSE_ID_PREFIX}{self.generate.rid}"


def parse_completion(fields: dict[str, Any], *, rid: str | None = None) -> CompletionCall:
    """Fields of the request body -> a call. ``rid`` is used where the body brings none. Raises RequestRefused."""
    refuse_unserved(fields, FIELDS, UNSUPPORTED, WITHOUT_EFFECT, where="")
    fields = {name: value for name, value in fields.items() if value is not None}
    echo = typed(fields.get("echo", False), bool, "echo")
    logprobs = _logprobs(fields.get("logprobs"))
    stream = typed(fields.get("stream", False), bool, "stream")
    include_usage = _include_usage(fields.get("stream_options"), stream)
    if echo and "continuation_of" in fields:
        raise RequestRefused("echo cannot show what the parent's prompt was; leave it out", param="echo")
    sampling: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_TOKENS}
    sampling |= {name: fields[name] for name in _SAMPLING if name in fields}
    sampling |= {native: fields[name] for name, native in _RENAMED.items() if name in fields}
    if (width := _beam_width(fields)) is not None:
        sampling["beam_width"] = width
    native = {
        **_prompt(fields),
        **{name: fields[name] for name in _OF_THE_CALL if name in fields},
        "rid": _rid(fields),
        "sampling_params": sampling,
        "return_logprob": logprobs is not None,
        "top_logprobs_num": logprobs or 0,
        "logprob_start_len": 0 if echo and logprobs is not None else -1,
        "return_text_in_logprobs": logprobs is not None,
    }
    with in_openai_words():
        call = parse_generate(native, rid=rid)
    return CompletionCall(call, fields.get("model"), echo, logprobs, include_usage)


@contextmanager
def in_openai_words() -> Iterator[None]:
    """A refusal raised within speaks of OpenAI's fields instead of the native ones."""
    try:
        yield
    except RequestRefused as refused:
        message = refused.message.replace("sampling_params.", "").replace("text or input_ids", "prompt")
        for theirs, ours in (*_RENAMED.items(), ("prompt", "input_ids")):
            message = re.sub(rf"\b{ours}\b", theirs, message)
        param = (refused.param or "").removeprefix("sampling_params.")
        native = {ours: theirs for theirs, ours in _RENAMED.items()} | {"text": "prompt", "input_ids": "prompt"}
        raise RequestRefused(
            message, status=refused.status, code=refused.code, param=native.get(param, param) or None
        ) from refused.__cause__


def _prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """The native field of the prompt. A list of one prompt is that prompt: the answer looks the same."""
    prompt = fields.get("prompt")
    is_continuation = "continuation_of" in fields
    if is_continuation and prompt in ("", [], [""]):
        return {}  # OpenAI's own client always sends a prompt; an empty one cannot be meant
    if prompt is None:
        if is_continuation:
            return {}
        raise RequestRefused("prompt is missing; give a string, token ids, or a list of either", param="prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
        return {"text": prompt if prompt else ""}
    if not isinstance(prompt, str | list):
        raise RequestRefused(
            f"prompt is {shown(prompt)}; it takes a string, token ids, or a list of either", param="prompt"
        )
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def _beam_width(fields: dict[str, Any]) -> Any:
    """Beams of the search that is asked for, None for none: by ``beam_width``, or as vLLM has it, by
    ``use_beam_search`` with ``n`` of them. Checks ``best_of``, which is that width, or without a search ``n``."""
    has_width = fields.get("beam_width", 0) != 0  # 0 is none
    wanted = typed(fields.get("use_beam_search", has_width), bool, "use_beam_search")
    n = fields.get("n", 1)
    best_of = typed(fields["best_of"], int, "best_of") if "best_of" in fields else n
    if not wanted:
        if has_width:
            raise RequestRefused(
                "beam_width is set and use_beam_search is false; leave one of them out", param="use_beam_search"
            )
        if best_of != n:
            raise RequestRefused(
                f"best_of is {best_of} and n is {shown(n)}; all outputs are returned: leave best_of out",
                param="best_of",
            )
        return None
    width = fields["beam_width"] if has_width else best_of
    if "best_of" in fields and best_of != width:
        raise RequestRefused(
            f"best_of is {best_of} and beam_width is {shown(width)}; they mean the same, leave one of them out",
            param="best_of",
        )
    return width


def _rid(fields: dict[str, Any]) -> Any:
    """vLLM calls it request_id."""
    rid, request_id = fields.get("rid"), fields.get("request_id")
    if rid is not None and request_id is not None and rid != request_id:
        raise RequestRefused("rid and request_id are both given; they mean the same", param="request_id")
    return read_rid(request_id, "request_id") if rid is None and request_id is not None else rid


def _logprobs(given: Any) -> int | None:
    if given is None:
        return None
    if not 0 <= typed(given, int, "logprobs") <= MAX_LOGPROBS:
        raise RequestRefused(f"logprobs is {given}; use 0 to {MAX_LOGPROBS}", param="logprobs")
    return given


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    if not stream:
        raise RequestRefused("stream_options is set without stream; add stream: true", param="stream_options")
    refuse_unserved(options, ("include_usage",), {}, (), where="stream_options.")
    include = options.get("include_usage")
    return typed(False if include is None else include, bool, "stream_options.include_usage")


# -- answers -----------------------------------------------------------------------------------------------------------


class CompletionAnswer:
    """Turns the outputs of one call into OpenAI's objects."""

    def __init__(self, call: CompletionCall, model: str, tokenizer: Tokenizer) -> None:
        """``model``: the served name."""
        self._call = call
        self._head = {"id": call.response_id, "object": "text_completion", "created": int(time.time()), "model": model}
        prompts = call.generate.prompts
        self._choices = [
            _Choice(call, prompt, index * prompt.sampling.n + sample, sample, tokenizer)
            for index, prompt in enumerate(prompts)
            for sample in range(prompt.sampling.n)
        ]

    def whole(self, outputs: list[tuple[int, dict]]) -> dict:
        """The answer to a call that does not stream, from all its outputs by position."""
        choices = [self._choices[position].add(output) for position, output in outputs]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self, updates: AsyncIterator[tuple[int, dict]]) -> AsyncIterator[dict]:
        """The events of a stream, from incremental updates of the outputs by position."""
        extra = {"usage": None} if self._call.include_usage else {}
        with in_openai_words():
            async for position, output in updates:
                choice = self._choices[position].add(output)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                    yield {**self._head, "choices": [choice], **extra}
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict:
        """A prompt counts once, however many outputs it has."""
        filled = [choice for choice in self._choices if choice.meta]  # a search may have found fewer than n
        firsts = [choice.meta for choice in filled if choice.sample == 0]
        prompt = sum(meta["prompt_tokens"] for meta in firsts)
        completion = sum(choice.meta["completion_tokens"] for choice in filled)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in firsts)},
        }


class _Choice:
    """One choice, as it grows. ``meta``: the newest meta_info of its output."""

    def __init__(self, call: CompletionCall, prompt: Prompt, index: int, sample: int, tokenizer: Tokenizer) -> None:
        self.sample = sample
        self.meta: dict = {}
        self._index = index
        self._echo = _prompt_text(prompt, tokenizer) if call.echo else ""
        self._logprobs = None
        if call.logprobs is not None:
            skip = prompt.sampling.skip_special_tokens
            self._logprobs = LogprobsBuilder(tokenizer.token_bytes, self._echo, skip_special_tokens=skip)

    def add(self, output: dict) -> dict:
        """OpenAI's choice, of what is new in the output."""
        self.meta = output["meta_info"]
        text, self._echo = self._echo + output["text"], ""
        finish = self.meta["finish_reason"]
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.add(self.meta),
            "finish_reason": None if finish is None else finish["type"],
        }
        if finish is not None:
            choice["matched_stop"] = finish.get("matched")
            also = {name: self.meta[name] for name in _BATON_META if name in self.meta}
            choice["baton"] = {"rid": self.meta["id"], "index": self.sample, **also}
        return choice


def _prompt_text(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """What ``echo`` shows: the prompt as it was sent."""
    return prompt.text if prompt.text is not None else tokenizer.decode(prompt.input_ids or [], False)
