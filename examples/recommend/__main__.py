"""Recommends items for one user.

python -m baton.examples.recommend                                  the toy model, in this process
python -m baton.examples.recommend --url http://localhost:30000     a server that serves it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import textwrap
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import Backend, EngineBackend, HttpBackend

from .catalogue import TOY_MODEL, Item, load_catalogue, token_table
from .program import TRIE, recommend

INSTRUCTION = "You recommend items. Think first."
SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Recommend items in two stages.")
    parser.add_argument("--url", help="a server that serves the toy model; default: an Engine in this process")
    url = parser.parse_args().url

    catalogue = load_catalogue()
    boots = [item for item in catalogue if item.category == "hiking boots"]
    novels = [item for item in catalogue if item.category == "mystery novels"]
    history = boots[:5] + novels[3:9]
    question = f"The user looked at: {''.join(map(item_text, history))}\nWhat comes next?"
    with backend(url, catalogue) as running:
        state = recommend.run(instruction=INSTRUCTION, question=question, backend=running, temperature=0)

    show("history", ", ".join(f"{item.name} ({item.category})" for item in history))
    show("thought", state["thought"])
    known = {item.codes: item for item in catalogue}
    items = [known.get(codes) for codes in state["items"]]
    show_items(state["items"], items, state.meta("items"))
    exist = sum(item is not None for item in items)
    show("exist", f"{exist} of {len(items)} ids are in the catalogue of {len(catalogue)}")
    show("stage 1", cost(state.meta("thought")))
    show("stage 2", cost(state.meta("items")[0]))
    if exist < len(items):
        sys.exit("the search named an item that does not exist, despite the trie")


def item_text(item: Item) -> str:
    return f"<|sid_begin|>{item.codes}<|sid_end|>"


@contextlib.contextmanager
def backend(url: str | None, catalogue: Sequence[Item]) -> Iterator[Backend]:
    """An Engine or a server that knows the catalogue; to the program they are the same."""
    if url is None:
        with Engine(model_path=str(TOY_MODEL), max_total_tokens=8192) as engine:
            running = EngineBackend(engine)
            engine.load_item_trie(TRIE, table_for(running, catalogue))
            yield running
    else:
        running = HttpBackend(url)
        file = io.BytesIO()
        np.save(file, table_for(running, catalogue))
        upload = urllib.request.Request(f"{running.url}/item_tries?name={TRIE}", file.getvalue())
        upload.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(upload, timeout=60).close()
        yield running


def table_for(running: Backend, catalogue: Sequence[Item]) -> np.ndarray:
    return token_table(catalogue, lambda text: running.tokenize(text, add_special_tokens=False))


def show_items(ids: Sequence[str], items: Sequence[Item | None], metas: Sequence[dict[str, Any]]) -> None:
    """The first of them; of the others the categories."""
    show("", f"{'score':>7} {'probability':>11}   {'name':16} {'category':16} ids")
    for rank, (codes, item, meta) in enumerate(zip(ids[:SHOWN], items, metas), start=1):
        score = f"{meta['sequence_score']:7.3f} {math.exp(meta['cumulative_logprob']):11.2%}"
        name, category = ("does not exist", "") if item is None else (item.name, item.category)
        show(f"item {rank}", f"{score}   {name:16} {category:16} {codes}")
    rest = Counter("unknown" if item is None else item.category for item in items[SHOWN:])
    show(f"and {len(items) - SHOWN} more", ", ".join(f"{number} {name}" for name, number in rest.most_common()))


def cost(meta: dict[str, Any]) -> str:
    """The server's figures of one stage, as text."""
    came = meta.get("continuation")
    computed = meta["prompt_tokens"] - meta["cached_tokens"]
    text = f"{computed} of {meta['prompt_tokens']} prompt tokens computed"
    if came is None:
        return f"{text}, {meta['completion_tokens']} generated"
    inherited = f"{came['inherited_tokens']} inherited, {came['recomputed_tokens']} of them recomputed"
    return f"{text}; path {came['path']}: {inherited}"


def show(label: str, text: str) -> None:
    """A labelled line, wrapped."""
    for number, line in enumerate(textwrap.wrap(text, 100) or [""]):
        print(f"  {label if number == 0 else '':>11} | {line}")


if __name__ == "__main__":
    main()
