"""The formats by name, as ``--tool-call-parser`` names them, and which of them a chat template teaches."""

from __future__ import annotations

import re

from .deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from .harmony import GptOssParser
from .hermes import HermesParser, QwenParser
from .llama3 import Llama3Parser
from .mistral import MistralArgsParser, MistralParser
from .pieces import ToolParser
from .pythonic import PythonicParser
from .qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseekv3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV31Parser,
    "gpt-oss": GptOssParser,
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral-args": MistralArgsParser,
    "pythonic": PythonicParser,
    "qwen": QwenParser,
    "qwen25": QwenParser,
    "qwen3_coder": Qwen3CoderParser,
}

_QWEN = re.compile(r"You are Qwen|enable_thinking|multi_step_tool|reasoning_content")
_NAME_KEY = re.compile(r"""\\?["']name\\?["']""")


def tool_parser(name: str) -> type[ToolParser]:
    """The parser of this name. Raises ValueError."""
    if name not in TOOL_PARSERS:
        raise ValueError(f"there is no tool call parser {name!r}; use one of {', '.join(sorted(TOOL_PARSERS))}")
    return TOOL_PARSERS[name]


def choose(template: str) -> str | None:
    """The name of the parser for the calls that this chat template (its source) writes; None if it writes none, or none
    that is known here."""
    if "<|channel|>" in template and "functions." in template:
        return "gpt-oss"
    if "[TOOL_CALLS]" in template:
        return "mistral-args" if "[ARGS]" in template else "mistral"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseekv3" if "```json" in template else "deepseekv31"
    if "<tool_call>" in template:
        return _choose_tagged(template)
    if "<|python_start|>" in template or "func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    return None


def _choose_tagged(template: str) -> str | None:
    """Which of the formats with ``<tool_call>``; GLM's and Hunyuan's are not known here."""
    if "<function=" in template:
        return "qwen3_coder"
    if "<arg_key>" in template or "<tool_sep>" in template or not _NAME_KEY.search(template):
        return None
    return "qwen" if _QWEN.search(template) else "hermes"
