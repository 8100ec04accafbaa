"""Serves a tiny model of every architecture, compares it with transformers, and writes the table of supported models.

    python -m benchmarks.models                          all; prints lines as they come, writes JSON
    python -m benchmarks.models --only "Qwen 3" gpt-oss  some
    python -m benchmarks.models --doc                    writes docs/supported_models.md, too

Each model has a process of its own, so that a crash or a hang of one does not end the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.models.checks import COLUMNS
from benchmarks.models.tiny import MODELS, TinyModel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supported_models.md"
DEADLINE_S = 600
"""For the checks of one model, beside others."""

INTRODUCTION = """# Supported models

`python -m benchmarks.models --doc` makes this page: it serves a tiny model of each architecture, with random weights in
float32 on a CPU, and compares it with transformers, token for token. Code `baton` is Baton's own; `transformers` is
transformers' modelling with Baton's attention and KV cache
([how](design/model_and_attention.md#models-that-transformers-computes)), which `--model-impl transformers` forces for
all. Columns: 24 greedy tokens of 5 prompts at pages of 1 and 16, computed in chunks and again from the cache; a
continuation that takes over its parent's KV; one that forks a running parent; a request that gives its KV up and
computes it again; a beam search; KV, and recurrent states, that went to host memory and came back for the next turn.
"""


def run_one(tiny: TinyModel, columns: str) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.models.checks", tiny.name, columns]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"code": "failed", "reason": f"no end within {DEADLINE_S} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"code": "failed", "reason": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def is_served(result: dict[str, Any]) -> bool:
    """True if every column is equal."""
    return result["code"] in ("baton", "transformers") and all(result.get(name, "equal") == "equal" for name in COLUMNS)


def line_of(tiny: TinyModel, result: dict[str, Any]) -> str:
    if result["code"] in ("refused", "failed"):
        return f"{tiny.name:30} {result['code']}: {result['reason']}"
    wrong = [f"{name}: {result[name]}" for name in COLUMNS if result.get(name, "equal") != "equal"]
    return f"{tiny.name:30} {result['code']:13} {'; '.join(wrong) or 'equal'}"


def page_of(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown page."""
    lines = [
        INTRODUCTION,
        f"| model | architecture | code | {' | '.join(COLUMNS)} |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    for tiny in MODELS:
        result = results[tiny.name]
        if result["code"] not in ("refused", "failed"):
            cells = ["yes" if result[name] == "equal" else "**no**" for name in COLUMNS]
            lines.append(f"| {tiny.name} | `{tiny.architecture}` | {result['code']} | {' | '.join(cells)} |")
    lines += ["", "## Refused", "", "| model | architecture | reason |", "|---|---|---|"]
    for tiny in MODELS:
        result = results[tiny.name]
        if result["code"] in ("refused", "failed"):
            reason = " ".join(result["reason"].split("; transformers' code cannot be used either: ")[-1].split())
            lines.append(f"| {tiny.name} | `{tiny.architecture}` | {reason.replace('|', '&#124;')} |")
    served = sum(map(is_served, results.values()))
    return "\n".join([*lines, "", f"{served} of {len(results)} are served.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="models of the table, by name")
    parser.add_argument("--jobs", type=int, default=2, help="models that are checked at the same time (2)")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="checks to make, separated by commas (all)")
    parser.add_argument("--out", default="benchmarks/results", help="folder for models.json")
    parser.add_argument("--doc", action="store_true", help=f"write {PAGE.relative_to(ROOT)}; with all models only")
    args = parser.parse_args()
    unknown = set(args.only) - {tiny.name for tiny in MODELS}
    if unknown or (args.doc and args.only):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}" if unknown else "--doc is for all models")
    chosen = [tiny for tiny in MODELS if not args.only or tiny.name in args.only]
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for tiny, result in zip(chosen, pool.map(lambda tiny: run_one(tiny, args.columns), chosen)):
            results[tiny.name] = result
            print(line_of(tiny, result), flush=True)
    served = sum(map(is_served, results.values()))
    print(f"{served} of {len(results)} served with equal outputs")
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps(results, indent=1))
    if args.doc:
        PAGE.write_text(page_of(results))


if __name__ == "__main__":
    main()
