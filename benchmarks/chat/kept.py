"""Measures how much of a conversation's KV is still there at its next turn, while other clients send chats that are
never continued.

    python -m benchmarks.chat.kept [--seeds 2] [--conversations 2] [--flood 12000] [--page-size 1]
    python -m benchmarks.chat.kept --model FOLDER         the same on a server, with text made up of words

There are a few conversations of five turns (three on a server), 20 s apart, and between two turns of each ``--flood``
tokens of one-shot chats. ``plain`` names no job, ``named`` names one (but not its last step). Without a model, Baton's
own scheduler runs with a virtual clock (docs/simulator.md), with step costs roughly like those of the 40 M model of
docs/performance.md on two cores; policies run the same chats, seed by seed. On a server the order is swapped every
round.

kept: share of the tokens of a conversation's last turn that are found in the cache; second: in second turns; later: in
all after those. Prints a table and writes chat_kept.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from baton.entrypoints.simulate.arms import Sender
from baton.entrypoints.simulate.cost_model import Linear
from baton.entrypoints.simulate.simulation import Conditions, Simulation
from baton.entrypoints.simulate.work.job import Job, Turn, numbered
from baton.runtime.pool_sizes import PoolSizes
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.policies.registry import POLICIES
from benchmarks.common.measured import RESULTS, commit
from benchmarks.common.servers import Server

POOL = 8000
AWAY_S = 20.0
WAYS: dict[str, Sender] = {"plain": "plain", "named": "chat"}
COST = Linear(fixed_s=0.008, prompt_token_s=4e-4, decode_row_s=1.5e-3, context_token_s=1.5e-6)

Kept = dict[str, list[int]]
"""second, later: tokens found, and tokens that were there."""


def make_chats(seed: int, conversations: int, flood: int, turns: int = 5) -> list[Job]:
    rng, jobs = np.random.default_rng(seed), []
    for number in range(conversations):
        made: list[Turn] = []
        for turn in range(turns):
            new = rng.integers(400, 800) if not turn else rng.integers(100, 400)
            made.append(Turn(made[-1].known if made else 0, int(new), int(rng.integers(60, 140)), "", AWAY_S))
        jobs.append(Job(f"conversation{number}", 0.5 * number, tuple(made), 0))
    now = 0.5 * conversations + 1.0
    while now < 1.3 * AWAY_S * turns:
        new, output = int(rng.integers(300, 900)), int(rng.integers(40, 120))
        jobs.append(Job(f"one-shot{len(jobs)}", now, (Turn(0, new, output, ""),), 0))
        now += AWAY_S * (new + output) / flood
    return numbered(jobs)


def play(policy: str, sender: Sender, seed: int, args: argparse.Namespace) -> Kept:
    pools = PoolSizes(tokens=POOL - POOL % args.page_size, page_size=args.page_size, bytes_per_token=1)
    config = SchedulerConfig(
        context_length=4096,
        schedule_policy=policy,
        max_queued_requests=0,
        random_seed=seed,
    )
    conditions = Conditions(config=config, cost=COST, pools=pools, sender=sender, max_new_tokens=160, burst=16)
    records = Simulation(make_chats(seed, args.conversations, args.flood), conditions).run()
    found: Kept = {"second": [0, 0], "later": [0, 0]}
    for record in records:
        for number, turn in enumerate(record.turns[1:]):
            count(found["second" if not number else "later"], turn.found, turn.kept)
    return found


def count(kept: list[int], found: int, known: int) -> None:
    kept[0] += min(found, known)
    kept[1] += known


# -- on a server ------------------------------------------------------------------------------------------------------


WORDS = ["count", "the", "lines", "of", "every", "file", "that", "was", "written", "by", "the", "last", "run"]


def words(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(WORDS, k=number))


def ask(server: Server, messages: list[dict[str, str]], **fields: Any) -> dict[str, int]:
    """The usage; the answer is added to the messages."""
    asked = {"messages": messages, "max_tokens": 40, "temperature": 0, **fields}
    answer = server.client.post("/v1/chat/completions", json=asked)
    if answer.status_code != 200:
        raise SystemExit(answer.text)
    messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or ""})
    usage = answer.json()["usage"]
    return {
        "prompt": usage["prompt_tokens"],
        "total": usage["total_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


def talk(policy: str, way: str, seed: int, args: argparse.Namespace) -> Kept:
    flags = ("--max-total-tokens", str(POOL), "--schedule-policy", policy, "--page-size", str(args.page_size))
    server, rng = Server(args.model, flags), random.Random(seed)
    found: Kept = {"second": [0, 0], "later": [0, 0]}
    talks: list[list[dict[str, str]]] = [[] for _ in range(args.conversations)]
    known = [0] * len(talks)
    try:
        for turn in range(3):
            for number, messages in enumerate(talks):
                messages.append({"role": "user", "content": words(rng, 60 if turn else 120)})
                usage = ask(server, messages, **({"job_id": f"talk{number}"} if way == "named" else {}))
                if turn:
                    count(found["second" if turn == 1 else "later"], usage["cached"], known[number] - 1)
                known[number] = usage["total"]
            sent = 0
            while turn < 2 and sent < args.flood:
                sent += ask(server, [{"role": "user", "content": words(rng, rng.randrange(300, 600))}], max_tokens=8)[
                    "total"
                ]
    finally:
        server.close()
    return found


# -- all together -----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    for seed in tqdm(range(args.seeds), desc="Chatting", unit="round", disable=None):
        order = [(policy, way) for policy in args.policies for way in WAYS]
        for policy, way in order if seed % 2 == 0 else reversed(order):
            kept = talk(policy, way, seed, args) if args.model else play(policy, WAYS[way], seed, args)
            lines.append({"policy": policy, "way": way, "seed": seed, **kept})
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    shares: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for line in lines:
        second, later = line["second"], line["later"]
        both = (second[0] + later[0]) / (second[1] + later[1])
        shares[line["policy"], line["way"]].append([both, second[0] / second[1], later[0] / later[1]])
    print(f"{'policy':<16}{'chats':<8}{'kept, %':>9}{'second':>9}{'later':>9}")
    for (policy, way), seeds in sorted(shares.items()):
        print(f"{policy:<16}{way:<8}" + "".join(f"{100 * mean(each):>9.1f}" for each in zip(*seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template: on a server")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=2, help="rounds, each with other chats")
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--flood", type=int, default=12000, help="tokens of one-shots between two turns")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    lines = measure(args)
    show(lines)
    args.out.mkdir(parents=True, exist_ok=True)
    work = {"conversations": args.conversations, "flood": args.flood, "page_size": args.page_size, "pool": POOL}
    report = {"commit": commit(), "work": work | {"model": str(args.model or "")}, "runs": lines}
    (args.out / "chat_kept.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
