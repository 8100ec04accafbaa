r"""A recommendation in two stages, written as a program: the model thinks, then names an item.

    python examples/two_stage.py                                  the toy model, in this process
    python examples/two_stage.py --url http://localhost:30000     a server that serves it

The second stage continues the first: it takes over the first stage's KV, by a lock handoff, and sends only
`</think>\n<|sid_begin|>`. No token of the prompt or of the thought is computed a second time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import ProgramState, assistant_begin, assistant_end, function, gen, system, user

TOY_MODEL = Path(__file__).parent / "toy_model"


@function
def recommend(s: ProgramState, history: list[dict]) -> None:
    """The program: the model's input and output, top to bottom."""
    s += system("You recommend items. Think first.")
    s += user(f"The user looked at: {''.join(map(item_text, history))}\nWhat comes next?")
    s += assistant_begin()

    # Stage 1 ends at </think>. The tag is no part of the state: stage 2 brings its own.
    s += gen("thought", max_tokens=100, stop="</think>")

    # Stage 2 starts inside an item, so that all that is left to say is its three codes.
    s += "</think>\n<|sid_begin|>"
    s += gen("item", max_tokens=3)

    s += "<|sid_end|>" + assistant_end()


def item_text(item: dict) -> str:
    return f"<|sid_begin|>{''.join(item['tokens'])}<|sid_end|>"


def main() -> None:
    parser = argparse.ArgumentParser(description="Recommend an item in two stages.")
    parser.add_argument("--url", help="a server that serves the toy model; default: an Engine in this process")
    url = parser.parse_args().url

    catalogue = json.loads((TOY_MODEL / "catalogue.json").read_text())
    boots = [item for item in catalogue if item["category"] == "hiking boots"]
    novels = [item for item in catalogue if item["category"] == "mystery novels"]
    with backend(url) as running:
        state = recommend.run(history=boots[:5] + novels[3:9], backend=running, temperature=0)

    show("thought", state["thought"])
    show("item", state["item"])
    names = {"".join(item["tokens"]): f"{item['name']} ({item['category']})" for item in catalogue}
    show("", names.get(state["item"], "no item of the catalogue"))
    for name in ("thought", "item"):
        show(f"cost of {name}", cost(state.meta(name)))


@contextlib.contextmanager
def backend(url: str | None) -> Iterator[Any]:
    """Programs run on an Engine or on a URL; nothing else changes."""
    if url is not None:
        yield url
    else:
        with Engine(model_path=str(TOY_MODEL), max_total_tokens=8192) as engine:
            yield engine


def cost(meta: dict) -> str:
    """The server's figures of one stage, as text."""
    came = meta.get("continuation")
    if came is None:
        return f"{meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} of them from the cache"
    new = meta["prompt_tokens"] - came["inherited_tokens"]
    return (
        f"path {came['path']}: {came['inherited_tokens']} tokens inherited, {came['recomputed_tokens']} of them "
        f"recomputed; {new} new prompt tokens"
    )


def show(label: str, text: str) -> None:
    print(f"  {label:>15} | {text}")


if __name__ == "__main__":
    main()
