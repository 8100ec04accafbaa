"""Two-stage recommendation: a history of items, a thought that names its pattern, then the next item.

An item is three codes, coarse to fine: ``<s_a_i>`` (half a category), ``<s_b_j>`` (the adjective of its name) and
``<s_c_k>`` (the noun). 320 of the 32 x 32 x 32 triples exist. The items of a category form a ring, and a user moves
along it: mostly one item ahead, sometimes two or three. So the next item is a distribution over a few items of one
category, which gives beam search something to rank. The shape (thought, then semantic ids) is that of OneRec.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .conversation import ITEM_END, ITEM_START, THINK_END, THINK_START, Conversation, Message
from .words import vocabulary

CATEGORIES = (
    "mystery novels", "garden tools", "space films", "jazz records", "board games", "baking pans", "hiking boots",
    "history books", "puzzle apps", "desk lamps", "running shoes", "tea blends", "city maps", "folk songs",
    "robot kits", "cat toys",
)  # fmt: skip
ADJECTIVES = vocabulary(
    "silent golden hidden little broken frozen crimson ancient gentle bright wild quiet sunny secret royal lazy brave "
    "early final giant happy humble lonely lucky modern noble pale proud rapid rough simple smooth"
)
NOUNS = vocabulary(
    "harbor garden mountain castle ocean valley comet orchard village temple canyon desert glacier lagoon marsh "
    "prairie summit cavern island forest tower bridge mill lighthouse fountain meadow cliff brook delta dune grove "
    "ridge"
)

ITEMS_PER_CATEGORY = 20
CODES_PER_LEVEL = 32
STEPS, STEP_WEIGHTS = (1, 2, 3), (0.7, 0.2, 0.1)
"""How far a user moves along the ring of a category, and how often."""

CATALOGUE_SEED = 7


@dataclass(frozen=True, slots=True)
class Item:
    """``codes``: (a, b, c), each in [0, 32). ``position``: place on the ring of its category."""

    codes: tuple[int, int, int]
    category: str
    position: int

    @property
    def name(self) -> str:
        return f"{ADJECTIVES[self.codes[1]]} {NOUNS[self.codes[2]]}"

    @property
    def tokens(self) -> tuple[str, str, str]:
        a, b, c = self.codes
        return f"<s_a_{a}>", f"<s_b_{b}>", f"<s_c_{c}>"

    @property
    def text(self) -> str:
        return f"{ITEM_START}{''.join(self.tokens)}{ITEM_END}"


def item_tokens() -> list[str]:
    """All code tokens, level by level, whether an item uses them or not."""
    return [f"<s_{level}_{code}>" for level in "abc" for code in range(CODES_PER_LEVEL)]


def build_catalogue() -> list[list[Item]]:
    """[category][ring position]. Always the same. Category i owns the codes a = 2i and 2i + 1, ten items in each."""
    rng = random.Random(CATALOGUE_SEED)
    catalogue = []
    for index, category in enumerate(CATEGORIES):
        triples = []
        for a in (2 * index, 2 * index + 1):
            for b in rng.sample(range(CODES_PER_LEVEL), 5):
                triples += [(a, b, c) for c in rng.sample(range(CODES_PER_LEVEL), 2)]
        rng.shuffle(triples)
        catalogue.append([Item(codes, category, position) for position, codes in enumerate(triples)])
    return catalogue


CATALOGUE = build_catalogue()
ITEMS = {item.codes: item for ring in CATALOGUE for item in ring}


ITEM_PATTERN = re.escape(ITEM_START) + r"<s_a_(\d+)><s_b_(\d+)><s_c_(\d+)>" + re.escape(ITEM_END)
"""A regular expression: an item in a text, whether it exists or not; its groups are the codes."""


def item_codes(text: str) -> list[tuple[int, int, int]]:
    """The codes of all items in a text, in order."""
    return [(int(a), int(b), int(c)) for a, b, c in re.findall(ITEM_PATTERN, text)]


def likely_items(item: Item) -> list[Item]:
    """Where a user may go from ``item`` within its category, the likeliest first."""
    ring = CATALOGUE[CATEGORIES.index(item.category)]
    return [ring[(item.position + step) % len(ring)] for step in STEPS]


def next_item(rng: random.Random, item: Item) -> Item:
    """Where one user goes from ``item``."""
    return rng.choices(likely_items(item), STEP_WEIGHTS)[0]


class _Walk:
    """One user's position in each category; the first visit starts anywhere."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last: dict[int, Item] = {}

    def visit(self, category: int) -> Item:
        last = self._last.get(category)
        item = self._rng.choice(CATALOGUE[category]) if last is None else next_item(self._rng, last)
        self._last[category] = item
        return item


def recommendation_conversation(rng: random.Random, max_history: int = 60) -> Conversation:
    """One recommendation. max_history: items in the longest history (5 tokens each)."""
    walk, length = _Walk(rng), rng.randint(8, rng.randint(10, max_history))
    main, other = rng.sample(range(len(CATEGORIES)), 2)
    pattern = rng.choice(("steady", "moved", "by turns"))
    if pattern == "steady":
        plan = [rng.randrange(len(CATEGORIES)) if rng.random() < 0.15 else main for _ in range(length - 4)] + [main] * 4
    elif pattern == "moved":
        recent = rng.randint(4, length // 2)
        plan = [other] * (length - recent) + [main] * recent
    else:
        plan = [main if (length - place) % 2 == 0 else other for place in range(length)]
    history = [walk.visit(category) for category in plan]
    answer = walk.visit(main)

    think = rng.random() < 0.8
    thought = _thought(pattern, history, CATEGORIES[main], CATEGORIES[other])
    opening = rng.choice(("You recommend items.", "You are a recommender.", "You recommend the next item to a user."))
    ask = rng.choice(("What comes next?", "Recommend the next item.", "Which item should we show?"))
    lead = rng.choice(("The user looked at", "History of the user", "Items seen so far"))
    messages = [
        Message("system", f"{opening} {'Think first.' if think else 'Answer with the item only.'}"),
        Message("user", f"{lead}: {''.join(item.text for item in history)}\n{ask}"),
        Message("assistant", f"{THINK_START}{thought}{THINK_END}\n{answer.text}" if think else answer.text),
    ]
    return Conversation("recommendation", messages, {"category": CATEGORIES[main], "pattern": pattern})


def _thought(pattern: str, history: list[Item], main: str, other: str) -> str:
    """The last four items in words, the pattern, and the category that comes next."""
    items = "".join(f" {item.category}: {item.name}." for item in history[-4:])
    reason = {
        "steady": "The interest is steady.",
        "moved": f"The interest has moved on from {other}.",
        "by turns": f"These are {main} and {other} by turns.",
    }[pattern]
    return f"The last items are{items} {reason} Next come {main}."


def named_category(thought: str) -> str | None:
    """The category a thought ends with, None if it names none."""
    for category in CATEGORIES:
        if thought.rstrip().endswith(f"Next come {category}."):
            return category
    return None
