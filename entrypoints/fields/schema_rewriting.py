"""Rewrites JSON schemas for llguidance: keywords that it does not have become ones that it has, with the same meaning.

    dependentRequired, dependentSchemas     anyOf: the name is absent, or what depends on it holds
    if, then, else                          anyOf: if and then; not if, and else
    not                                     the schema of all other values, where there is one
    oneOf                                   anyOf, if no value fulfils two alternatives, or each without the others
    propertyNames                           patternProperties, or properties
    unevaluatedProperties, …Items           additionalProperties, items, where nothing beside them evaluates any
    contains                                prefixItems: the items that it asks for come first, behind given ones
    format of dates, times, hosts, e-mail    pattern
    pattern                                 the same expression as Rust has it (schema_patterns.py)
    limits of numbers                       those that a double holds (schema_numbers.py)

Keywords that compare values are left to a reader of the output (`json_checks`), where there is one. What has no such
form is refused by keyword and place, and never passed over: nothing is enforced in part. An unknown ``format`` is an
annotation, as JSON Schema has it, and is dropped.

Schemas are read on the server's loop, and a short one can become very long: so the work is counted (`Work`), and so are
the characters of what comes out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from ...runtime.constraints.json_checks import LEAST, UNIQUE, comparable, resolve
from .reading import shown
from .schema_numbers import EXACT, Multiples, exact_limits, inexact_value
from .schema_patterns import FORMATS, is_simple, translate_pattern
from .schema_shapes import COUNTS, LIMITS, TYPES, shape_missed

Schema = bool | dict[str, Any]

MAX_DEPTH = 120
"""Most levels of nested schemas."""

MAX_LISTED = 64
"""Items that contains may ask for, and names of minProperties; each is written out."""

MAX_WORK = 8000
"""Schemas that are looked at for one that is read, each as often as it is; some 5 us each."""

MAX_WRITTEN = 300_000
"""Characters of a rewritten schema."""

_FORMATS = frozenset({"duration", "ipv4", "ipv6", "uuid", "uri"})
"""That llguidance enforces."""

_NOT_A_CLIENTS = frozenset({UNIQUE, LEAST, "x-guidance", "contentSchema"})
"""Keywords that are left out: they would be taken for this server's own. The last one is an annotation, but it is
a schema, in which references could end."""

_UNUSUAL = re.compile(r"\\u00(?:[01]|7f)|\d{16}|\de")
"""In JSON: control characters, long numbers, and some that only look so."""

_CONTROL = re.compile(r"[\0-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON has no short escape for."""

_DEFINITION = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")

_ONE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "propertyNames", "contains",
        "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema, a list of schemas, and schemas by name."""

_INSIDE = frozenset({*_ONE, *_LISTS, *_NAMED, "dependencies"})

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies")
"""Keywords that may evaluate properties or items of the same value."""


class UnenforceableError(ValueError):
    """A keyword that cannot be enforced; the message says where it is."""


class Rewritten(NamedTuple):
    """schema: for llguidance. checked: it holds more only together with a reader of the output (json_checks.py)."""

    schema: Schema
    checked: bool


class Work:
    """Work that is left for the schemas of a request, which may share it."""

    def __init__(self, left: int = MAX_WORK) -> None:
        self._left = left

    def take(self, amount: int = 1) -> None:
        """Raises ValueError if there is too little left."""
        self._left -= amount
        if self._left < 0:
            raise ValueError(
                f"it takes more than {MAX_WORK} steps to read; use fewer schemas, and fewer of oneOf, not, if and "
                "contains inside of each other"
            )


def rewrite_schema(schema: Any, work: Work | None = None) -> Schema:
    """The same schema for llguidance. Raises UnenforceableError; ValueError for what is no schema, or takes too long to
    read."""
    return _rewrite(_Rewriter(schema, reads=False, work=work or Work()), schema)


def rewrite_for_reader(schema: Any, work: Work | None = None) -> Rewritten:
    """As `rewrite_schema`, with keywords for a reader of the output."""
    rewriter = _Rewriter(schema, reads=True, work=work or Work())
    found = _rewrite(rewriter, schema)
    if not rewriter.checked:
        return Rewritten(found, False)
    for reference in rewriter.references:
        try:
            resolve(found, reference)
        except LookupError:
            raise UnenforceableError(
                f"{rewriter.checked} cannot be enforced beside $ref to {shown(reference)}; refer to $defs instead"
            ) from None
    return Rewritten(found, True)


def _rewrite(rewriter: _Rewriter, schema: Any) -> Schema:
    rewriter.survey()
    found = rewriter.rewrite(schema, ())
    if rewriter.moved and rewriter.deep_references:
        raise UnenforceableError(
            f"$ref to {rewriter.deep_references[0]} cannot be kept beside {rewriter.moved}; refer to $defs instead"
        )
    is_shared = bool(rewriter.references) or rewriter.is_replaced
    if rewriter.multiples.overflow(is_shared):
        raise UnenforceableError(
            "multipleOf cannot be enforced: the numbers that are multiples of several of them are too large; use "
            "smaller ones, or fewer"
        )
    if rewriter.is_replaced and _written_chars(found, rewriter.written) > MAX_WRITTEN:
        raise ValueError(
            f"it has more than {MAX_WRITTEN} characters once contains, if, not and oneOf are written out; use fewer of "
            "them inside of each other"
        )
    return found


def _written_chars(value: Any, known: dict[int, int]) -> int:
    """At least so many characters has a value as JSON. Parts that it has several times are counted as often, and looked
    at once."""
    if isinstance(value, str):
        return len(value) + 2
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in known:
        inside = value.values() if isinstance(value, dict) else value
        names = sum(map(len, value)) + 3 * len(value) if isinstance(value, dict) else 0
        known[id(value)] = 2 + names + len(value) + sum([_written_chars(each, known) for each in inside])
    return known[id(value)]


class _Rewriter:
    def __init__(self, root: Any, *, reads: bool, work: Work) -> None:
        """reads: a reader of the output holds keywords that compare values."""
        self._root, self._reads, self._work = root, reads, work
        self._read: set[int] = set()
        """id of every schema that was read."""
        self.is_replaced = False
        """A keyword was replaced; so schemas may be written several times."""
        self.written: dict[int, int] = {}
        """id of values that are no schemas -> their characters as JSON."""
        self.multiples = Multiples()
        self.checked = ""
        """A keyword that is left to the reader, and its place."""
        self.references: list[str] = []
        self.moved = ""
        """A keyword for which a schema was moved into an allOf, where pointers no longer find its parts."""
        self.deep_references: list[str] = []
        """References to parts of schemas, other than definitions."""

    # -- one schema ----------------------------------------------------------------------------------------------------

    def survey(self) -> None:
        """Refuse what is no schema, and references to what is none."""
        left: list[tuple[Any, tuple[str, ...], int]] = [(self._root, (), 0)]
        while left:
            schema, place, depth = left.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise ValueError(f"{_at(place)} is {shown(schema)}; a schema is an object, true or false")
            if depth > MAX_DEPTH:
                raise ValueError(f"schemas are nested more than {MAX_DEPTH} deep")
            self._read.add(id(schema))
            for key, value in schema.items():
                if (expected := shape_missed(key, value)) is not None:
                    raise ValueError(f"{key} at {_at(place)} is {shown(value)}; it takes {expected}")
                if key == "$ref":
                    self.references.append(value)
                elif key in _INSIDE:
                    self._work.take(1 if key in _ONE else len(value))
                    left += [(each, (*place, key, *name), depth + 1) for name, each in _parts(key, value)]
        for reference in self.references:
            self._check_reference(reference)

    def _check_reference(self, reference: str) -> None:
        """Refuse a reference to a value that only looks like a schema; such a value is not checked."""
        base, _, pointer = reference.partition("#")
        if not pointer.startswith("/"):
            return
        try:
            found = resolve(self._root, "#" + unquote(pointer))
        except LookupError:
            found = None  # llguidance refuses it
        if base not in ("", self._root.get("$id")) or (isinstance(found, dict) and id(found) not in self._read):
            raise UnenforceableError(f"$ref to {shown(reference)} cannot be followed; refer to $defs instead")

    def rewrite(self, schema: Schema, place: tuple[str, ...]) -> Schema:
        if isinstance(schema, bool):
            return schema
        inner: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NOT_A_CLIENTS:
                continue
            if key in COUNTS and isinstance(value, float):
                value = int(value)
            inner[key] = self._inside(key, value, (*place, key))
        if not inner.keys().isdisjoint(LIMITS):
            _hold_limits(inner, place)
        if inner.keys().isdisjoint(_REPLACED):
            return inner
        self.is_replaced = True
        more: list[Schema] = []
        for key, replace in _REPLACED.items():
            if key in inner:
                found = replace(self, inner, place, schema)
                more += [] if found is None else [found]
        if not more:
            return inner
        self.moved = self.moved or next(key for key in schema if key in _REPLACED)
        shared = {key: inner.pop(key) for key in ("$defs", "definitions", "$id", "$schema", "$anchor") if key in inner}
        return {**shared, "allOf": [inner, *more]} if inner else {**shared, "allOf": more}

    def _inside(self, key: str, value: Any, place: tuple[str, ...]) -> Any:
        if key in _ONE and not _is_list(value):  # as items of draft 7 may be
            return self.rewrite(value, place)
        if key in _LISTS or key == "items":
            return [self.rewrite(each, (*place, str(number))) for number, each in enumerate(value)]
        if key == "patternProperties":
            return self._by_pattern(value, place)
        if key in _NAMED:
            return {name: self.rewrite(each, (*place, name)) for name, each in value.items()}
        if key == "$ref" and not _DEFINITION.fullmatch(value):
            self.deep_references.append(value)
        if key == "dependencies":  # of draft 7
            return {
                name: each if isinstance(each, list) else self.rewrite(each, (*place, name))
                for name, each in value.items()
            }
        if key == "pattern":
            return self._translated(key, value, place[:-1])
        if key == "multipleOf":
            try:
                self.multiples.add(value)
            except ValueError as error:
                raise _refused(key, place[:-1], str(error)) from None
        if isinstance(value, list | dict):
            text = json.dumps(value)
            self.written[id(value)] = len(text)
            if key in ("const", "enum") and _UNUSUAL.search(text):
                _check_values(key, value, place[:-1])
        elif key == "const":
            _check_values(key, value, place[:-1])
        return value

    def _by_pattern(self, schemas: dict[str, Any], place: tuple[str, ...]) -> dict[str, Schema]:
        found: dict[str, Schema] = {}
        for name, each in schemas.items():
            pattern = self._translated("patternProperties", name, place[:-1])
            inner = self.rewrite(each, (*place, name))
            found[pattern] = _both(found[pattern], inner) if pattern in found else inner
        return found

    def _translated(self, keyword: str, pattern: str, place: tuple[str, ...]) -> str:
        self._work.take(0 if is_simple(pattern) else len(pattern) // 5)
        try:
            return translate_pattern(pattern)
        except ValueError as error:
            raise _refused(keyword, place, f"in {shown(pattern)} {error}") from None

    # -- keywords: each takes its own out of ``inner`` and returns what holds beside it --------------------------------

    def _dependent_required(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        self._work.take(2 * len(inner["dependentRequired"]))
        return _all(_depends(name, {"required": names}) for name, names in inner.pop("dependentRequired").items())

    def _dependent_schemas(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        return _all(_depends(name, each) for name, each in inner.pop("dependentSchemas").items())

    def _dependencies(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        found = inner.pop("dependencies")
        self._work.take(2 * len(found))
        return _all(
            _depends(name, {"required": each} if isinstance(each, list) else each) for name, each in found.items()
        )

    def _if(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        test, then, other = inner.pop("if"), inner.pop("then", True), inner.pop("else", True)
        if then is True and other is True:
            return None
        against = self._negated(test, inner, (*place, "if"))
        return {"anyOf": [_both(test, then), _both(against, other)]}

    def _alone(self, inner: dict, place: tuple[str, ...], _: dict) -> None:
        """then and else without if say nothing."""
        inner.pop("then", None)
        inner.pop("else", None)

    def _not(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        return self._negated(inner.pop("not"), inner, (*place, "not"))

    def _one_of(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        every = inner.pop("oneOf")
        if self._are_all_apart(every):
            return {"anyOf": every}
        alone = []
        for at, one in enumerate(every):
            others = [other for number, other in enumerate(every) if number != at and not self._are_apart(one, other)]
            against = [self._negated(other, {}, (*place, "oneOf")) for other in others]
            alone.append(_all([one, *against]))
        return {"anyOf": alone}

    def _property_names(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        names, free = inner.pop("propertyNames"), inner.get("additionalProperties", True)
        if names is True or names == {}:
            return None
        if names is False:
            return {"maxProperties": 0}
        keys = names.keys() - {"type", "title", "description"} if isinstance(names, dict) else set()
        if not isinstance(names, dict) or names.get("type", "string") != "string" or "patternProperties" in inner:
            raise _refused("propertyNames", place)
        if keys <= {"enum", "const"} and keys:
            allowed = names.get("enum", [names.get("const")])
            known = inner.pop("properties", {})
            inner["properties"] = {name: known.get(name, free) for name in allowed if isinstance(name, str)}
            inner["additionalProperties"] = False
            listed = {name for name in allowed if isinstance(name, str)}
            return _all({"properties": {name: False}} for name in known if name not in listed)
        if keys <= {"pattern"} and "properties" not in inner:
            if keys:
                inner["patternProperties"], inner["additionalProperties"] = {names["pattern"]: free}, False
            return None
        if keys <= {"minLength", "maxLength"} and "properties" not in inner:
            pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            inner["patternProperties"], inner["additionalProperties"] = {pattern: free}, False
            return None
        raise _refused("propertyNames", place)

    def _unevaluated_properties(self, inner: dict, place: tuple[str, ...], given: dict) -> None:
        self._unevaluated("unevaluatedProperties", "additionalProperties", inner, place, given)

    def _unevaluated_items(self, inner: dict, place: tuple[str, ...], given: dict) -> None:
        self._unevaluated("unevaluatedItems", "items", inner, place, given)

    def _unevaluated(self, keyword: str, instead: str, inner: dict, place: tuple[str, ...], given: dict) -> None:
        value = inner.pop(keyword)
        if value is True or instead in inner:
            return
        if any(key in given for key in _IN_PLACE) or (keyword == "unevaluatedItems" and "contains" in given):
            raise _refused(keyword, place)
        inner[instead] = value

    def _unique_items(self, inner: dict, place: tuple[str, ...], _: dict) -> None:
        if inner.pop("uniqueItems") is True and not _most(inner.get("maxItems")) <= 1:
            if not self._reads:
                raise _refused("uniqueItems", place)
            inner[UNIQUE] = True
            self.checked = self.checked or f"uniqueItems at {_at(place)}"

    def _contains(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        test = inner.pop("contains")
        least, most = inner.pop("minContains", 1), inner.pop("maxContains", None)
        if least == 0 and most is None:
            return None
        if test is True or test == {}:
            return {"minItems": least} | ({} if most is None else {"maxItems": most})
        if test is False:
            return _without_array(least)
        if not _is_count(least) or not (most is None or _is_count(most)) or isinstance(inner.get("items"), list):
            raise _refused("contains", place)
        if most is not None and most < least:
            return _without_array(1)
        first, rest = [*inner.get("prefixItems", ())], inner.get("items", True)
        # Behind the given items, unless there is no room.
        skipped = 0 if rest is False or len(first) + least > _most(inner.get("maxItems")) else len(first)
        asked, last = skipped + least, skipped + (least if most is None else most)
        first += [rest] * (last - len(first))
        self._work.take(len(first))
        first[skipped:asked] = [_both(each, test) for each in first[skipped:asked]]
        if most is not None:
            against = self._negated(test, {}, (*place, "contains"))
            first[:skipped] = [_both(each, against) for each in first[:skipped]]
            first[last:] = [_both(each, against) for each in first[last:]]
            inner["items"] = _both(rest, against)
        inner["prefixItems"] = first
        return {"minItems": skipped + least} if least else None

    def _no_contains(self, inner: dict, place: tuple[str, ...], _: dict) -> None:
        """minContains and maxContains without contains say nothing."""
        inner.pop("minContains", None)
        inner.pop("maxContains", None)

    def _format(self, inner: dict, place: tuple[str, ...], _: dict) -> Schema | None:
        name = inner["format"]
        if name in _FORMATS:
            return None
        del inner["format"]
        if name not in FORMATS:
            return None
        pattern, longest = FORMATS[name]
        if longest is not None:
            inner["maxLength"] = min(longest, inner.get("maxLength", longest))
        if "pattern" in inner:
            return {"pattern": pattern}
        inner["pattern"] = pattern
        return None

    def _min_properties(self, inner: dict, place: tuple[str, ...], _: dict) -> None:
        """A name may be written twice where names are free, and then counts once."""
        least = inner["minProperties"]
        if len(set(inner.get("required", ()))) >= _most(least):
            del inner["minProperties"]
        elif inner.get("additionalProperties", True) is not False or inner.get("patternProperties"):
            if not self._reads or not _is_count(least):
                raise _refused("minProperties", place, "names that are not listed may be written twice")
            inner[LEAST] = least
            self.checked = self.checked or f"minProperties at {_at(place)}"

    def _dynamic(self, inner: dict, place: tuple[str, ...], _: dict) -> None:
        raise _refused("$dynamicRef", place)

    # -- the schema of all other values --------------------------------------------------------------------------------

    def _negated(self, schema: Schema, beside: Mapping[str, Any], place: tuple[str, ...]) -> Schema:
        """beside: keywords that hold for the same value; they tell which values there are."""
        if isinstance(schema, bool):
            return not schema
        schema = {key: value for key, value in schema.items() if key not in ("title", "description", "$comment")}
        if not schema:
            return False
        parts = [self._negated_keyword(key, schema, beside, place) for key in schema if key not in _WITH_OTHERS]
        found = [part for part in parts if part is not None]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _negated_keyword(
        self, key: str, schema: dict[str, Any], beside: Mapping[str, Any], place: tuple[str, ...]
    ) -> Schema | None:
        """Values that this keyword of a schema excludes."""
        self._work.take()
        value = schema[key]
        if key in _OPPOSITE and abs(value) >= EXACT:
            raise _refused("not", place, f"the values that {key} excludes begin beyond 2**53")
        match key:
            case "type":
                return _other_types(value, place)
            case "const":
                return self._other_values([value], beside, place)
            case "enum":
                return self._other_values(value, beside, place)
            case "required":
                return {"type": "object", "anyOf": [{"properties": {name: False}} for name in value]}
            case "properties":
                known = beside.get("properties")
                known = known if isinstance(known, Mapping) else {}
                excluded: list[Schema] = []
                for name, each in value.items():
                    other = known.get(name)
                    other = other if isinstance(other, Mapping) else {}
                    against = self._negated(each, other, (*place, "properties", name))
                    excluded.append({"type": "object", "properties": {name: against}, "required": [name]})
                return {"anyOf": excluded} if excluded else False
            case "allOf":
                return {"anyOf": [self._negated(each, beside, place) for each in value]}
            case "anyOf":
                return _all(self._negated(each, beside, place) for each in value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return {"type": "number", _OPPOSITE[key]: value}
            case "minLength" | "minItems" | "minProperties":
                kind, opposite = _COUNTED[key]
                return {"type": kind, opposite: value - 1} if _most(value) > 0 else False
            case "maxLength" | "maxItems":
                kind, opposite = _COUNTED[key]
                return {"type": kind, opposite: value + 1}
        key = {UNIQUE: "uniqueItems", LEAST: "minProperties"}.get(key, key)
        raise _refused("not", place, f"the values that {key} excludes cannot be described")

    def _other_values(self, values: list, beside: Mapping[str, Any], place: tuple[str, ...]) -> Schema:
        if "const" in beside or "enum" in beside:
            known = beside.get("enum", [beside.get("const")])
            self._work.take(sum(self.written.get(id(beside.get(key)), 0) for key in ("const", "enum")) // 30)
            excluded = set(map(comparable, values))
            left = [each for each in known if comparable(each) not in excluded]
            return {"enum": left} if left else False
        numbers = sorted({value for value in values if type(value) in (int, float)})
        if any(abs(number) >= EXACT for number in numbers):
            raise _refused("not", place, "numbers beyond 2**53 cannot be excluded")
        kinds = beside.get("type", list(TYPES))
        kinds = _widened([kinds] if isinstance(kinds, str) else kinds)
        if any(_type_of(value) in kinds for value in values if isinstance(value, str | list | dict)):
            raise _refused("not", place, "only some of the values that there are can be excluded, by enum or const")
        apart = {"boolean", "null", *(["number"] if numbers else ())}
        left: list[Schema] = [{"type": [kind for kind in TYPES if kind not in apart]}]
        left += [{"const": value} for value in (None, True, False) if all(each is not value for each in values)]
        if numbers:
            left += [{"type": "number", "exclusiveMaximum": numbers[0]}]
            left += [
                {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
                for low, high in itertools.pairwise(numbers)
            ]
            left += [{"type": "number", "exclusiveMinimum": numbers[-1]}]
        return {"anyOf": left}

    # -- alternatives --------------------------------------------------------------------------------------------------

    def _are_all_apart(self, schemas: Sequence[Schema]) -> bool:
        """True if it is certain that no value fulfils two. The usual ways to tell many apart take no comparison of each
        with each."""
        self._work.take(len(schemas) // 2)
        by_kind: dict[str, list[Schema]] = defaultdict(list)
        for schema in map(self._followed, schemas):
            kinds = _types_of(schema) if isinstance(schema, dict) else TYPES if schema else ()
            for kind in kinds:
                by_kind[kind].append(schema)
        return all(self._are_apart_in(kind, group) for kind, group in by_kind.items())

    def _are_apart_in(self, kind: str, schemas: Sequence[Schema]) -> bool:
        """`_are_all_apart` for values of one type."""
        found = [schema for schema in schemas if isinstance(schema, dict)]
        if len(schemas) < 2 or (len(found) == len(schemas) and _lists_apart(found)):
            return True
        if kind == "object" and len(found) == len(schemas):
            names = set.intersection(*(set(each.get("required", ())) for each in found))
            for name in sorted(names):
                self._work.take(len(found))
                inner = [self._followed(each.get("properties", {}).get(name, True)) for each in found]
                if _lists_apart(inner):
                    return True
        return all(self._are_apart(one, other) for at, one in enumerate(schemas) for other in schemas[:at])

    def _are_apart(self, one: Schema, other: Schema) -> bool:
        """True if it is certain that no value fulfils both."""
        one, other = self._followed(one), self._followed(other)
        self._work.take(1 + (_count_names(one) + _count_names(other)) // 8)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        kinds, others = _types_of(one), _types_of(other)
        if not kinds & others:
            return True
        if _values_of(one) is not None and _values_of(other) is not None:
            return _lists_apart([one, other])
        if kinds & others != {"object"}:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        properties, other_properties = one.get("properties", {}), other.get("properties", {})
        return (
            any(self._are_apart(properties.get(name, True), other_properties.get(name, True)) for name in shared)
            or _lacks(one, other)
            or _lacks(other, one)
        )

    def _followed(self, schema: Schema) -> Schema:
        """What a schema that is nothing but a reference refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            self._work.take()
            found: Any = self._root
            steps = schema["$ref"][1:].strip("/").split("/") if schema["$ref"].startswith("#") else []
            for step in steps:
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, Mapping) and step else found
            if found is self._root or not isinstance(found, dict | bool):
                return schema
            schema = found
        return schema


_REPLACED: dict[str, Callable[[_Rewriter, dict, tuple[str, ...], dict], Schema | None]] = {
    "format": _Rewriter._format,
    "uniqueItems": _Rewriter._unique_items,
    "minProperties": _Rewriter._min_properties,
    "unevaluatedProperties": _Rewriter._unevaluated_properties,
    "unevaluatedItems": _Rewriter._unevaluated_items,
    "propertyNames": _Rewriter._property_names,
    "dependentRequired": _Rewriter._dependent_required,
    "dependentSchemas": _Rewriter._dependent_schemas,
    "dependencies": _Rewriter._dependencies,
    "contains": _Rewriter._contains,
    "minContains": _Rewriter._no_contains,
    "maxContains": _Rewriter._no_contains,
    "if": _Rewriter._if,
    "then": _Rewriter._alone,
    "else": _Rewriter._alone,
    "not": _Rewriter._not,
    "oneOf": _Rewriter._one_of,
    "$dynamicRef": _Rewriter._dynamic,
}

_WITH_OTHERS = ("$defs", "definitions", "default", "examples")

_OPPOSITE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTED = {
    "minLength": ("string", "maxLength"),
    "maxLength": ("string", "minLength"),
    "minItems": ("array", "maxItems"),
    "maxItems": ("array", "minItems"),
    "minProperties": ("object", "maxProperties"),
}


def _depends(name: str, schema: Schema) -> Schema:
    return {"anyOf": [{"properties": {name: False}}, _both({"required": [name]}, schema)]}


def _both(one: Schema, other: Schema) -> Schema:
    return _all([one, other])


def _all(schemas: Iterable[Schema]) -> Schema:
    every = [schema for schema in schemas if schema is not True]
    return every[0] if len(every) == 1 else {"allOf": every} if every else True


def _without_array(least: int) -> Schema:
    """No item fulfils false: arrays with so many that do are there only for 0."""
    return True if least == 0 else {"type": [kind for kind in TYPES if kind != "array"]}


def _other_types(given: Any, place: tuple[str, ...]) -> Schema:
    kinds = [given] if isinstance(given, str) else given
    if "integer" in kinds and "number" not in kinds:
        raise _refused("not", place, "numbers that are no integers cannot be described")
    left = [kind for kind in TYPES if kind not in kinds]
    return {"type": left} if left else False


def _lacks(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Does one exclude a property that the other requires?"""
    properties = one.get("properties", {})
    if any(properties.get(name) is False for name in other.get("required", ())):
        return True
    closed = one.get("additionalProperties") is False and not one.get("patternProperties")
    return closed and any(name not in properties for name in other.get("required", ()))


def _types_of(schema: dict[str, Any]) -> set[str]:
    values = _values_of(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    given = schema.get("type")
    return _widened([given] if isinstance(given, str) else given) if given is not None else set(TYPES)


def _widened(kinds: Iterable[str]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in kinds}


def _values_of(schema: dict[str, Any]) -> list | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _count_names(schema: Schema) -> int:
    return len(schema.get("required", ())) if isinstance(schema, dict) else 0


def _lists_apart(schemas: Sequence[Schema]) -> bool:
    """Do they all list their values, and none of them one of another?"""
    seen: set[Any] = set()
    for schema in schemas:
        values = _values_of(schema) if isinstance(schema, dict) else None
        if values is None:
            return False
        found = set(map(comparable, values))
        if not seen.isdisjoint(found):
            return False
        seen |= found
    return True


def _hold_limits(inner: dict[str, Any], place: tuple[str, ...]) -> None:
    try:
        exact_limits(inner)
    except ValueError as error:
        keyword, _, why = str(error).partition(": ")
        raise _refused(keyword, place, why) from None


def _check_values(keyword: str, value: Any, place: tuple[str, ...]) -> None:
    """A value of const or enum."""
    if (number := inexact_value([value])) is not None:
        raise _refused(keyword, place, f"{number} has too many digits for a double; use strings")
    if (text := _text_with_controls(value)) is not None:
        raise _refused(keyword, place, f"{shown(text)} has a control character that JSON writes as a number")


def _text_with_controls(value: Any) -> str | None:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if _CONTROL.search(value):
                return value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return None


def _parts(key: str, value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The schemas in the value of a keyword, and their places in it."""
    if isinstance(value, list):
        return [((str(number),), each) for number, each in enumerate(value)]
    if key in _ONE:
        return [((), value)]
    return [((name,), each) for name, each in value.items() if not isinstance(each, list)]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_LISTED


def _most(value: Any) -> float:
    return value if type(value) in (int, float) else float("inf")


def _at(place: tuple[str, ...]) -> str:
    return "/".join(("#", *place))


def _refused(keyword: str, place: tuple[str, ...], why: str = "") -> UnenforceableError:
    because = f": {why}" if why else ""
    return UnenforceableError(f"{keyword} at {_at(place)} cannot be enforced{because}; leave it out")
