"""The models of the comparison, created once: random weights in shapes with known speeds."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.models import LLAMA_40M, LLAMA_TINY, QWEN2_500M, save_random_model, write_tokenizer
from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.engines import Engine, OpenVINO

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {"A": LLAMA_40M, "B": QWEN2_500M, "tiny": LLAMA_TINY}
TITLES = {"A": "A: Llama, 40 M", "B": "B: Qwen2.5-0.5B's shape", "tiny": "tiny: does it run?"}


def make_model(name: str, work: Path) -> Path:
    """The Hugging Face folder of a shape, float32."""
    folder = work / "models" / name
    if not folder.exists():
        part = fresh(folder)
        save_random_model(part, SHAPES[name] | SPECIAL)
        write_tokenizer(part, SHAPES[name]["vocab_size"])
        part.rename(folder)
    return folder


def make_for(engine: Engine, model: Path) -> None:
    """The form that the engine loads, made by what comes with it. Raises EngineFailed."""
    folder = engine.folder(model)
    if isinstance(engine, OpenVINO) and not folder.exists():
        part = fresh(folder)
        export = str(Path(str(engine.python)).with_name("optimum-cli"))
        run([export, "export", "openvino", "--model", str(model), *EXPORT, str(part)])
        part.rename(folder)


EXPORT = ("--task", "text-generation-with-past", "--weight-format", "fp32")


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
