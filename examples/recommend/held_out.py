"""Users that the toy model has not seen in training, and their likely next items."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from ..toy_model.conversation import ITEM_END, ITEM_START
from ..toy_model.make_data import HELD_OUT_SEED, conversation
from ..toy_model.recommendation_language import ITEMS, item_codes, likely_items


@dataclass(frozen=True, slots=True)
class User:
    instruction: str
    """The system message."""
    question: str
    """The user message, with the history of items."""
    prompt: str
    """Both as the chat template writes them, up to where the assistant begins."""
    targets: list[str]
    """The codes of the likely next items, likeliest first: one, two, three on from the last one of the category that
    comes next, which 70, 20 and 10 % of such users go to."""


def held_out_users(number: int, seed: int = HELD_OUT_SEED) -> list[User]:
    """The first ``number`` users of the stream ``seed`` that ask the model to think."""
    users: list[User] = []
    for index in count():
        if len(users) == number:
            break
        talk = conversation(seed, index)
        if talk.language != "recommendation" or "Think first." not in talk.messages[0].content:
            continue
        instruction, question = (message.content for message in talk.messages[:2])
        history = [ITEMS[codes] for codes in item_codes(question)]
        last = next(item for item in reversed(history) if item.category == talk.facts["category"])
        targets = [item.text.removeprefix(ITEM_START).removesuffix(ITEM_END) for item in likely_items(last)]
        users.append(User(instruction, question, talk.prompts()[0][0], targets))
    return users
