"""Settings of the chat endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.config import flag


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How messages become prompts, and answers become messages."""

    chat_template: str = flag("", "file with a Jinja chat template; default: the one in the model's folder")
    tool_call_parser: str = flag(
        "auto", "form of the model's tool calls: qwen25, hermes, llama3, mistral, ...; auto: by its template; none"
    )
    reasoning_parser: str = flag(
        "auto", "form of the model's thoughts: deepseek-r1, qwen3, gpt-oss, ...; auto: by its template; none"
    )
    no_auto_continue: bool = flag(False, "chats do not go on from the KV of their last turn by themselves")
    conversation_ttl: float = flag(
        60.0, "seconds for which a chat's KV stays leased for its next turn; 0: it is cached like any other"
    )
    response_ttl: float = flag(
        60.0, "the same of a stored response (/v1/responses), which previous_response_id goes on from"
    )
    max_stored_responses: int = flag(1024, "responses that can be read and gone on from by id; the oldest go")
