"""`python -m baton.entrypoints.simulate`: play agents' jobs on the scheduler, and compare policies. See
docs/simulator.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..program import run_program
from .arguments import cells, parse, plans
from .cells import LEGEND, Cell, cells_of, show
from .cost_model import CostError
from .recommend import recommend, say_states
from .study import RunLines, find_peaks, find_states, run_all
from .work.traces import TraceError


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run_program("baton simulate", lambda: simulate(args))
    except (CostError, TraceError, ValueError) as error:
        print(f"baton simulate: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"baton simulate: these jobs are too long for this machine's memory: {error}", file=sys.stderr)
        return 2


def simulate(args: argparse.Namespace) -> int:
    lines = RunLines(args.out / "runs.jsonl" if args.out is not None else None)
    peaks = find_peaks(cells(args), args.minutes, lines, processes=args.jobs) if args.load else {}
    wanted = plans(args, peaks)
    first = [plan for plan in wanted if plan.arm == args.policies[0]]
    states = find_states(first, lines, processes=args.jobs) if args.find_states else []
    found = run_all(wanted, lines, processes=args.jobs, most=args.limit)
    if not found:
        print("no run was made; leave out --limit to make all of them", file=sys.stderr)
        return 1
    compared = cells_of(found)
    show(compared)
    print(LEGEND)
    words = [*recommend(compared), *map(say_states, states)]
    print("\nrecommended for this work on these simulated machines:")
    for line in words:
        print(f"  {line}")
    if len(found) < len(wanted):
        print(f"\n{len(wanted) - len(found)} of {len(wanted)} runs remain; run the same command again")
    if args.out is not None:
        report = {"peaks": peaks, "states": states, "runs": found, "recommended": words}
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(compared, args)
    return 0


def draw(compared: Sequence[Cell], args: argparse.Namespace) -> None:
    try:
        from .cell_plots import plot

        plot(compared, args.out / "report.png")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'baton-serve[bench]')", file=sys.stderr)
        return
    print(f"\nwrote report.json and report.png to {args.out}")


if __name__ == "__main__":
    sys.exit(main())
