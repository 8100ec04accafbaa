"""Structural tags as a grammar: text in which marks begin tags, which hold JSON of a schema, or another form.

The formats, in each other (their names and meaning are XGrammar's; how free text ends is the difficult part):

    text       these characters                  grammar    another grammar: of a schema, a regular expression, …
    free       any text, up to what follows      tag        begin, content, one of some ends
    item       an item of a trie
    sequence   one after the other               triggered  free text in which a trigger begins one of the tags
    either     one of them                       separated  tags with a separator between them

Free text has no end of its own. It ends where the end of the tag around it is first seen, or else with the output; so
it stands at the end of whatever it is part of. Triggers and ends may be special tokens, which only the worker knows: so
the HTTP process reads the formats, and the worker turns them into Lark.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequence_
from typing import Any

import msgspec

from .lark import Terms, as_parts, in_regex, joined_parts


class Text(msgspec.Struct, tag="text", frozen=True):
    """These characters. "": nothing."""

    text: str


class Form(msgspec.Struct, tag="grammar", frozen=True):
    """source: a grammar in llguidance's own form."""

    source: str


class Regex(msgspec.Struct, tag="regex", frozen=True):
    """A text that the whole expression matches. In a tag it ends with the first end behind which it has matched."""

    pattern: str


class Item(msgspec.Struct, tag="item", frozen=True):
    """An item of a trie."""

    trie: str


class Free(msgspec.Struct, tag="free", frozen=True):
    """Any text."""


class Sequence(msgspec.Struct, tag="sequence", frozen=True):
    """One format after the other. Only the last one may be free."""

    parts: tuple[Format, ...]


class Either(msgspec.Struct, tag="either", frozen=True):
    """One of these formats."""

    parts: tuple[Format, ...]


class Repeated(msgspec.Struct, tag="repeated", frozen=True):
    """A format that is not free, several times. most: None for no limit."""

    part: Format
    least: int
    most: int | None


class Tag(msgspec.Struct, tag="tag", frozen=True):
    """ends: one of them follows the content. "": nothing does; the output ends."""

    begin: str
    content: Format
    ends: tuple[str, ...]


class Triggered(msgspec.Struct, tag="triggered", frozen=True):
    """Free text in which each trigger is the beginning of one of the tags."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    begins_with_tag: bool = False
    is_single: bool = False
    """The first tag is the last, and nothing follows it."""


class Separated(msgspec.Struct, tag="separated", frozen=True):
    """Tags and nothing else."""

    tags: tuple[Tag, ...]
    separator: str
    is_optional: bool = True
    is_single: bool = False


Format = Text | Form | Regex | Item | Free | Sequence | Either | Repeated | Tag | Triggered | Separated

KEY = "structural_tag"
"""Begins the source of such a grammar: {"structural_tag": format}."""

MAX_SLOTS = 32
"""Item tries that one grammar may name."""

ITEMS_KEY = "item_tries"
"""Begins the source of a grammar with slots that the HTTP process has built."""

_WITH_ITEMS = f'{{"{ITEMS_KEY}":'

_BEGINNING = f'{{"{KEY}":'


def to_source(format: Format) -> str:
    """The form in which a request carries it to the worker."""
    return _BEGINNING + json.dumps(msgspec.to_builtins(format)) + "}"


def is_structural(source: str) -> bool:
    """Has `to_source` written it?"""
    return source.startswith(_BEGINNING)


def build(source: str, special: Mapping[str, int]) -> str:
    """What `to_source` wrote, in llguidance's own form, with a mark for each slot (`to_llguidance`). special: text ->
    id of the tokens that no other spelling stands for."""
    slots = {name: number for number, name in enumerate(item_tries(source))}
    return _Builder(special, slots).build(_read(source))


def item_tries(source: str) -> tuple[str, ...]:
    """The tries that a grammar names, each once. That with the number n has slot n (item_slots.py)."""
    if source.startswith(_WITH_ITEMS):
        return tuple(json.loads(source)[ITEMS_KEY])
    if not is_structural(source) or '"type": "item"' not in source:
        return ()
    return tuple(dict.fromkeys(_names_of(_read(source))))


def with_items(source: str, tries: Sequence_[str]) -> str:
    """A grammar that `build` wrote, or made a part of, in the form in which a request carries it to the worker. tries:
    those of its slots."""
    return json.dumps({ITEMS_KEY: [*tries], "source": source}) if tries else source


def to_llguidance(source: str, special: Mapping[str, int], first_slot: int) -> str:
    """A grammar as it comes from a request, in llguidance's own form. first_slot: id of the token of slot 0."""
    if is_structural(source):
        source = build(source, special)
    elif source.startswith(_WITH_ITEMS):
        source = json.loads(source)["source"]
    return re.sub(r"<\[slot (\d+)\]>", lambda mark: f"<[{first_slot + int(mark[1])}]>", source)


def _read(source: str) -> Format:
    return msgspec.convert(json.loads(source)[KEY], Format)


def _names_of(format: Format) -> Iterator[str]:
    match format:
        case Item(trie):
            yield trie
        case Sequence(parts) | Either(parts):
            yield from itertools.chain.from_iterable(map(_names_of, parts))
        case Repeated(part) | Tag(_, part):
            yield from _names_of(part)
        case Triggered(_, tags) | Separated(tags):
            yield from itertools.chain.from_iterable(map(_names_of, tags))


def is_free(format: Format) -> bool:
    """Does it end only where something else begins?"""
    match format:
        case Free() | Triggered(is_single=False):
            return True
        case Sequence(parts) | Either(parts):
            return any(map(is_free, parts))
        case Tag(_, content, ends):
            return "" in ends and is_free(content)
        case Repeated(part):
            return is_free(part)
        case Triggered(_, tags) | Separated(tags):
            return any(map(is_free, tags))
    return False


class _Builder:
    """Lexemes and parts of one grammar."""

    def __init__(self, special: Mapping[str, int], slots: Mapping[str, int]) -> None:
        """slots: name of a trie -> number of its slot."""
        self._terms, self._slots = Terms(special), slots
        self._lexemes: dict[str, str] = {}
        """What stands behind the name of a rule -> the name."""
        self._parts: dict[str, dict[str, Any]] = {}

    def build(self, format: Format) -> str:
        start = self._closed(format, ("",))
        rules = [f"{name}{definition}" for definition, name in self._lexemes.items()]
        return joined_parts("\n".join([f"start: {start}", *rules]), self._parts, "tags")

    def _closed(self, format: Format, ends: tuple[str, ...]) -> str:
        """A format and one of these ends behind it."""
        match format:
            case Free():
                return self._up_to(ends)
            case Regex(pattern) if not any(map(self._terms.marks.search, ends)):
                return self._lexeme(f"({_between_slashes(pattern)}){_any_of(ends)}", is_lazy=ends != ("",))
            case Sequence(parts) if parts:
                return " ".join([*map(self._open, parts[:-1]), self._closed(parts[-1], ends)])
            case Either(parts):
                return f"({' | '.join(self._closed(part, ends) for part in parts)})"
            case Tag(begin, content, own_ends) if own_ends == ("",):
                return f"{self._text(begin)} {self._closed(content, ends)}"
            case Triggered(is_single=False):
                return self._triggered(format, ends)
        return f"{self._open(format)} {self._end(ends)}"

    def _open(self, format: Format) -> str:
        """A format that ends of itself."""
        match format:
            case Text(text):
                return self._text(text)
            case Form(source):
                return self._part(source)
            case Regex(pattern):
                return self._lexeme(_between_slashes(pattern))
            case Item(trie):
                return f"<[slot {self._slots[trie]}]>"
            case Sequence(parts):
                return " ".join(map(self._open, parts)) or '""'
            case Either(parts):
                return f"({' | '.join(map(self._open, parts))})"
            case Repeated(part, least, most):
                return self._repeated(self._open(part), least, most)
            case Tag(begin, content, ends):
                return f"{self._text(begin)} {self._closed(content, ends)}"
            case Separated(tags, separator, is_optional, is_single):
                tag = f"({' | '.join(map(self._open, tags))})"
                every = tag if is_single else f"{tag} ({self._text(separator)} {tag})*"
                return f"({every})?" if is_optional else every
            case Triggered(triggers, tags, begins_with_tag, _) if begins_with_tag:
                return f"({' | '.join(map(self._open, tags))})"
            case Triggered(triggers, tags):
                return f"({' | '.join(self._text_and_tags(triggers, tags))})"
        raise AssertionError(f"{format} does not end of itself")

    def _triggered(self, format: Triggered, ends: tuple[str, ...]) -> str:
        """Text and tags, up to one of these ends."""
        tags = f"({' | '.join(self._text_and_tags(format.triggers, format.tags))})*"
        first = f"({' | '.join(map(self._open, format.tags))}) " if format.begins_with_tag else ""
        # A trigger is seen before an end that it begins.
        begun = {end: trigger for trigger in format.triggers for end in ends if end.startswith(trigger)}
        last = [f"{self._up_to((trigger,))} {self._text(end.removeprefix(trigger))}" for end, trigger in begun.items()]
        if others := tuple(end for end in ends if end not in begun):
            last.append(self._up_to(others))
        return f"{first}{tags} ({' | '.join(last)})"

    def _text_and_tags(self, triggers: tuple[str, ...], tags: tuple[Tag, ...]) -> list[str]:
        """For each trigger: text up to it, and the rest of a tag that begins with it."""
        found = []
        for trigger in triggers:
            rests = [
                self._open(Tag(tag.begin.removeprefix(trigger), tag.content, tag.ends))
                for tag in tags
                if tag.begin.startswith(trigger)
            ]
            found.append(f"{self._up_to((trigger,))} ({' | '.join(rests)})")
        return found

    def _up_to(self, ends: tuple[str, ...]) -> str:
        """Any text up to the first of these ends. A lazy lexeme goes before others that could go on."""
        if ends == ("",):
            return self._lexeme("(?s:.*)")
        special = [end for end in ends if self._terms.marks.match(end)]
        plain = tuple(end for end in ends if end not in special)
        ways = [f"{self._lexeme('(?s:.*)')} {self._text(end)}" for end in special]
        if plain:
            ways.append(self._lexeme(f"(?s:.*){_any_of(plain)}", is_lazy=True))
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _end(self, ends: tuple[str, ...]) -> str:
        return f"({' | '.join(map(self._text, ends))})"

    def _repeated(self, part: str, least: int, most: int | None) -> str:
        return f"({part}){{{least},{'' if most is None else most}}}"

    def _text(self, text: str) -> str:
        return self._terms.text(text) or '""'

    def _part(self, source: str) -> str:
        name = f"tag_{len(self._parts)}"
        self._parts |= as_parts(source, name)
        return f"@{name}"

    def _lexeme(self, pattern: str, is_lazy: bool = False) -> str:
        """The name of the rule for an expression."""
        definition = f"{'[lazy]' if is_lazy else ''}: /{pattern}/"
        name = self._lexemes.get(definition)
        if name is None:
            name = self._lexemes[definition] = f"{'text' if is_lazy else 'TEXT'}_{len(self._lexemes)}"
        return name


def _any_of(ends: tuple[str, ...]) -> str:
    return f"({'|'.join(map(in_regex, ends))})" if any(ends) else ""


def _between_slashes(pattern: str) -> str:
    """An expression as it stands between slashes in Lark."""
    found, is_escaped = [], False
    for character in pattern:
        if not is_escaped and character in "/\n":
            found.append(r"\/" if character == "/" else r"\n")
        else:
            found.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(found)
