"""Chooses the parsers of the model's answers: those of the flags, or those that the chat template implies."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from typing import Any

from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import Grammar
from ..reasoning_parsers.output_parser import OutputParser, ReasoningParser
from ..reasoning_parsers.registry import choose as choose_reasoning
from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, ToolParser, joined
from ..tool_parsers.registry import choose as choose_tools
from ..tool_parsers.registry import tool_parser
from .answer_grammar import AnswerGrammar
from .call import ChatCall
from .messages import read_arguments
from .tools import specs_of

AUTO, NONE = "auto", "none"

_LAST_CHARS = 200
_CLOSING_MARKS = re.compile(r"(?:(?:<[^<>\s]+>|\])\s*)*$")
"""Closing marks that may follow the arguments of the last call."""


class AnswerParsers:
    """Makes the parser of each answer."""

    def __init__(
        self, tool_call_parser: str, reasoning_parser_name: str, template: str, with_tools: str | None = None
    ) -> None:
        """Names as of the flags. ``template``: the source of the chat template, for auto; with_tools: of that for chats
        that bring tools, if it is another one. Raises ValueError."""
        with_tools = template if with_tools is None else with_tools
        tools = choose_tools(with_tools) if tool_call_parser == AUTO else tool_call_parser
        thoughts = choose_reasoning(template) if reasoning_parser_name == AUTO else reasoning_parser_name
        self.tools_name = None if tools == NONE else tools
        self.reasoning_name = None if thoughts == NONE else thoughts
        self._tools: type[ToolParser] | None = tool_parser(self.tools_name) if self.tools_name else None
        self._reasoning: type[ReasoningParser] | None = (
            reasoning_parser(self.reasoning_name) if self.reasoning_name else None
        )
        self._short_ids = "length 9" in with_tools or (self.tools_name or "").startswith("mistral")

    def make_parser(self, call: ChatCall, opening: str) -> OutputParser:
        """The parser of one answer. opening: what the template wrote behind the last message, and what the answer was
        made to begin with. Raises RequestRefused for calls that no parser here can read."""
        if call.may_call and self._tools is None:
            raise RequestRefused(
                "the chat template does not show the form of this model's tool calls, so no parser is known for them; "
                "start the server with --tool-call-parser (and, if need be, --chat-template), or leave out tools",
                code="no_tool_call_parser",
                param="tools",
            )
        tools = self._tools(specs_of(call.tools)) if call.may_call and self._tools is not None else None
        thoughts = None
        if self._reasoning is not None and call.separate_reasoning:
            inside = self._reasoning.begins_inside(opening)
            thoughts = self._reasoning(begins_inside=inside or None)
        return OutputParser(thoughts, tools)

    def answer_grammar(self, call: ChatCall, opening: str, forced: str, special: Mapping[str, int]) -> Grammar | None:
        """What one answer must look like; None where it is free. opening: as for `make_parser`. forced: what the answer
        was made to begin with. special: text -> id of the special tokens. Raises RequestRefused."""
        specs = specs_of(call.tools) if call.may_call else []
        form = call.prompt.sampling.grammar
        if form is None and not forced and not any(spec.strict for spec in specs):
            return None
        inside = False
        if self._reasoning is not None:  # as its parser takes it: some models begin inside whatever the prompt says
            inside = self._reasoning(begins_inside=self._reasoning.begins_inside(opening) or None).is_inside
        grammar = AnswerGrammar(self._tools if call.may_call else None, self._reasoning, special)
        return grammar.build(form, specs, call.choice, forced, inside=inside)

    def says_the_same(self, words: str, said: str) -> bool:
        """Is the only difference how spaces and the JSON of calls are written? See conversations.py."""
        try:
            return self._meaning(words) == self._meaning(said)
        except RecursionError:  # too deep to be compared
            return False

    def _meaning(self, text: str) -> list[tuple]:
        parser = OutputParser(
            self._reasoning(begins_inside=False) if self._reasoning is not None else None,
            self._tools([]) if self._tools is not None else None,
        )
        meaning: list[tuple] = []
        for piece in joined(parser.push_text(text) + parser.finish()):
            match piece:
                case CallBegins(_, name):
                    meaning.append(("call", name, {}))
                case CallArguments(_, arguments):
                    meaning[-1] = (*meaning[-1][:2], _without_bools(read_arguments(arguments)))
                case Reasoning(words):
                    meaning.append(("reasoning", words.strip()))
                case _:
                    if words := piece.text.strip():
                        meaning.append(("text", words))
        # Where the answer was cut off, the template ends the thought, or the call, that the model did not.
        if self._reasoning is not None and self._reasoning.begins_inside(text):
            meaning.append(("unfinished reasoning",))
        if meaning and meaning[-1][0] == "call":
            marks = _CLOSING_MARKS.search(text[-_LAST_CHARS:])
            meaning.append(("end", "".join(marks[0].split()) if marks else ""))
        return meaning

    def new_call_id(self) -> str:
        """For one call of an answer. Mistral's templates refuse any that has not nine letters and digits."""
        if self._short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def first_call_only(pieces: list[Piece]) -> list[Piece]:
    """Without the calls after the first."""
    return [piece for piece in pieces if not isinstance(piece, CallBegins | CallArguments) or piece.index == 0]


def _without_bools(value: Any) -> Any:
    """With something else for true and false, which Python takes for the same as 1 and 0."""
    if isinstance(value, bool):
        return bool, int(value)
    if isinstance(value, dict):
        return {name: _without_bools(each) for name, each in value.items()}
    return [_without_bools(each) for each in value] if isinstance(value, list) else value
