"""Puts together what chats need, from the settings and the model's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ...runtime.text.tokenizer import Tokenizer
from ...runtime.tokenizer_manager import TokenizerManager
from ..server_config import ChatConfig
from ..step_calls.call_reader import CallReader
from .answer_parsers import AnswerParsers
from .chats import Chats
from .conversations import Conversations
from .prefix_rules import read_rules
from .rendering import Renderer
from .template_choice import choose_templates

logger = logging.getLogger(__name__)


class ChatSetupError(ValueError):
    """A setting cannot be used; the message says which, and what to change."""


class ChatSetup:
    """The template and the parsers of one server. Raises ChatSetupError."""

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._rules = read_rules(config.normalize_prefix)
        self.renderer = Renderer(choose_templates(tokenizer, _given_template(config.chat_template, tokenizer)))
        source, with_tools = self.renderer.source, self.renderer.source_with_tools
        try:
            self.parsers = AnswerParsers(config.tool_call_parser, config.reasoning_parser, source, with_tools)
        except ValueError as error:
            raise ChatSetupError(f"--tool-call-parser, --reasoning-parser: {error}") from None
        # With a bundled template a plain chat's calls have any form: the answer shows which.
        tools_name = None if self.renderer.bundled else self.parsers.tools_name
        self.read_calls = CallReader(tools_name, self.parsers.reasoning_name).read_calls

    def log(self) -> None:
        """Log the template, the parsers and the rules in use."""
        for rule in self._rules:
            logger.info("--normalize-prefix %s: text such as '%s' is %s", rule.name, rule.example, rule.effect)
        if not self.renderer.source_with_tools:
            logger.info("no chat template: chats are refused")
            return
        logger.info(
            "chat template: %s; parser of tool calls: %s, of reasoning: %s",
            self._config.chat_template or "of the model",
            self.parsers.tools_name or "text",
            self.parsers.reasoning_name or "text",
        )
        if self.renderer.bundled:
            logger.info(
                "the chat template has no place for tools; chats with tools use the bundled %s",
                self.renderer.bundled,
            )
        elif not self.renderer.knows_tools:
            logger.info("the chat template has no place for tools, and no bundled one fits; tools are refused")

    def chats(self, manager: TokenizerManager) -> Chats:
        tokenizer, auto = manager.tokenizer, not self._config.no_auto_continue
        special_texts = map(tokenizer.token_text, tokenizer.special_ids)
        conversations = Conversations(self.renderer, self.parsers.says_the_same, special_texts, keeps=auto)
        retain_ttl = self._config.conversation_ttl if auto else None
        prepares = auto and self._config.prepare_next_turn == "auto"
        return Chats(
            manager, self.renderer, self.parsers, conversations, retain_ttl, self._rules, prepares_turns=prepares
        )


def _given_template(file: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    if not file:
        return None
    try:
        return ChatTemplate(Path(file).read_text(encoding="utf-8"), tokenizer.special_tokens)
    except (OSError, UnicodeDecodeError, ChatTemplateError) as error:
        raise ChatSetupError(f"--chat-template {file}: {error}") from None
