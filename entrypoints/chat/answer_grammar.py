"""What a chat's answer must look like, as one grammar: thoughts first, then calls of tools, or text of the wanted form.

    start: thought? (calls | @format)          response_format, and tools that the model may call instead
    start: thought? (text call)* text          tools with strict, which the model may call
    start: arguments close (next call)*        a call that the model must make; the prompt has begun it

The frame around calls is the tool parser's, that around thoughts the reasoning parser's. Each form and each tool's
arguments are grammars of their own, which the rules name by ``@``. In Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from ...runtime.constraints import structural_tags
from ...runtime.constraints.json_checks import Beginning, JSONChecks, unwrap, wrap
from ...runtime.constraints.lark import Terms, as_parts, in_regex, joined_parts
from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import Grammar
from ..fields.grammars import JSON_OPTIONS
from ..fields.schema_rewriting import rewrite_schema
from ..reasoning_parsers.output_parser import ReasoningParser
from ..tool_parsers.pieces import ToolParser, ToolSpec
from .tools import Choice
from .written_arguments import WrittenArguments

NAME = "the form of the answer"
"""The grammar's name in messages, where no single field sets it."""

_KEYS = re.compile(r'"[^"]*"(?=:)')

_ANY_OBJECT = json.dumps({"type": "object"})


class AnswerGrammar:
    """Builds the grammar of one answer."""

    def __init__(
        self,
        tools: type[ToolParser] | None,
        thoughts: type[ReasoningParser] | None,
        special: Mapping[str, int],
    ) -> None:
        """special: text -> id of the tokens that no other spelling stands for."""
        self._tools, self._thoughts = tools, thoughts
        self._special = special
        self._terms = Terms(special)
        self._rules: list[str] = []
        self._parts: dict[str, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        """Numbers of the tools, by name."""
        self._written: dict[int, str] = {}
        """The first rule of the arguments of each tool that are not one JSON object."""

    def build(
        self, form: Grammar | None, specs: Sequence[ToolSpec], choice: Choice, forced: str, *, inside: bool
    ) -> Grammar | None:
        """The grammar, or None where the answer is free. form: of the text. specs: the tools that may be called.
        forced: what the answer was made to begin with, up to the call's name or its arguments. inside: it begins inside
        of a thought."""
        if self._tools is None:
            specs = ()
        checks: JSONChecks | None = None
        tries: tuple[str, ...] = ()
        if forced:
            body = self._rest_of_calls(specs, choice)
        elif form is not None:
            source, checks = unwrap(form.source)
            if structural_tags.is_structural(source):
                tries = structural_tags.item_tries(source)
                source = structural_tags.build(source, self._special)
            body = f"{self._answer_start} {self._part('format', source)}"
            if specs and choice.kind != "none":
                body = f"({self._calls(specs, choice)} | {body})"
        elif any(spec.strict for spec in specs) and choice.kind != "none":
            body = self._text_and_calls(specs, choice)
        else:
            return None
        thought = "" if forced else self._thought(inside)
        lark = "\n".join([f"start: {thought} {body}", *self._rules])
        source = structural_tags.with_items(joined_parts(lark, self._parts), tries)
        if checks is not None:
            source = wrap(source, checks._replace(beginning=self._beginning(inside)))
        return Grammar(form.name if form is not None else NAME, source)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _calls(self, specs: Sequence[ToolSpec], choice: Choice) -> str:
        """One call, or several, with all that stands around them."""
        tools = self._tools
        assert tools is not None
        if tools.call_start.startswith("{"):
            return self._objects(specs, choice)
        first = f"{self._terms.text(tools.call_start)} {self._call(specs)}"
        return f"{first} {self._more_calls(specs, choice)}"

    def _objects(self, specs: Sequence[ToolSpec], choice: Choice) -> str:
        """Calls that are JSON objects with nothing around them. As schemas, so that they share their first characters
        with those of the wanted form: lexers do not go back."""
        tools = self._tools
        assert tools is not None and tools.next_call is not None
        name_key, arguments_key = (json.loads(part) for part in _KEYS.findall(tools.call_start + tools.name_end))
        for number, spec in enumerate(specs):
            arguments = json.loads(arguments_source(json.dumps(spec.parameters), spec.strict))
            schema = arguments["grammars"][0]["json_schema"]
            options = schema.pop("x-guidance")
            definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
            properties = {name_key: {"const": spec.name}, arguments_key: schema}
            whole = {"type": "object", "properties": properties, "required": [name_key, arguments_key]}
            whole |= {"additionalProperties": False, "x-guidance": options, **definitions}
            self._parts[f"call_{number}"] = {"json_schema": whole}
        call = "(" + " | ".join(f"@call_{number}" for number in range(len(specs))) + ")"
        between = self._terms.text(tools.next_call.partition("{")[0].strip())
        return f"{call} ({between} / ?/ {call})*" if choice.parallel else call

    def _rest_of_calls(self, specs: Sequence[ToolSpec], choice: Choice) -> str:
        """From the name of the first call on; from its arguments on, where it is known."""
        assert self._tools is not None
        named = next((spec for spec in specs if spec.name == choice.name), None)
        first = (
            self._call(specs) if named is None else f"{self._arguments(named)} {self._terms.text(self._tools.call_end)}"
        )
        # One function was asked for by name: it is called once.
        return f"{first} {self._more_calls(specs, Choice(parallel=choice.parallel and named is None))}"

    def _more_calls(self, specs: Sequence[ToolSpec], choice: Choice) -> str:
        tools = self._tools
        assert tools is not None
        end = self._terms.text(tools.calls_end)
        if not choice.parallel or tools.next_call is None:
            return end
        return f"({self._terms.text(tools.next_call)} {self._call(specs)})* {end}"

    def _call(self, specs: Sequence[ToolSpec]) -> str:
        """A call from its name to its end."""
        assert self._tools is not None
        if not any(rule.startswith("call:") for rule in self._rules):
            self._rules.append("")  # its place: the arguments add rules of their own
            at = len(self._rules) - 1
            calls = [f"{self._terms.text(spec.name + self._tools.name_end)} {self._arguments(spec)}" for spec in specs]
            self._rules[at] = f"call: ({' | '.join(calls)}) {self._terms.text(self._tools.call_end)}"
        return "call"

    def _arguments(self, spec: ToolSpec) -> str:
        assert self._tools is not None
        number = self._numbers.setdefault(spec.name, len(self._numbers))
        if self._tools.arguments_form == "json":
            source = arguments_source(json.dumps(spec.parameters), spec.strict)
            return f"/ ?/ {self._part(f'arguments_{number}', source)}"
        if number not in self._written:
            written = WrittenArguments(spec, number)
            written = written.as_python() if self._tools.arguments_form == "python" else written.as_tags()
            self._written[number] = written.start
            self._rules += written.rules
            for name, source in written.parts.items():
                self._part(name, source)
        return self._written[number]

    def _text_and_calls(self, specs: Sequence[ToolSpec], choice: Choice) -> str:
        """Text in which each mark of a call begins a call."""
        tools = self._tools
        assert tools is not None
        calls = self._calls(specs, choice)
        self._rules.append(r"TEXT: /(?s:.*)/")
        if self._answer_start:
            return f"({calls} | {self._answer_start} TEXT)"
        mark = self._terms.marks.match(tools.call_start)
        if mark is None and not tools.marks_calls:
            first = re.escape(tools.call_start[0])
            self._rules.append(rf"PLAIN: /([^{first}](?s:.*))?/")
            return f"({calls} | PLAIN)"
        opening = mark[0] if mark is not None else tools.call_start.split("\n")[0]
        rest = calls.removeprefix(self._terms.text(tools.call_start)).strip()
        after = self._terms.text(tools.call_start.removeprefix(opening))
        before = "text_to_call"
        if mark is not None:
            before = f"TEXT {self._terms.text(opening)}"
        else:
            self._rules.append(rf"text_to_call[lazy]: /(?s:.*){in_regex(opening)}/")
        called = f"{before} {after} {rest}"
        return f"({called})* TEXT" if choice.parallel else f"({called} | TEXT)"

    # -- thoughts -----------------------------------------------------------------------------------------------------

    def _thought(self, inside: bool) -> str:
        thoughts = self._thoughts
        if thoughts is None:
            return ""
        if self._terms.marks.fullmatch(thoughts.end):
            self._rules.append(f"thought: THOUGHT {self._terms.text(thoughts.end)}\nTHOUGHT: /(?s:.*)/")
        else:
            self._rules.append(rf"thought[lazy]: /(?s:.*){in_regex(thoughts.end)}/")
        after = self._terms.text(thoughts.resumes.partition(thoughts.end)[2].strip("\n"))
        ended = f"thought {after} /\\n{{0,2}}/"
        return ended if inside else f"({self._terms.text(thoughts.start)} {ended})?"

    def _beginning(self, inside: bool) -> Beginning:
        """How the text begins."""
        thoughts = self._thoughts
        if thoughts is None:
            return Beginning()
        if thoughts.answer_start:
            return Beginning(thoughts.answer_start.encode())
        mark = thoughts.end + thoughts.resumes.partition(thoughts.end)[2].strip("\n")
        return Beginning(mark.encode(), b"" if inside else thoughts.start.encode())

    @property
    def _answer_start(self) -> str:
        return self._terms.text(self._thoughts.answer_start) if self._thoughts is not None else ""

    # -- parts --------------------------------------------------------------------------------------------------------

    def _part(self, name: str, source: str) -> str:
        """A grammar in llguidance's form as a part of this one."""
        self._parts |= as_parts(source, name)
        return f"@{name}"


@lru_cache(maxsize=512)
def arguments_source(parameters: str, strict: bool) -> str:
    """The grammar of a tool's arguments, from the JSON text of their schema. Without strict, keywords that cannot be
    enforced are passed over; where nothing of a schema can be, the arguments are any object."""
    schema = json.loads(parameters) or {"type": "object"}
    schema = schema if "type" in schema or "$ref" in schema or "anyOf" in schema else {"type": "object", **schema}
    options = JSON_OPTIONS | ({} if strict else {"lenient": True, "coerce_one_of": True})
    try:
        schema = rewrite_schema(schema)
    except (ValueError, RecursionError) as error:
        if strict:
            raise RequestRefused(f"tools: {error}", code="invalid_grammar", param="tools") from None
    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        if strict or not LLMatcher.validate_grammar(source):
            return source
    except ValueError as error:  # nested too deeply for its reader
        if strict:
            raise RequestRefused(f"tools: {error}", code="invalid_grammar", param="tools") from None
    return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=JSON_OPTIONS)
