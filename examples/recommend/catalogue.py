"""The catalogue of items, and the table of token ids from which an item trie is built.

    python -m baton.examples.recommend.catalogue --output catalogue.npy
    python -m baton.entrypoints.launch_server --model-path examples/toy_model --item-trie catalogue=catalogue.npy

A catalogue is a JSON list of {"name", "category", "tokens"}; ``tokens`` are the codes of the item, one token of the
model's vocabulary each. Only ``tokens`` matters to the server.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.runtime.text.tokenizer import Tokenizer

TOY_MODEL = Path(__file__).parents[1] / "toy_model"
CATALOGUE = TOY_MODEL / "catalogue.json"


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    category: str
    codes: str
    """Its tokens in one string, as a model writes them: <s_a_1><s_b_27><s_c_3>."""
    tokens: tuple[str, ...]


def load_catalogue(path: Path = CATALOGUE) -> list[Item]:
    return [
        Item(entry["name"], entry["category"], "".join(entry["tokens"]), tuple(entry["tokens"]))
        for entry in json.loads(path.read_text())
    ]


def token_table(items: Sequence[Item], tokenize: Callable[[str], list[int]]) -> np.ndarray:
    """int32 [items, longest]: the token ids of each item, shorter ones padded with -1 at the end. tokenize: text to
    ids, without special tokens. Raises ValueError for a code that is not one token of the model."""
    codes = sorted({code for item in items for code in item.tokens})
    ids = tokenize("".join(codes))
    if len(ids) != len(codes):
        wrong = next((code for code in codes if len(tokenize(code)) != 1), codes[0])
        raise ValueError(f"{wrong!r} is {len(tokenize(wrong))} tokens of this model; each code of an item must be one")
    id_of = dict(zip(codes, ids, strict=True))
    table = np.full((len(items), max(len(item.tokens) for item in items)), -1, dtype=np.int32)
    for row, item in enumerate(items):
        table[row, : len(item.tokens)] = [id_of[code] for code in item.tokens]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a catalogue as the .npy file that --item-trie takes.")
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    parser.add_argument("--model-path", type=Path, default=TOY_MODEL, help="the model whose token ids are wanted")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model_path)
    table = token_table(load_catalogue(args.catalogue), lambda text: tokenizer.encode(text, False))
    with args.output.open("wb") as file:  # a name would get a second suffix where it has another than .npy
        np.save(file, table)
    print(f"{args.output}: {len(table)} items of up to {table.shape[1]} tokens")


if __name__ == "__main__":
    main()
