"""The effect of bfloat16: the same users in float32 and in bfloat16.

    python -m baton.examples.recommend.rounding

A number in bfloat16 has 8 bits. The model's own scores are then right to about one percent, and items that are about
equally likely may change places.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from baton.entrypoints.engine import Engine

from ..toy_model.make_data import HELD_OUT_SEED
from .catalogue import TOY_MODEL, load_catalogue, token_table
from .evaluate import TOP_K, Answer, run_program
from .held_out import User, held_out_users
from .metrics import evaluate
from .program import TRIE

FIRST = 3
"""Likely items per user of this toy language; the others are nearly random."""


def serve(users: Sequence[User], dtype: str) -> list[Answer]:
    with Engine(model_path=str(TOY_MODEL), dtype=dtype, max_total_tokens=16384) as engine:
        engine.load_item_trie(
            TRIE, token_table(load_catalogue(), lambda text: engine.encode(text, add_special_tokens=False))
        )
        return run_program(engine, users, {"temperature": 0.0}, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=200)
    args = parser.parse_args()
    users = held_out_users(args.users, HELD_OUT_SEED)
    exact, rounded = serve(users, "float32"), serve(users, "bfloat16")
    pairs = list(zip(exact, rounded, strict=True))
    shares = {
        "same thought": [a.thought == b.thought for a, b in pairs],
        "same best item": [a.items[0] == b.items[0] for a, b in pairs],
        f"same first {FIRST}, as a set": [set(a.items[:FIRST]) == set(b.items[:FIRST]) for a, b in pairs],
        f"same first {FIRST}, in order": [a.items[:FIRST] == b.items[:FIRST] for a, b in pairs],
        f"same {len(exact[0].items)}, in order": [a.items == b.items for a, b in pairs],
    }
    for name, same in shares.items():
        print(f"{name:26} {sum(same) / len(same):7.1%}")
    print(f"\n{'':26} {'float32':>9} {'bfloat16':>9}")
    targets = [user.targets for user in users]
    both = [evaluate([answer.items for answer in answers], targets, TOP_K) for answers in (exact, rounded)]
    for name, value in both[0].items():
        print(f"{name:26} {value:9.1%} {both[1][name]:9.1%}")
    scores = [abs(a.scores[0] - b.scores[0]) for a, b in pairs if a.items[0] == b.items[0]]
    print(f"\nscores of the best item differ by {max(scores):.3f} at most")


if __name__ == "__main__":
    main()
