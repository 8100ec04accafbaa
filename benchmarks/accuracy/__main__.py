"""Accuracy of the formats of weights: perplexity on a text, and divergence from float32.

    python -m benchmarks.accuracy [--model-path build/models/SmolLM2-135M-Instruct] [--llamacpp PYTHON]
                                  [--formats float32 int8 int4 …] [--windows 32] [--length 512] [--text FILE]

The text is Python's documentation of its language (`pydoc_data.topics`). Windows of it, evenly spread, are computed by
the model runner in steps of 128 tokens, each window on its own.

    perplexity     of the tokens of all windows but the first of each
    above          the perplexity over that of float32, in percent, ± the standard error of windows
    KL             divergence of the format's distributions from those of float32, mean over tokens, in nats
    same           share of tokens after which the likeliest token is that of float32

PYTHON is the interpreter of an environment with the package ``xllamacpp``: ggml quantises for Q4_K_M, and llama.cpp
computes the same windows by itself. Without it those formats are left out. GGUF files are written of the model's
folder. Prints a table in Markdown, and writes accuracy.json. Fails if a format does, or misses its goal.

The model of `make real-model` was made of a file in Q4_1, so all its matrices have 16 values in each group of 32
inputs. A format with a minimum for each of these groups keeps them, and one without rounds a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from baton.runtime.config import ModelArgs
from baton.runtime.text.tokenizer import Tokenizer
from benchmarks.accuracy.engines import Baton, LlamaCpp, Predictor
from benchmarks.accuracy.formats import FORMATS, REFERENCE, Format, gguf_path
from benchmarks.accuracy.scores import Reference, Scores
from benchmarks.accuracy.text import read_text, windows
from benchmarks.common.gguf_files import find_ggml, write_gguf
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.peers.models import REAL_MODEL

RESULT = "accuracy.json"
Report = dict[str, Any]


class Measurement:
    """One text, computed in one format after the other; float32 comes first."""

    def __init__(self, model: Path, ids: np.ndarray, work: Path, llamacpp: str | None, reference: Path) -> None:
        """ids: int32 [windows, length]. reference: file for the logprobs of float32."""
        self._model, self._ids, self._work = model, ids, work
        self._ggml = find_ggml(llamacpp) if llamacpp else None
        self._vocab_size: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._reference = Reference(reference, ids.shape[0], ids.shape[1], self._vocab_size)
        self._exact: Scores | None = None

    def why_not(self, wanted: Format) -> str | None:
        """Why a format cannot be measured here; None if it can."""
        if unknown := wanted.unknown_settings():
            return f"this version has no {' and '.join(unknown)}"
        if self._ggml is None and (wanted.by_llama_cpp or wanted.file == "Q4_K_M"):
            return "no --llamacpp names the python of an environment with xllamacpp"
        return None

    def measure(self, wanted: Format) -> dict[str, float]:
        """See `Scores.figures`. Raises ValueError (ModelLoadError is one) where the format cannot be loaded."""
        predictor, found = self._open(wanted), Scores()
        try:
            for number, window in enumerate(tqdm(self._ids, wanted.name, unit="window", disable=None)):
                logprobs = predictor.logprobs(window)[:-1]
                if wanted.name == REFERENCE:
                    self._reference.keep(number, logprobs)
                found.add(torch.from_numpy(window).long(), logprobs, self._reference.read(number))
        finally:
            predictor.close()
        if wanted.name == REFERENCE:
            self._exact = found
        assert self._exact is not None, "float32 comes first"
        return found.figures(self._exact)

    def _open(self, wanted: Format) -> Predictor:
        path, length = self._model, self._ids.shape[1]
        if wanted.file:
            path = gguf_path(self._work, wanted.file)
            if not path.exists():
                part = path.with_suffix(".part")
                write_gguf(self._model, part, wanted.file, self._ggml)
                part.rename(path)
        if wanted.by_llama_cpp:
            assert self._ggml is not None, "asked before"
            return LlamaCpp(self._ggml, path, length, self._vocab_size)
        tokenizer = "" if path.is_dir() else str(self._model)
        return Baton(ModelArgs(model_path=str(path), tokenizer_path=tokenizer, device="cpu", **wanted.settings), length)


def met(wanted: Format, figures: dict[str, float]) -> bool | None:
    """None without a goal."""
    return None if wanted.goal is None else figures["above_percent"] <= wanted.goal


def render(report: Report) -> str:
    """Markdown, aligned; below it what could not be measured."""
    rows = [["format", "perplexity", "above, %", "KL", "same", "goal", ""]]
    rows.append(["---"] + ["---:"] * 4 + ["---"] * 2)
    for name, figures in report["formats"].items():
        wanted = FORMATS[name]
        goal = "" if wanted.goal is None else f"≤ {wanted.goal:g} %"
        verdict = {None: "", True: "met", False: "missed"}[met(wanted, figures)]
        above = f"{figures['above_percent']:+.3f} ± {figures['error_percent']:.3f}"
        cells = [f"{figures['perplexity']:.4f}", above, f"{figures['divergence']:.5f}", f"{figures['same']:.2%}"]
        rows.append([name, *cells, goal, verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    text = report["text"]
    about = f"{report['model']}; {report['windows']} windows of {report['length']} tokens of {text['name']} "
    about += f"({text['characters']} characters, sha256 {text['sha256']}…), Python {report['python']}"
    why = [f"{name}: not measured, {reason}" for name, reason in report["skipped"].items()]
    return "\n".join([*table, "", about, *why, *(f"{name} failed: {why}" for name, why in report["failed"].items())])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=REAL_MODEL, help="a folder with float32 weights")
    parser.add_argument("--llamacpp", type=os.path.abspath, metavar="PYTHON", help="of an environment with xllamacpp")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--text", type=Path, help="a file in place of Python's documentation")
    parser.add_argument("--work-dir", type=Path, default=REAL_MODEL.parents[1] / "accuracy", help="for GGUF files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    if not (args.model_path / "config.json").exists():
        parser.error(f"{args.model_path} has no model: run `make real-model`, or name a folder by --model-path")
    args.formats = [REFERENCE, *(name for name in args.formats if name != REFERENCE)]
    return args


def main() -> None:
    args = parse_arguments()
    text, about_text = read_text(args.text)
    try:
        ids = windows(text, Tokenizer.load(str(args.model_path)), args.windows, args.length)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    report: Report = about_this_run("cpu") | {"model": args.model_path.name, "text": about_text}
    report |= {"windows": args.windows, "length": args.length, "formats": {}, "skipped": {}, "failed": {}}
    work = args.work_dir / args.model_path.name
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="float32-", dir=work) as kept:
        measurement = Measurement(args.model_path, ids, work, args.llamacpp, Path(kept) / "logprobs")
        for name in args.formats:
            began = time.perf_counter()
            if why := measurement.why_not(FORMATS[name]):
                report["skipped"][name] = why
                continue
            try:
                report["formats"][name] = measurement.measure(FORMATS[name])
            except ValueError as error:
                report["failed"][name] = str(error)
            tqdm.write(f"{name}: {report['formats'].get(name, 'failed')} ({time.perf_counter() - began:.0f} s)")
            (args.out / RESULT).write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + render(report))
    missed = [name for name, figures in report["formats"].items() if met(FORMATS[name], figures) is False]
    if missed or report["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
