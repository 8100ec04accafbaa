"""The parsers by name, as ``--reasoning-parser`` names them, and which of them a chat template needs."""

from __future__ import annotations

import re

from .gpt_oss import GptOssReasoningParser
from .output_parser import ReasoningParser
from .tagged import DeepSeekR1Parser, KimiParser, MistralReasoningParser, TaggedParser

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek-r1": DeepSeekR1Parser,
    "deepseek-v3": TaggedParser,
    "glm45": TaggedParser,
    "gpt-oss": GptOssReasoningParser,
    "kimi": KimiParser,
    "kimi_k2": TaggedParser,
    "mistral": MistralReasoningParser,
    "qwen3": TaggedParser,
    "qwen3-thinking": DeepSeekR1Parser,
}

_THINKING_SWITCH = re.compile(r"\bthinking\b")


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of this name. Raises ValueError."""
    if name not in REASONING_PARSERS:
        raise ValueError(f"there is no reasoning parser {name!r}; use one of {', '.join(sorted(REASONING_PARSERS))}")
    return REASONING_PARSERS[name]


def choose(template: str) -> str | None:
    """The name of the parser for the thoughts that this chat template (its source) speaks of; None if of none."""
    if "<|channel|>" in template and "analysis" in template:
        return "gpt-oss"
    if "◁think▷" in template:
        return "kimi"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return None
    if "[gMASK]" in template:
        return "glm45"
    if "<｜Assistant｜>" in template:
        return "deepseek-v3" if _THINKING_SWITCH.search(template) else "deepseek-r1"
    return "qwen3"
