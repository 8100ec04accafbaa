"""The servers that are compared, each with the same room for KV."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.hybrids.chat import SCENARIOS
from benchmarks.peers.engines import VLLM, Baton, Engine


@dataclass(frozen=True, kw_only=True)
class Contender(Engine):
    context: int
    """Tokens that its server has room for."""

    fields: ClassVar[Mapping[str, Any]] = {}
    """Fields of every request of its chats, beside prompt and length."""
    scenarios = tuple(SCENARIOS)
    """Scenarios in which it is measured."""


@dataclass(frozen=True, kw_only=True)
class BatonServer(Baton, Contender):
    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        command = [str(self.python), "-m", "baton.entrypoints.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "model", "--dtype", dtype, "--device", "cpu", "--port", str(port)]
        return [*command, "--max-total-tokens", str(self.context), "--log-level", "warning"]


class BatonLeased(BatonServer):
    """Each answer of the chat is leased until the next turn. By default, leases hold half the pool at most, and the
    chat is larger in the end."""

    name = "baton, leased"
    fields: ClassVar[Mapping[str, Any]] = {"retain_ttl": 600}
    scenarios = ("under pressure",)

    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        return [*super().server(model, dtype, port), "--max-leased-ratio", "0.7"]


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Contender):
    name = "llama.cpp"
    flag = "--llamacpp"
    ready_path = "/health"
    settings_of_its_own: ClassVar[Mapping[str, Any]] = {}

    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        """The command of a server for ``model.gguf`` in the folder; its weights are in the dtype already."""
        settings: dict[str, Any] = {"model": str(model / "model.gguf"), "port": port, "n_ctx": self.context}
        settings |= {"threads": len(os.sched_getaffinity(0)), **self.settings_of_its_own}
        return [str(self.python), str(Path(__file__).with_name("llama_server.py")), json.dumps(settings)]


class LlamaCppWithoutCache(LlamaCpp):
    """By default, chats that its slot does not hold go to host memory, up to 8 GiB."""

    name = "llama.cpp, no host cache"
    settings_of_its_own: ClassVar[Mapping[str, Any]] = {"cache_ram_mib": 0}
    scenarios = ("under pressure",)


@dataclass(frozen=True, kw_only=True)
class VLLMServer(VLLM, Contender):
    def server(self, model: Path, dtype: str, port: int) -> list[str]:
        command = super().server(model, dtype, port)
        command += ["--max-model-len", str(self.context), "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        return command
