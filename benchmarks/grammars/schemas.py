"""JSON schemas of the kind that tool definitions and OpenAPI documents hold, and values that fulfil them, from a seed.

A third of the schemas are the arguments of a tool, a third are records with nested objects and lists, a third are
documents with ``$defs``, of which some refer to themselves. All have the keywords that real ones have: descriptions,
defaults, enums, formats, limits, patterns, optional properties, alternatives with a discriminator.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]

NOUNS = (
    "account", "address", "amount", "author", "category", "channel", "city", "color", "comment", "company", "contact",
    "country", "currency", "customer", "device", "discount", "document", "duration", "event", "filter", "folder",
    "invoice", "item", "label", "language", "location", "message", "method", "model", "note", "option", "order",
    "owner", "payment", "person", "policy", "price", "product", "profile", "project", "query", "quantity", "range",
    "reason", "region", "report", "resource", "result", "role", "route", "schedule", "service", "shipment", "source",
    "status", "subject", "summary", "target", "team", "ticket", "title", "unit", "user", "value", "vendor", "version",
)  # fmt: skip

VERBS = ("archive", "cancel", "create", "delete", "export", "fetch", "import", "list", "merge", "move", "search",
         "send", "submit", "sync", "update", "upload", "validate")  # fmt: skip

ENDINGS = ("", "_id", "_name", "_type", "_count", "_at", "_url", "_code", "_list", "_key")

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please send the report to the finance team before Friday, thanks!",
    "Order #4711 was shipped on Monday; the customer asked for \"express delivery\".",
    "Ein Café in München, 12 % günstiger als im Vorjahr.",
    "See https://example.org/docs?page=2&sort=asc for details.",
    "Line one\nLine two\twith a tab",
    "東京都千代田区丸の内",
    "def area(radius): return 3.14159 * radius ** 2",
    "N/A",
    "Maria González-Ortiz",
)  # fmt: skip

FORMATS = {
    "date": ("2026-02-28", "1999-12-31"),
    "date-time": ("2026-02-28T23:59:59Z", "2025-07-04T08:15:30.250+02:00"),
    "time": ("08:15:30Z", "23:59:59+01:00"),
    "email": ("maria.gonzalez@example.org", "support@mail.example.com"),
    "uuid": ("3fa85f64-5717-4562-b3fc-2c963f66afa6", "00000000-0000-4000-8000-000000000001"),
    "uri": ("https://example.org/a/b?c=1", "urn:isbn:0451450523"),
    "ipv4": ("192.168.0.1", "8.8.8.8"),
    "hostname": ("example.org", "db-1.internal.example.com"),
}

PATTERNS = {
    r"^[A-Z]{2}-[0-9]{4,6}$": ("AB-1234", "ZX-987654"),
    r"^#[0-9a-f]{6}$": ("#00ff7f", "#123abc"),
    r"^[a-z][a-z0-9_]{2,15}$": ("order_42", "abc"),
    r"^(\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}$": ("+49 555-0199", "555-0123"),
}


@dataclass
class _Maker:
    """The schemas of one document, and what they have in common."""

    rng: random.Random
    defs: dict[str, Schema] = field(default_factory=dict)

    def name(self) -> str:
        return self.rng.choice(NOUNS) + self.rng.choice(ENDINGS)

    def annotated(self, schema: Schema) -> Schema:
        if self.rng.random() < 0.6:
            return {"description": f"The {self.name()} of the {self.name()}, if there is one.", **schema}
        return schema

    def text(self) -> Schema:
        rng = self.rng
        kind = rng.random()
        if kind < 0.5:
            return {"type": "string"}
        if kind < 0.65:
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.choice((20, 64, 255))}
        if kind < 0.9:
            return {"type": "string", "format": rng.choice(list(FORMATS))}
        return {"type": "string", "pattern": rng.choice(list(PATTERNS))}

    def number(self) -> Schema:
        rng = self.rng
        schema: Schema = {"type": rng.choice(("integer", "integer", "number"))}
        if rng.random() < 0.5:
            schema["minimum"] = rng.choice((0, 1, -90))
        if rng.random() < 0.4:
            schema["maximum"] = rng.choice((10, 100, 65535))
        if schema["type"] == "integer" and rng.random() < 0.1:
            schema["multipleOf"] = 5
        return schema

    def choice(self) -> Schema:
        values = self.rng.sample(NOUNS, self.rng.randrange(2, 9))
        if self.rng.random() < 0.1:
            return {"const": values[0]}
        return {"type": "string", "enum": values} if self.rng.random() < 0.8 else {"enum": [*values, None]}

    def leaf(self) -> Schema:
        made = self.rng.choices(
            (self.text, self.number, self.choice, lambda: {"type": "boolean"}), weights=(5, 3, 3, 1)
        )[0]()
        if made.get("type") in ("string", "integer") and "enum" not in made and self.rng.random() < 0.12:
            return {"anyOf": [made, {"type": "null"}]}
        return made

    def value(self, depth: int) -> Schema:
        roll = self.rng.random()
        if depth <= 0 or roll < 0.6:
            return self.annotated(self.leaf())
        if self.defs and roll < 0.7:
            return {"$ref": f"#/$defs/{self.rng.choice(list(self.defs))}"}
        if roll < 0.85:
            return self.annotated(self.array(depth - 1))
        if roll < 0.9:
            return self.annotated(self.tagged(depth - 1))
        return self.annotated(self.object(depth - 1))

    def array(self, depth: int) -> Schema:
        made: Schema = {"type": "array", "items": self.value(depth)}
        if self.rng.random() < 0.4:
            made["minItems"] = self.rng.randrange(3)
        if self.rng.random() < 0.4:
            made["maxItems"] = self.rng.randrange(3, 20)
        return made

    def tagged(self, depth: int) -> Schema:
        """Alternatives that a property tells apart."""
        alternatives = []
        for kind in self.rng.sample(NOUNS, self.rng.randrange(2, 4)):
            made = self.object(depth, most=3)
            made["properties"] = {"kind": {"const": kind}, **made["properties"]}
            made["required"] = ["kind", *made.get("required", [])]
            alternatives.append(made)
        return {self.rng.choice(("anyOf", "oneOf")): alternatives}

    def object(self, depth: int, most: int = 8) -> Schema:
        rng = self.rng
        names = list(dict.fromkeys(self.name() for _ in range(rng.randrange(1, most + 1))))
        properties = {name: self.value(depth) for name in names if name != "kind"}
        made: Schema = {"type": "object", "properties": properties}
        required = [name for name in properties if rng.random() < 0.7]
        if required:
            made["required"] = required
        if rng.random() < 0.7:
            made["additionalProperties"] = False
        elif rng.random() < 0.3:
            made["additionalProperties"] = {"type": "string"}
        optional = [name for name in properties if name not in required]
        if len(optional) >= 2 and rng.random() < 0.15:
            made["dependentRequired"] = {optional[0]: [optional[1]]}
        return made


def make_schema(rng: random.Random, kind: int) -> Schema:
    """kind: 0 for a tool's arguments, 1 for a record, 2 for a document with ``$defs``."""
    maker = _Maker(rng)
    if kind == 0:
        schema = maker.object(1, most=7)
        title = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    elif kind == 1:
        schema = maker.object(3)
        title = rng.choice(NOUNS).capitalize()
    else:
        for name in rng.sample(NOUNS, rng.randrange(2, 6)):
            made = maker.object(1, most=6)
            if rng.random() < 0.3:
                made["properties"]["children"] = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}}
            maker.defs[name] = made
        schema = maker.object(2)
        schema["properties"]["entries"] = {
            "type": "array",
            "items": {"$ref": f"#/$defs/{rng.choice(list(maker.defs))}"},
        }
        schema["$defs"] = maker.defs
        title = f"{rng.choice(NOUNS).capitalize()}List"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def make_schemas(count: int, seed: int) -> list[Schema]:
    return [make_schema(random.Random(f"{seed} {number}"), number % 3) for number in range(count)]


def make_document(schema: Schema, seed: int) -> Any:
    """A value that fulfils a schema of `make_schemas`, as JSON has it."""
    return _value(schema, schema, random.Random(seed), 6)


def make_text(schema: Schema, seed: int) -> str:
    """The same as text, with a space behind each comma and colon."""
    return json.dumps(make_document(schema, seed), ensure_ascii=False)


def _value(schema: Schema, root: Schema, rng: random.Random, depth: int) -> Any:
    if "$ref" in schema:
        return _value(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, rng, depth - 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _value(rng.choice(schema[key]), root, rng, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return _object(schema, root, rng, depth)
        case "array":
            least = schema.get("minItems", 0)
            most = min(schema.get("maxItems", 3), 3) if depth > 0 else least
            return [_value(schema["items"], root, rng, depth - 1) for _ in range(rng.randint(least, max(least, most)))]
        case "string":
            return _text(schema, rng)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    low = schema.get("minimum", 0)
    high = schema.get("maximum", low + 20_000)
    step = schema.get("multipleOf", 1)
    whole = rng.randint(-(-low // step), high // step) * step
    return whole if schema["type"] == "integer" or whole >= high else whole + rng.choice((0.5, 0.25, 0.125))


def _object(schema: Schema, root: Schema, rng: random.Random, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    chosen = {name for name in schema["properties"] if name in required or (depth > 0 and rng.random() < 0.6)}
    for name, others in schema.get("dependentRequired", {}).items():
        if name in chosen:
            chosen |= set(others)
    return {name: _value(each, root, rng, depth - 1) for name, each in schema["properties"].items() if name in chosen}


def _text(schema: Schema, rng: random.Random) -> str:
    if "format" in schema:
        return rng.choice(FORMATS[schema["format"]])
    if "pattern" in schema:
        return rng.choice(PATTERNS[schema["pattern"]])
    text = " ".join(rng.sample(SENTENCES, rng.choice((1, 1, 1, 2))))
    return text[: schema.get("maxLength", len(text))]
