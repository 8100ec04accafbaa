"""Chat templates: a list of messages -> the text a model was trained on.

Templates are Jinja programs that come with a checkpoint, so they are strangers' code: they run in Jinja's immutable
sandbox. The globals and filters are those that Hugging Face documents for templates, and nothing else.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The template cannot render these messages, or there is no template."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; in serving only its content matters."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML, which a model was never trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """One compiled template. ``special_tokens``: bos_token, eos_token, … as the template may name them."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: list[dict],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. ``messages``: plain dicts with role and content, as JSON gave them; ``variables`` are
        passed to the template (``enable_thinking``, …). Raises ChatTemplateError with the template's own complaint."""
        given = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # As one object: a variable may be called self, too.
            return self._template.render(self._special_tokens | variables | given)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(
                f"the chat template failed on these messages ({type(error).__name__}: {error}); "
                "check that each message has the fields the template reads"
            ) from error
