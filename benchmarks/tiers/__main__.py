"""Measures tiers: how much KV comes back from host memory and disk, how fast, and the cost of keeping it.

    python -m benchmarks.tiers [--only multi_turn] [--plot] [--quick]

    multi_turn     conversations round-robin, four times what the device keeps: share of the reusable tokens found, and
                   TTFT against computing them again
    write_cost     write-through on traffic that fits the device: CPU time of the scheduler's thread, and wall time
    broken_lease   two stages, the lease broken between them: TTFT of stage 2 from the host, handed off, and with no
                   tier
    restart        a shared prompt after a restart; needs a disk tier

Engines run in this process on token ids (those of restart each in one of its own), all weights the same, and take
turns, in reverse order every other round. TTFT is from the call to the first streamed token. A 40 M-parameter Llama of
random weights, float32, on a CPU; matrix products are torch's, since a choice by trial may differ from engine to
engine. benchmarks/core/tier_copies.py compares the speed of copies with a memcpy. Writes tiers.json to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import SHAPES, write_dummy_model
from benchmarks.tiers import broken_lease, multi_turn, restart, write_cost
from benchmarks.tiers.engines import Maker
from benchmarks.tiers.tier_plots import plot

Report = dict[str, Any]
Part = tuple[Callable[[Maker], Coroutine[Any, Any, Report]], Callable[[Report], None]]
"""Measures, and prints what was measured."""


def conversations(args: argparse.Namespace) -> list[Part]:
    works = [
        multi_turn.Conversations(number=8, first=80, user=12, answer=6, turns=3, at_once=at_once, rounds=1)
        if args.quick
        else multi_turn.Conversations(
            number=args.conversations,
            first=args.first_prompt,
            user=64,
            answer=32,
            turns=args.turns,
            at_once=at_once,
            rounds=args.rounds,
        )
        for at_once in args.at_once
    ]
    return [(lambda maker, work=work: multi_turn.measure(maker, work, args.seed), multi_turn.show) for work in works]


def traffic(args: argparse.Namespace) -> list[Part]:
    sizes: dict[str, int] = {"clients": 8, "prompt": 256, "user": 32, "answer": 32, "each": 1, "pairs": args.pairs}
    if args.quick:
        sizes = {"clients": 2, "prompt": 40, "user": 8, "answer": 6, "each": 1, "pairs": 2}
    work = write_cost.Traffic(**sizes)
    return [(lambda maker: write_cost.measure(maker, work, args.seed), write_cost.show)]


def leases(args: argparse.Namespace) -> list[Part]:
    stage1, pairs = (8, 2) if args.quick else (args.stage1_tokens, args.lease_pairs)
    parts: list[Part] = []
    for prompt in [60] if args.quick else args.prompt_lens:
        work = broken_lease.Pair(prompt=prompt, stage1=stage1, suffix=3, stage2=3, pairs=pairs)
        parts.append((lambda maker, work=work: broken_lease.measure(maker, work, args.seed), broken_lease.show))
    return parts


def restarts(args: argparse.Namespace) -> list[Part]:
    shared, rounds = (128, 1) if args.quick else (2000, args.rounds)
    work = restart.Restart(shared=shared, user=16, answer=4, rounds=rounds)
    return [(lambda maker: restart.measure(maker, work, args.seed), restart.show)]


SCENARIOS: dict[str, Callable[[argparse.Namespace], list[Part]]] = {
    "multi_turn": conversations,
    "write_cost": traffic,
    "broken_lease": leases,
    "restart": restarts,
}


async def run(args: argparse.Namespace) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    with tempfile.TemporaryDirectory() as made:
        write_dummy_model(Path(made), SHAPES["llama-tiny" if args.quick else "llama-40m"])
        maker = Maker(
            folder=Path(made),
            page_size=args.page_size,
            linear_backend=args.linear_backend,
            write_policy=args.host_write_policy,
            cprofile=args.cprofile,
        )
        for name in args.only:
            found[name] = []
            for measure, show in SCENARIOS[name](args):
                report = await measure(maker)
                found[name].append(report)
                show(report)
    return found


def show_goals(scenarios: dict[str, list[Report]]) -> None:
    parts = [part for reports in scenarios.values() for part in reports]
    print(f"\n{'goal':<60}{'measured':>20}{'wanted':>10}")
    for goal in (goal for part in parts for goal in part["goals"]):
        wanted = f"{'≥' if goal['at_least'] else '≤'} {goal['goal']:g}"
        measured = f"{goal['value']:.4g}" + (f" ± {goal['half_width']:.2g}" if goal["half_width"] else "")
        print(f"{goal['what']:<60}{measured:>20}{wanted:>10}  {goal['verdict']}")
    for reason in (reason for part in parts for reason in part["skipped"]):
        print(reason)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: does it run?")
    parser.add_argument("--rounds", type=int, default=3, help="of multi_turn and restart")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--first-prompt", type=int, default=1536, help="tokens each conversation begins with")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1], help="conversations that take a turn together")
    parser.add_argument("--pairs", type=int, default=20, help="of write_cost: rounds with and without a tier")
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[500, 3000], help="of broken_lease")
    parser.add_argument("--stage1-tokens", type=int, default=200)
    parser.add_argument("--lease-pairs", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--host-write-policy", default="write_through", help="as of the server")
    parser.add_argument("--linear-backend", default="torch", help="as of the server")
    parser.add_argument("--cprofile", default="", metavar="ENGINE", help="print what its scheduler's thread did")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="also tiers.png")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    about = about_this_run("cpu")  # of the code that runs, and the load before it
    scenarios = asyncio.run(run(args))
    show_goals(scenarios)
    args.out.mkdir(parents=True, exist_ok=True)
    report = about | {"scenarios": scenarios}
    (args.out / "tiers.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.out / "tiers.png")
    print("load average: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
