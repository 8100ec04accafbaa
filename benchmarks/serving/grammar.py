"""Measures structured output: masks, compilation, steps under constraints and free ones, jump-forward, and peers.

    python -m benchmarks.serving.grammar [PART…] [--models FOLDER…] [--quick] [--cpu-time] [--xgrammar FOLDER]

    step      constrained decodes beside as many free ones, on one engine: a JSON schema of free strings, without and
              with jump-forward, and an item trie, without and with steps that overlap; a search of 512 beams
    masks     time of a mask, and of those of a batch or a search, with one thread and with two
    compile   time to compile 200 schemas, cold and cached
    forward   tokens that jump-forward brings, and the steps that it saves
    peers     the same schemas with llguidance in transformers, and with XGrammar (see benchmarks/grammars/peers.py)

Everything runs in one process; what is compared swaps its order in each repetition, and figures are medians. Schemas
and documents are made from --seed (benchmarks/grammars/schemas.py). --quick has tiny sizes. Prints tables, writes
grammar.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import TOY_MODEL
from benchmarks.grammars import masks, peers, steps
from benchmarks.grammars.schemas import Schema, make_schemas

PARTS = ("step", "masks", "compile", "forward", "peers")

REAL_MODEL = Path(__file__).parents[2] / "build" / "models" / "SmolLM2-135M-Instruct"

QUICK = {
    "schemas": 9,
    "batches": [1, 4],
    "tokens": 20,
    "rounds": 1,
    "mask_steps": 20,
    "threads": [1],
    "beams": 32,
    "beam_tokens": 8,
    "item_tokens": 6,
    "forward_tokens": 48,
    "walks": 1,
}


def measure_step(args: argparse.Namespace, schemas: list[Schema]) -> Any:
    found = []
    for model in args.models:
        cells = steps.measure_steps(
            model, args.batches, args.tokens, args.rounds, args.temperature, args.item_tokens, args.clock
        )
        print(f"\n{model.name}: constrained decodes beside free ones, temperature {args.temperature:g}")
        print(f"{'batch':<7}{'constraint':<12}{'jumps':<7}{'overlap':<9}{'free/s':>9}{'held/s':>9}{'ratio':>8}  spread")
        for cell in cells:
            row = cell.row()
            print(
                f"{cell.batch:<7}{cell.constraint:<12}{_yes(cell.jumps):<7}{_yes(cell.overlap):<9}"
                f"{_median(cell.free):>9.1f}{_median(cell.held):>9.1f}{row['ratio']:>8.3f}"
                f"  {min(cell.ratios):.3f} to {max(cell.ratios):.3f}"
            )
        print(f"goal: {steps.GOAL_RATIO} with 32")
        beams = steps.measure_beams(model, args.beams, args.beam_tokens, args.rounds, args.clock).row()
        print(
            f"{beams['width']} beams, ms per step: {beams['free_ms']:.1f} free, {beams['held_ms']:.1f} with a schema; "
            f"of these {beams['masks_ms']:.2f} masks (p99 {beams['masks_p99_ms']:.2f}), "
            f"{beams['positions_ms']:.2f} next positions, {beams['applied_ms']:.2f} applied to logits",
            flush=True,
        )
        found.append({"model": model.name, "cells": [cell.row() for cell in cells], "beams": beams})
    return found


def measure_masks(args: argparse.Namespace, schemas: list[Schema]) -> Any:
    measured = masks.measure_masks(
        args.models, schemas, args.threads, args.batches, args.beams, args.mask_steps, args.clock
    )
    rows = [times.row() for times in measured]
    print(f"\n{'masks, µs':<32}{'model':<24}{'threads':>8}{'median':>10}{'p99':>10}{'max':>10}")
    for row in rows:
        print(
            f"{row['name']:<32}{row['model']:<24}{row['threads']:>8}{row['median_us']:>10.1f}{row['p99_us']:>10.1f}"
            f"{row['max_us']:>10.1f}"
        )
    print(f"goals: {masks.MASK_GOAL_US:g} for one, {masks.BEAMS_GOAL_US:g} for 512 beams", flush=True)
    return rows


def measure_compile(args: argparse.Namespace, schemas: list[Schema]) -> Any:
    rows = [compiled.row() for compiled in masks.measure_compilation(args.models, schemas)]
    print(f"\n{f'{len(schemas)} schemas, ms':<32}{'model':<24}{'median':>10}{'p99':>10}{'max':>10}")
    for row in rows:
        for name in ("read", "compiled", "cold", "cached"):
            times = [f"{row[name][key] / 1e3:>10.2f}" for key in ("median_us", "p99_us", "max_us")]
            print(f"{name:<32}{row['model']:<24}{''.join(times)}")
        print(f"{row['refused']} refused", flush=True)
    return rows


def measure_forward(args: argparse.Namespace, schemas: list[Schema]) -> Any:
    found = []
    for model in args.models:
        rows = [
            jumped.row()
            for jumped in steps.measure_forward(
                model, schemas, max(args.forward_batch, 1), args.forward_tokens, args.clock
            )
        ]
        print(f"\n{f'jump-forward, {model.name}':<44}{'tokens':>8}{'forced':>8}{'steps saved':>13}{'speed':>7}")
        for row in rows:
            print(
                f"{row['name']:<44}{row['tokens']:>8}{row['forced_share']:>8.1%}{row['steps_saved']:>13.1%}"
                f"{row['plain_seconds'] / row['seconds']:>7.2f}",
                flush=True,
            )
        found.append({"model": model.name, "rows": rows})
    return found


def measure_peers(args: argparse.Namespace, schemas: list[Schema]) -> Any:
    found = []
    for model in args.models:
        rows = [compared.row() for compared in peers.compare(model, schemas, args.walks, args.xgrammar)]
        print(
            f"\n{model.name:<24}{'mask µs':>9}{'p99':>9}{'compile ms':>12}{'p99':>9}{'max':>9}{'refused':>9}"
            f"{'stuck':>7}{'finished':>10}{'invalid':>9}"
        )
        for row in rows:
            print(
                f"{row['peer']:<24}{row['mask_us_median']:>9.1f}{row['mask_us_p99']:>9.1f}"
                f"{row['compile_us_median'] / 1e3:>12.2f}{row['compile_us_p99'] / 1e3:>9.2f}"
                f"{row['compile_us_max'] / 1e3:>9.2f}{row['refused']:>9}{row['refused_documents']:>7}"
                f"{row['finished']:>10}{row['invalid']:>9}"
            )
        speeds: dict[str, list[float]] = {}
        if not args.quick:  # a kernel of llguidance's is compiled
            speeds = peers.compare_generation(model, schemas, 8, args.tokens, args.rounds, args.clock)
            print("batch of 8, tokens/s: " + ", ".join(f"{n} {s:.1f}" for n, s in peers.medians(speeds).items()))
        found.append({"model": model.name, "grammars": rows, "generation": speeds})
    return found


MEASURE = {
    "step": measure_step,
    "masks": measure_masks,
    "compile": measure_compile,
    "forward": measure_forward,
    "peers": measure_peers,
}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all, if none is given")
    parser.add_argument("--models", type=Path, nargs="+", help="folders; the toy model, and SmolLM2 if built")
    parser.add_argument("--seed", type=int, default=0, help="of schemas and documents")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="of each output of step and peers")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the outputs of step")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--beam-tokens", type=int, default=24)
    parser.add_argument("--item-tokens", type=int, default=10, help="of the items of step: 4 ** so many items")
    parser.add_argument("--mask-steps", type=int, default=300, help="of each batch and search")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="that compute masks")
    parser.add_argument("--forward-batch", type=int, default=8)
    parser.add_argument("--forward-tokens", type=int, default=128, help="most of each output")
    parser.add_argument("--walks", type=int, default=2, help="random outputs of each schema")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--xgrammar", type=Path, help="folder with XGrammar's packages")
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of all threads instead of wall time: for a machine that has other work",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, and the toy model alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; the parts are {', '.join(PARTS)}")
    if args.quick:
        vars(args).update(QUICK)
    if args.models is None:
        args.models = [TOY_MODEL, *([REAL_MODEL] if REAL_MODEL.exists() and not args.quick else [])]
    args.parts = args.parts or list(PARTS)
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.torch_threads)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings["models"] = [model.name for model in args.models]
    about = about_this_run("cpu")
    print(f"{about['device']}, {about['cores']} cores, seed {args.seed}")
    args.clock = time.process_time if args.cpu_time else time.perf_counter
    schemas = make_schemas(args.schemas, args.seed)
    report = {**about, **settings, "results": {part: MEASURE[part](args, schemas) for part in args.parts}}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "grammar.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
