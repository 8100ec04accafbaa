"""A conversation with tools for the agents of others: the tools, the model's words, and what each turn may compute.

The words are played by `scripted_worker`; prompts, cache and usage are the server's own. Every answer hangs on the last
tool result or question of its prompt, so an agent that runs the right tools goes through `REQUESTS` requests, whatever
it adds to the prompt itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TurnUsage:
    """Tokens of one request, as its client was told. prompt: all of it, cached included."""

    prompt: int
    cached: int
    output: int


CITIES = {"Ada": "Zürich", "Bo": "Bern"}
WARMTH = {"Zürich": 21, "Bern": 8}


def city_of(person: str) -> str:
    """Where a person lives."""
    return f"{person} lives in {CITIES[person]}"


def temperature(city: str, unit: str) -> str:
    """How warm it is."""
    return f"{WARMTH[city]} °{unit} in {city}"


def wind(city: str) -> str:
    """How strong the wind is."""
    return f"wind of {WARMTH[city]} km/h in {city}"


Tools = dict[str, Callable[..., str]]
"""By name."""

TOOLS: Tools = {tool.__name__: tool for tool in (city_of, temperature, wind)}


def arguments_schema(tool: Callable[..., str]) -> dict[str, Any]:
    """JSON schema of a tool's arguments."""
    names = [each for each in tool.__annotations__ if each != "return"]
    properties = {each: {"type": "string"} for each in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def call(name: str, **arguments: str) -> str:
    """A call in the model's words."""
    words = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{words}\n</tool_call>"


QUESTIONS = ["How warm is it where Ada lives?", "And where Bo lives?"]
ANSWERS = ["It is 21 °C in Zürich, with a little wind.", "It is 8 °C in Bern."]
SCRIPT = [
    [QUESTIONS[0], "Let me see.\n" + call("city_of", person="Ada")],
    ["lives in Zürich", call("temperature", city="Zürich", unit="C") + "\n" + call("wind", city="Zürich")],
    ["km/h in Zürich", ANSWERS[0]],
    [QUESTIONS[1], call("city_of", person="Bo")],
    ["lives in Bern", "Bern it is.\n\n" + call("temperature", unit="C", city="Bern")],
    ["°C in Bern", ANSWERS[1]],
]
REQUESTS = len(SCRIPT)


BEHIND_TOOLS = (1, 2, 4, 5)
"""Requests that bring the results of tools; the others bring what a user says."""


def recomputed(turns: list[TurnUsage]) -> list[int]:
    """By turn, the tokens it computed beyond those it may, 0 for the first. Every other turn may compute what is new in
    it, and one token more.

    new = prompt − (previous prompt + previous answer), and prompt − cached ≤ new + 1: the last token of an answer is
    sampled and never computed, so that its KV is missing at the next turn.
    """
    found = [0]
    for before, turn in itertools.pairwise(turns):
        new = turn.prompt - (before.prompt + before.output)
        assert new > 0, f"{turn} does not extend {before}"
        found.append(max(0, turn.prompt - turn.cached - (new + 1)))
    return found
