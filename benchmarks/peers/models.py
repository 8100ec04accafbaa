"""The models of the comparison, created once: random weights in shapes with known speeds."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.gguf_files import find_ggml, write_gguf
from benchmarks.common.models import LLAMA_40M, LLAMA_TINY, QWEN2_500M, save_random_model, write_tokenizer
from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.engines import ROOT, BatonGGUF, Engine, LlamaCpp, OpenVINO

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {"A": LLAMA_40M, "B": QWEN2_500M, "tiny": LLAMA_TINY}
SMOLLM2 = "SmolLM2"
TITLES = {"A": "A: Llama, 40 M", "B": "B: Qwen2.5-0.5B's shape", "tiny": "tiny: does it run?"}
TITLES |= {SMOLLM2: "SmolLM2: 135 M, trained"}
REAL_MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
"""Where `make real-model` puts it."""


def make_model(name: str, work: Path, real_model: Path = REAL_MODEL) -> Path:
    """The Hugging Face folder of a shape, float32; SmolLM2's is a link to ``real_model``."""
    folder = work / "models" / name
    if name == SMOLLM2:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.unlink(missing_ok=True)
        folder.symlink_to(real_model.absolute(), target_is_directory=True)
    elif not folder.exists():
        part = fresh(folder)
        save_random_model(part, SHAPES[name] | SPECIAL)
        write_tokenizer(part, SHAPES[name]["vocab_size"])
        part.rename(folder)
    return folder


def make_for(engine: Engine, model: Path, dtype: str, llamacpp: str | None) -> None:
    """The form that the engine loads, made by what comes with it. llamacpp: the python of an environment with ggml,
    which quantises. Raises EngineFailed."""
    wanted = engine.weights(model, dtype)
    if wanted.exists():
        return
    if isinstance(engine, OpenVINO):
        part = fresh(wanted)
        export = str(Path(str(engine.python)).with_name("optimum-cli"))
        weights = EXPORTS.get(dtype, ("--weight-format", "fp32"))
        run([export, "export", "openvino", "--model", str(model), *TASK, *weights, str(part)])
        part.rename(wanted)
    elif isinstance(engine, (LlamaCpp, BatonGGUF)):
        wanted.parent.mkdir(exist_ok=True)
        part = wanted.with_suffix(".part")
        try:
            write_gguf(model, part, wanted.stem, find_ggml(llamacpp) if llamacpp else None)
        except ValueError as error:
            raise EngineFailed(str(error)) from None
        part.rename(wanted)


TASK = ("--task", "text-generation-with-past")
EXPORTS = {
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
}
"""Groups of 64: its default of 128 divides neither SmolLM2's rows nor all of B's. The embedding has 8 bits."""


def fresh(folder: Path) -> Path:
    """Where to make it: under its name stands only what is whole."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise EngineFailed(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise EngineFailed(f"{command[0]} ended with status {done.returncode}", done.stderr.splitlines()[-12:])
