"""Seeded conversations in both languages, and the catalogue of items.

python -m baton.examples.toy_model.make_data --count 5            prints conversations
python -m baton.examples.toy_model.make_data --catalogue PATH     writes the catalogue as JSON
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from .agent_language import agent_conversation
from .conversation import Conversation
from .recommendation_language import CATALOGUE, recommendation_conversation

HELD_OUT_SEED = 1_000_000
"""The conversations that models are judged on; training streams have small seeds."""

LONG_SHARE = 0.04
"""One conversation in 25 is long (up to about 1,500 tokens), so that far positions are trained as well."""


def conversation(seed: int, index: int) -> Conversation:
    """Conversation ``index`` of the stream ``seed``: agent and recommendation by turns, each drawn on its own."""
    rng = random.Random(f"{seed}/{index}")
    long = rng.random() < LONG_SHARE
    if index % 2 == 0:
        return agent_conversation(rng, rounds=rng.randint(4, 8) if long else None, max_listing=40 if long else 12)
    return recommendation_conversation(rng, max_history=200 if long else 60)


def conversations(seed: int, count: int, start: int = 0) -> Iterator[Conversation]:
    """Conversations ``start`` to ``start + count`` of a stream; two seeds share nothing but the languages."""
    return (conversation(seed, index) for index in range(start, start + count))


def catalogue_json() -> str:
    """Every item with its name, category and three tokens, one item a line."""
    items = [
        {"name": item.name, "category": item.category, "tokens": item.tokens} for ring in CATALOGUE for item in ring
    ]
    return "[\n" + ",\n".join("  " + json.dumps(item) for item in items) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print generated conversations, or write the catalogue.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=4, help="conversations to print")
    parser.add_argument("--catalogue", type=Path, help="write the catalogue to this file instead")
    args = parser.parse_args()
    if args.catalogue:
        args.catalogue.write_text(catalogue_json())
        return
    for item in conversations(args.seed, args.count):
        print(item.render())


if __name__ == "__main__":
    main()
