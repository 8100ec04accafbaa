"""Parts of requests and answers that several of OpenAI's endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...runtime.answer import Output, TokenLogprob
from ...scheduler.outcome import ContextOverflow, FoundTokens, RequestRefused
from ..description.json_schema import (
    COUNT,
    TOKEN_ID,
    Properties,
    Schema,
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    open_object,
    picked,
    string,
    whole,
)
from ..fields.grammars import GRAMMARS
from ..fields.output_details import CACHE_REPORT, CACHED_TOKENS, STAGE_DETAILS, cache_report, cached_tokens
from ..fields.reading import RID, read_rid, typed
from ..fields.sampling import SAMPLING, with_model_defaults

OPENAI_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip

OTHER_SAMPLING = (
    # Not OpenAI's; named as in SGLang and vLLM.
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "stop_regex", "bad_words", *GRAMMARS,
)  # fmt: skip

VLLM_NAMES = {"include_stop_str_in_output": "no_stop_trim"}
"""vLLM's name of a sampling parameter -> SGLang's."""

MAX_TEMPERATURE = 2.0

SAMPLING_OF_ALL: Properties = with_model_defaults(picked(SAMPLING, (*OPENAI_SAMPLING, *OTHER_SAMPLING)))
SAMPLING_OF_ALL["temperature"] = SAMPLING_OF_ALL["temperature"] | {"maximum": MAX_TEMPERATURE}

VLLM: Properties = {
    "include_stop_str_in_output": SAMPLING["no_stop_trim"] | {"description": "vLLM's name of no_stop_trim."}
}

OF_THE_PROMPT: Properties = {
    "return_token_ids": flag("The ids of prompt and output beside the text.", default=False),
    "truncate_prompt_tokens": either(
        whole("", 1),
        enum(-1),
        about="Number of tokens kept from the end of the prompt; -1: as many as leave room to answer.",
    ),
    "prompt_logprobs": whole("Logprobs of the prompt's tokens, and this many alternatives, up to --max-logprobs.", 0),
}
"""Fields of vLLM's about the tokens of a prompt."""

PROMPT_LOGPROBS = list_of(
    nullable(
        open_object(
            "By token id: the prompt's own token, and the likeliest at its place.",
            values=answered({"logprob": number(), "rank": whole("", 1), "decoded_token": string()}),
        )
    ),
    "null for the first token.",
)

REQUEST_RID: Properties = {"rid": RID, "request_id": RID | {"description": "vLLM's name of rid."}}

TEMPLATE_VARIABLES: Schema = open_object("Variables of the chat template.")

FINISH_REASONS = ("stop", "length", "abort")

MATCHED_STOP = either(string(), TOKEN_ID, {"type": "null"}, about="The stop that ended it.")

USAGE = answered(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": answered(
            CACHED_TOKENS,
            optional=CACHE_REPORT
            | {"cache_reports": list_of(CACHE_REPORT["cache_report"], "One for each prompt.")}
            | {"prepared_tokens": STAGE_DETAILS["prepared_tokens"]},
        ),
    },
    title="Usage",
)

NULLABLE_TEXT = nullable(string())


def overflow_words(what: str) -> Callable[[ContextOverflow], str]:
    """OpenAI's words for a request that is longer than the context: LiteLLM, LangChain and harnesses look for them, and
    shorten the conversation instead of trying again. what: the prompt's name."""

    def words(overflow: ContextOverflow) -> str:
        head = f"This model's maximum context length is {overflow.context} tokens. However, "
        prompt, output = overflow.prompt, overflow.output
        if output:
            return (
                f"{head}you requested {'at least ' if overflow.at_least else ''}{prompt + output} tokens ({prompt} in "
                f"the {what}, {output} in the completion). Please reduce the length of the {what} or completion."
            )
        return f"{head}your {what} resulted in {overflow.prompt_words}. Please reduce the length of the {what}."

    return words


def check_temperature(fields: dict[str, Any]) -> None:
    """Refuse what OpenAI refuses; `/generate` has no such limit. Raises RequestRefused."""
    if typed(fields.get("temperature", 1.0), float, "temperature") > MAX_TEMPERATURE:
        raise RequestRefused(
            f"temperature is {fields['temperature']}; use 0 to {MAX_TEMPERATURE:g}", param="temperature"
        )


def with_vllm_names(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, those that only vLLM has under SGLang's names. Raises RequestRefused where both are given and
    differ."""
    for theirs, name in VLLM_NAMES.items():
        if theirs in fields:
            value = typed(fields[theirs], bool, theirs)
            if fields.get(name, value) != value:
                raise RequestRefused(f"{theirs} and {name} mean the same, and differ; give one of them", param=theirs)
            fields = {other: given for other, given in fields.items() if other != theirs} | {name: value}
    return fields


def wants_token_ids(fields: dict[str, Any]) -> bool:
    """vLLM's ``return_token_ids``: the ids of prompt and output beside the text."""
    return typed(fields.get("return_token_ids", False), bool, "return_token_ids")


def read_truncation(fields: dict[str, Any]) -> int | None:
    """vLLM's ``truncate_prompt_tokens``; see `Prompt.truncate_to`. Raises RequestRefused."""
    name = "truncate_prompt_tokens"
    if name not in fields:
        return None
    most = typed(fields[name], int, name)
    if most < 1 and most != -1:
        raise RequestRefused(
            f"{name} is {most}; use how many of the prompt's last tokens are to be kept, or -1 for as many as fit",
            param=name,
        )
    if "continuation_of" in fields:
        raise RequestRefused(
            f"{name} cannot truncate a continued prompt; leave it out, or send the whole prompt "
            "without continuation_of",
            param=name,
        )
    return most


def read_request_rid(fields: dict[str, Any]) -> Any:
    """The rid, which vLLM calls request_id."""
    rid, request_id = fields.get("rid"), fields.get("request_id")
    if rid is not None and request_id is not None and rid != request_id:
        raise RequestRefused("rid and request_id are both given; they mean the same", param="request_id")
    return read_rid(request_id, "request_id") if rid is None and request_id is not None else rid


def template_variables(fields: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Variables of the chat template, from ``chat_template_kwargs``. effort: how much the model is to think; templates
    call it reasoning_effort."""
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RequestRefused("chat_template_kwargs takes an object", param="chat_template_kwargs")
    if taken := [name for name in variables if name in _OF_THE_TEMPLATE]:
        raise RequestRefused(
            f"chat_template_kwargs.{taken[0]} is given by the request itself; use its own field",
            param="chat_template_kwargs",
        )
    return variables if effort is None else {"reasoning_effort": effort} | variables


_OF_THE_TEMPLATE = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """The token counts of a call. outputs: the latest update of each. A prompt counts once, however many outputs it
    has."""
    outputs = list(outputs)
    firsts = [output for output in outputs if output.sample == 0]
    prompt = sum(output.prompt_tokens for output in firsts)
    completion = sum(output.completion_tokens for output in outputs)
    details = cached_tokens(sum((output.found for output in firsts), FoundTokens()))
    if len(firsts) == 1:
        details |= cache_report(firsts[0])
    elif reports := [each for output in firsts for each in cache_report(output).values()]:
        details["cache_reports"] = reports
    if prepared := sum(output.prepared_tokens for output in firsts):
        details["prepared_tokens"] = prepared
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


_MINUS_INFINITY = -9999.0
"""As in vLLM: JSON has no other."""


def read_prompt_logprobs(fields: dict[str, Any]) -> int | None:
    """Alternatives wanted for each token of the prompt; None for nothing at all. Raises RequestRefused."""
    name = "prompt_logprobs"
    if name not in fields:
        return None
    wanted = typed(fields[name], int, name)
    if wanted == -1:
        raise RequestRefused(
            f"{name} is -1, the whole vocabulary, which this server does not give; use 0 to --max-logprobs", param=name
        )
    if wanted < 0:
        raise RequestRefused(f"{name} is {wanted}; use 0 (no alternatives) to --max-logprobs", param=name)
    if fields.get("stream"):
        raise RequestRefused(f"{name} comes with whole answers only; leave out stream, or {name}", param=name)
    return wanted


def prompt_logprobs(output: Output, num_top: int) -> Iterator[dict[str, dict[str, Any]] | None]:
    """For each token of the prompt an object, by id, of the token itself and the ``num_top`` likeliest. None for the
    first, which follows nothing."""
    for position, token in enumerate(output.input_logprobs):
        yield None if position == 0 else _entries(token, num_top)


def _entries(token: TokenLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    entries = {str(token.id): _entry(token, token.rank)}
    for rank, other in enumerate((token.top or [])[:num_top], 1):
        entries.setdefault(str(other.id), _entry(other, rank))
    return entries


def _entry(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    logprob = _MINUS_INFINITY if token.logprob is None else token.logprob
    return {"logprob": logprob, "rank": rank, "decoded_token": token.text}
