"""JSON schemas drawn at random, and those of the official test suite."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SUITE_PACKAGE = "jsonschema==4.26.0"
"""Its source archive holds the official test suite."""

_PATTERNS = ("^[a-c]{1,4}$", "^x", "[0-9]+$", r"^\d{2}-\d{2}$", "^(red|green)$", "^$", "a|b")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration", "uri", "unheard-of")
_NAMES = ("a", "b", "c", "name", "größe", 'quo"te', "")
_VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -3, 2.5, "", "x", "red", "é", [], [1], {}, {"a": 1})


class Case(NamedTuple):
    """A schema, and where it is from."""

    origin: str
    schema: Any


class Example(NamedTuple):
    value: Any
    is_valid: bool


class Group(NamedTuple):
    """A schema of the test suite. keyword: what it is about."""

    keyword: str
    description: str
    schema: Any
    examples: list[Example]


def suite(folder: Path) -> list[Case]:
    """The schemas of the required tests of draft 2020-12. folder: keeps the downloaded archive."""
    return [Case(f"{group.keyword}: {group.description}", group.schema) for group in suite_groups(folder)]


def suite_groups(folder: Path) -> list[Group]:
    """The same with their examples."""
    archive = next(folder.glob("jsonschema-*.tar.gz"), None)
    if archive is None:
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, SUITE_PACKAGE], check=True)
        archive = next(folder.glob("jsonschema-*.tar.gz"))
    found = []
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            place = Path(member.name)
            if place.parts[-3:-1] == ("tests", "draft2020-12") and place.suffix == ".json":
                content = files.extractfile(member)
                assert content is not None
                for group in json.load(content):
                    examples = [Example(test["data"], test["valid"]) for test in group["tests"]]
                    found.append(Group(place.stem, group["description"], group["schema"], examples))
    return found


def drawn(number: int, seed: int) -> list[Case]:
    """So many schemas. Most can be fulfilled, and most outputs are short."""
    return [Case(f"seed {seed + i}", _Drawing(random.Random(seed + i)).root()) for i in range(number)]


class _Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = [f"d{number}" for number in range(rng.choice([0, 0, 0, 1, 2]))]

    def root(self) -> Any:
        schema = self.schema(0)
        if self.names and isinstance(schema, dict):
            schema = {**schema, "$defs": {name: self.schema(2) for name in self.names}}
        return schema

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if rng.random() < 0.03:
            return True
        simple: list[Callable[[int], dict[str, Any]]] = [self.string, self.number, self.values, self.word]
        nested = [self.object, self.object, self.object, self.array, self.array, self.alternatives]
        kind = rng.choice(simple if depth > 2 or rng.random() < 0.25 + 0.2 * depth else nested)
        found = kind(depth)
        if self.names and depth and rng.random() < 0.15:
            found = {"$ref": f"#/$defs/{rng.choice(self.names)}"}
        if rng.random() < 0.08:
            found = self.compared(found, depth)
        if rng.random() < 0.1:
            found["description"] = "A value."
        return found

    def maybe(self, share: float = 0.4) -> bool:
        return self.rng.random() < share

    def string(self, _: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        if self.maybe(0.7):
            found["maxLength"] = self.rng.choice([0, 1, 3, 8, 4.0])
        if self.maybe(0.2):
            found["minLength"] = self.rng.randrange(4)
        if self.maybe(0.2):
            found["pattern"] = self.rng.choice(_PATTERNS)
        if self.maybe(0.15):
            found["format"] = self.rng.choice(_FORMATS)
        return found

    def number(self, _: int) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"type": rng.choice(["integer", "integer", "number"])}
        low = rng.choice([-1000, -2.5, 0, 1, 17])
        if self.maybe(0.8):
            found[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self.maybe(0.8):
            found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([1, 4, 99, 12345])
        if self.maybe(0.1):
            found["multipleOf"] = rng.choice([1, 2, 5, 0.5])
        return found

    def values(self, _: int) -> dict[str, Any]:
        if self.maybe():
            return {"const": self.rng.choice(_VALUES)}
        return {"enum": self.rng.sample(_VALUES, self.rng.randrange(1, 5))}

    def word(self, _: int) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"]])}

    def object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = rng.sample(_NAMES, rng.randrange(4))
        found: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        found["required"] = [name for name in names if self.maybe(0.7)]
        kind = rng.random()
        if kind < 0.75:
            found["additionalProperties"] = False
        elif kind < 0.85:
            found |= {"additionalProperties": self.schema(depth + 2), "maxProperties": rng.choice([2, 4])}
        if self.maybe(0.06):
            found["patternProperties"] = {"^p_": self.schema(depth + 2)}
        if self.maybe(0.08):
            found["minProperties"] = rng.randrange(3)
        if self.maybe(0.08) and len(names) > 1:
            found["dependentRequired"] = {names[0]: [names[1]]}
        if self.maybe(0.05) and names:
            found["dependentSchemas"] = {names[0]: self.object(depth + 2)}
        if self.maybe(0.05):
            found["propertyNames"] = rng.choice([{"maxLength": 4}, {"pattern": "^[a-z]+$"}, {"enum": ["a", "name"]}])
        if self.maybe(0.05):
            found["unevaluatedProperties"] = False
        return found

    def array(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"type": "array", "items": self.schema(depth + 1)}
        if self.maybe(0.8):
            found["maxItems"] = rng.randrange(5)
        if self.maybe(0.3):
            found["minItems"] = rng.randrange(3)
        if self.maybe(0.3):
            found["uniqueItems"] = True
        if self.maybe(0.15):
            found["prefixItems"] = [self.schema(depth + 2) for _ in range(rng.randrange(1, 3))]
        if self.maybe(0.1):
            found["contains"] = self.schema(depth + 2)
            if self.maybe():
                found["minContains"] = rng.randrange(3)
            if self.maybe(0.2):
                found["maxContains"] = rng.randrange(1, 3)
        return found

    def alternatives(self, depth: int) -> dict[str, Any]:
        return {self.rng.choice(["anyOf", "anyOf", "oneOf", "allOf"]): [
            self.schema(depth + 1) for _ in range(self.rng.randrange(1, 4))
        ]}  # fmt: skip

    def compared(self, found: dict[str, Any], depth: int) -> dict[str, Any]:
        """With a keyword that says which values there are not."""
        kind = self.rng.randrange(3)
        if kind == 0:
            return {
                **found,
                "not": self.rng.choice([{"type": "null"}, {"const": 1}, {"required": ["a"]}, {"maxLength": 1}]),
            }
        if kind == 1:
            return {**found, "if": {"properties": {"a": {"const": 1}}}, "then": self.object(depth + 2)}
        return {**found, "if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": ["number", "array"]}}
