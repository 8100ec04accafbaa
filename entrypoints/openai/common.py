"""Parts of requests and answers that several of OpenAI's endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...runtime.answer import Output
from ...scheduler.outcome import ContextOverflow, FoundTokens, RequestRefused
from ..fields.output_details import cached_tokens
from ..fields.reading import read_rid, typed

OPENAI_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip

OTHER_SAMPLING = (
    # Not OpenAI's; named as in SGLang and vLLM.
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "stop_regex", "bad_words",
)  # fmt: skip


VLLM_NAMES = {"include_stop_str_in_output": "no_stop_trim"}
"""vLLM's name of a sampling parameter -> SGLang's."""

MAX_TEMPERATURE = 2.0


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
            f"{name} cannot cut what is continued; leave it out, or send the whole prompt without continuation_of",
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
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cached_tokens(sum((output.found for output in firsts), FoundTokens())),
    }
