"""A chat in the form that every API reads it into."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.prompt import Prompt
from ...scheduler.outcome import RequestRefused
from .conversations import Turn
from .messages import Conversation
from .tools import Choice


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatCall:
    """prompt: the settings; the template adds the tokens. tools: in OpenAI's shape. separate_reasoning: the answer has
    thoughts apart from text, where the model marks them. after: the turn to continue, where the API knows it; its
    client and namespace are those of the call. shared_name: one that other conversations may have too; see `NamedJobs`.
    """

    prompt: Prompt
    stream: bool
    conversation: Conversation
    tools: list[dict]
    choice: Choice
    separate_reasoning: bool = True
    after: Turn | None = None
    shared_name: str | None = None

    def __post_init__(self) -> None:
        """Raises RequestRefused."""
        if self.prompt.sampling.beam_width is not None:
            raise RequestRefused("a chat takes no beam_width; use /v1/completions or /generate", param="beam_width")

    @property
    def rid(self) -> str:
        return self.prompt.rid

    @property
    def name(self) -> str | None:
        """The name that its client gives the conversation."""
        return self.prompt.spec.job_id or self.shared_name

    @property
    def may_call(self) -> bool:
        """May the answer hold calls of tools?"""
        return bool(self.tools) and self.choice.kind != "none"
