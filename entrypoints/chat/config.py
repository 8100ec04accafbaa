"""Settings of the chat endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.config import flag


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How messages become prompts, and answers become messages."""

    chat_template: str = flag("", "File with a Jinja chat template. Empty: the template in the model's folder.")
    tool_call_parser: str = flag(
        "auto",
        "Format of the model's tool calls, such as qwen25, hermes, llama3 or mistral. auto: derived from the "
        "chat template. none: tool calls are not parsed.",
    )
    reasoning_parser: str = flag(
        "auto",
        "Format of the model's reasoning, such as deepseek-r1, qwen3 or gpt-oss. auto: derived from the chat "
        "template. none: reasoning is not separated.",
    )
    no_auto_continue: bool = flag(False, "Do not let a chat continue automatically from the KV of its last turn.")
    conversation_ttl: float = flag(
        60.0, "Seconds for which a chat's KV stays leased for its next turn; 0: no lease, it is cached like any other."
    )
    response_ttl: float = flag(
        60.0,
        "Seconds for which the KV of a stored response (/v1/responses) stays leased for a request that names "
        "it as previous_response_id; 0: no lease.",
    )
    max_stored_responses: int = flag(
        1024, "Maximum number of stored responses that can be read and continued by id. The oldest are dropped first."
    )
