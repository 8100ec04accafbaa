"""Writes the table of keywords in structured_output.md, from the official test suite of JSON Schema.

    python -m docs.schema_suite_table

Each schema of the suite (draft 2020-12, required part) is read as a request's. Where it is not refused, the suite's
examples are checked against its grammar: the values that it calls valid in every order of their properties, the invalid
ones as they stand. An invalid example that the grammar takes is an error, and ends the program. The suite comes with
the source archive of a package, which is downloaded once, into build/schema_suite.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.entrypoints.fields.grammars import take_grammar
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import Grammar
from tests.doubles.byte_matcher import matcher_fails, takes
from tests.doubles.random_schemas import suite_groups

ROOT = Path(__file__).parents[1]
PAGE, SUITE = ROOT / "docs" / "structured_output.md", ROOT / "build" / "schema_suite"
BEGIN, END = "<!-- suite -->\n", "\n<!-- end of suite -->"

MAX_ORDERS = 24


def table() -> str:
    """Raises AssertionError for an invalid example that a grammar takes."""
    counts: dict[str, Counter[str]] = {}
    for group in suite_groups(SUITE):
        found = counts.setdefault(group.keyword, Counter())
        found["schemas"] += 1
        grammar = read(group.schema)
        if grammar is None:
            found["refused"] += 1
            continue
        for example in group.examples:
            kind = "valid" if example.is_valid else "invalid"
            found[kind] += 1
            if example.is_valid:
                found["written"] += any(takes(grammar, text) for text in spellings(example.value))
            else:
                text = json.dumps(example.value)
                assert not takes(grammar, text), f"{group.keyword}: {json.dumps(group.schema)} takes {text}"
    lines = [
        "| of the suite | schemas | refused by name | valid examples that can be written | invalid ones |",
        "|---|---|---|---|---|",
    ]
    for keyword, found in sorted(counts.items()):
        written = f"{found['written']} of {found['valid']}"
        lines.append(f"| {keyword} | {found['schemas']} | {found['refused']} | {written} | 0 of {found['invalid']} |")
    total = sum(counts.values(), Counter())
    lines.append(
        f"| **all** | {total['schemas']} | {total['refused']} | {total['written']} of {total['valid']} | "
        f"0 of {total['invalid']} |"
    )
    return "\n".join(lines)


def read(schema: Any) -> Grammar | None:
    """None for a schema that is refused, when it is read or when it is compiled."""
    try:
        grammar = take_grammar({"json_schema": schema if isinstance(schema, dict) else json.dumps(schema)}, "")
    except RequestRefused:
        return None
    return None if grammar is None or matcher_fails(grammar) else grammar


def spellings(value: Any) -> Iterator[str]:
    """Its JSON in some orders of its properties: outputs have that of the schema."""
    if isinstance(value, dict):
        for order in itertools.islice(itertools.permutations(value), MAX_ORDERS):
            ways = itertools.product(*(list(itertools.islice(spellings(value[name]), MAX_ORDERS)) for name in order))
            for way in itertools.islice(ways, MAX_ORDERS):
                yield "{" + ", ".join(f"{json.dumps(n, ensure_ascii=False)}: {v}" for n, v in zip(order, way)) + "}"
    elif isinstance(value, list):
        ways = itertools.product(*(list(itertools.islice(spellings(item), MAX_ORDERS)) for item in value))
        for way in itertools.islice(ways, MAX_ORDERS):
            yield "[" + ", ".join(way) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    sys.setrecursionlimit(10_000)
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
