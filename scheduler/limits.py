"""What can never be served, said at once: lengths against the context and the KV pool."""

from __future__ import annotations

from .refusal import RequestRefused
from .request import LogprobOptions


def check_lengths(prompt_len: int, wanted: int | None, context: int, pool: int) -> int:
    """How many tokens a request may generate: ``wanted``, or what context and pool (in tokens) leave if that is None.

    Raises RequestRefused if the prompt, or prompt + wanted, can never fit.
    """
    if prompt_len == 0:
        raise RequestRefused("the prompt is empty; send at least one token", param="input_ids")
    if prompt_len >= context:
        raise RequestRefused(
            f"the prompt has {prompt_len} tokens, the context holds {context} with at least one new token; "
            "shorten it or raise --context-length",
            code="context_length_exceeded",
            param="input_ids",
        )
    if wanted is not None and prompt_len + wanted > context:
        raise RequestRefused(
            f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}) = {prompt_len + wanted} exceeds the context "
            f"of {context} tokens; ask for at most {context - prompt_len}",
            code="context_length_exceeded",
            param="max_new_tokens",
        )
    most = min(context - prompt_len, pool - prompt_len + 1)  # the last token's KV is never computed
    if most < 1 or (wanted is not None and wanted > most):
        raise RequestRefused(
            f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}) can never fit the KV pool of {pool} tokens; "
            "shorten the request or start the server with a larger --max-total-tokens",
            code="kv_pool_exceeded",
            param="max_new_tokens",
        )
    return most if wanted is None else wanted


def check_logprob_start(options: LogprobOptions | None, prompt_len: int) -> None:
    """Raises RequestRefused if logprobs are wanted from behind the prompt's end."""
    if options is not None and options.start_len >= prompt_len:
        raise RequestRefused(
            f"logprob_start_len is {options.start_len}; the prompt has {prompt_len} tokens. Use -1 for the logprobs of "
            "output tokens only",
            param="logprob_start_len",
        )
