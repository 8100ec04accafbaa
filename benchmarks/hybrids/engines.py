"""The servers that are compared, each with the same room for KV."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.hybrids.chat import CALM, EDITED, PRESSURE, RESTART, Completions
from benchmarks.peers.engines import DRIVERS, LARGE, VLLM, Baton, Engine, Room

HOST_GIB = 8
"""Room in host memory, behind that for KV: llama.cpp's default."""

VLLM_BLOCK = 128
"""Tokens of a block: its default on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Contender(Engine):
    context: int
    """Tokens that its server has room for."""
    files: Path
    """A folder for what outlives a server."""

    fields: ClassVar[Mapping[str, Any]] = {}
    """Fields of every request of its chats, beside prompt and length."""
    scenarios: ClassVar[tuple[str, ...]] = (CALM, PRESSURE, EDITED)
    """Scenarios in which it is measured."""

    def before_stop(self, completions: Completions) -> None:
        """What its client does before the server is restarted."""

    def after_start(self, completions: Completions) -> None:
        """What its client does once the server has been restarted, before the next turn."""


@dataclass(frozen=True, kw_only=True)
class BatonServer(Baton, Contender):
    extra_flags: ClassVar[tuple[str, ...]] = ()

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        command = [str(self.python), "-m", "baton.entrypoints.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "model", "--dtype", dtype, "--device", "cpu", "--port", str(port)]
        return [*command, "--max-total-tokens", str(self.context), *self.extra_flags]


class BatonLeased(BatonServer):
    """Each answer of the chat is leased until the next turn. By default, leases hold half the pool at most, and the
    chat is larger in the end."""

    name = "baton, leased"
    fields: ClassVar[Mapping[str, Any]] = {"retain_ttl": 600}
    scenarios = (PRESSURE,)
    extra_flags = ("--max-leased-ratio", "0.7")


class BatonHostTier(BatonServer):
    name = "baton, host tier"
    scenarios = (PRESSURE,)
    extra_flags = ("--host-cache-gb", str(HOST_GIB))


class BatonDiskTier(BatonHostTier):
    name = "baton, disk tier"
    scenarios = (RESTART,)

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        command = super().server(model, dtype, port)
        return [*command, "--disk-cache-path", str(self.files / "kv"), "--disk-cache-gb", str(HOST_GIB)]


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Contender):
    name = "llama.cpp"
    flag = "--llamacpp"
    ready_path = "/health"
    scenarios = (CALM, PRESSURE, EDITED, RESTART)

    def settings_of_its_own(self) -> dict[str, Any]:
        return {}

    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        """The command of a server for ``model.gguf`` in the folder; its weights are in the dtype already."""
        settings: dict[str, Any] = {"model": str(model / "model.gguf"), "port": port, "n_ctx": self.context}
        settings |= {"threads": len(os.sched_getaffinity(0)), **self.settings_of_its_own()}
        return [str(self.python), str(DRIVERS / "llama_server.py"), json.dumps(settings)]


class LlamaCppWithoutCache(LlamaCpp):
    """By default, chats that its slot does not hold go to host memory, up to 8 GiB."""

    name = "llama.cpp, no host cache"
    scenarios = (PRESSURE,)

    def settings_of_its_own(self) -> dict[str, Any]:
        return {"cache_ram_mib": 0}


class LlamaCppSavedSlot(LlamaCpp):
    """Its client saves the chat to a file before a restart, and has it restored after that."""

    name = "llama.cpp, slot saved"
    scenarios = (RESTART,)

    def settings_of_its_own(self) -> dict[str, Any]:
        return {"slot_save_path": f"{self.files}{os.sep}"}  # it puts the file's name right behind

    def before_stop(self, completions: Completions) -> None:
        completions.post("/slots/0?action=save", {"filename": "slot"})

    def after_start(self, completions: Completions) -> None:
        completions.post("/slots/0?action=restore", {"filename": "slot"})


@dataclass(frozen=True, kw_only=True)
class VLLMServer(VLLM, Contender):
    def server(self, model: Path, dtype: str, port: int, room: Room = LARGE) -> list[str]:
        command = super().server(model, dtype, port)
        command += ["--max-model-len", str(self.context), "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        return [*command, "--num-gpu-blocks-override", str(self.num_blocks())]

    def num_blocks(self) -> int:
        """As many as one request of that length needs. A block holds the KV of its tokens in six layers, or the states
        of six layers: those of ten layers take two, and a request has two states at a time. One more is never used."""
        return -(-self.context // VLLM_BLOCK) + 2 * 2 + 1


def all_engines(context: int, files: Path, llamacpp: str | None, vllm: str | None) -> list[Contender]:
    """In the order of the table. llamacpp, vllm: the python of an environment, if there is one."""
    ours = (BatonServer, BatonLeased, BatonHostTier, BatonDiskTier)
    theirs = (LlamaCpp, LlamaCppWithoutCache, LlamaCppSavedSlot)
    return [
        *(kind(context=context, files=files) for kind in ours),
        *(kind(python=llamacpp, context=context, files=files) for kind in theirs),
        VLLMServer(python=vllm, context=context, files=files),
    ]
