"""The runtime settings of an operator. As in scheduler/config.py, each part is one frozen dataclass, and flags are
generated from its fields. entrypoints/server_args.py composes them once; the worker gets them as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..scheduler.config import SchedulerConfig, flag


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Which model to run, in which dtype, on which device."""

    model_path: str = flag("", "Hugging Face folder, or a hub id where there is a network")
    tokenizer_path: str = flag("", "folder with tokenizer.json; default: --model-path")
    load_format: Literal["auto", "dummy"] = flag("auto", "auto: read safetensors; dummy: random weights, no files")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto",
        "weights and KV; auto: the checkpoint's; on a CPU float32, or bfloat16 where both have it and it is faster",
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: cuda where there is one")
    attention_backend: Literal["auto", "torch_native", "flashinfer", "numba"] = flag(
        "auto",
        "auto: FlashInfer on a GPU, Numba's kernels on a CPU; where they do not work, and with torch_native, torch's "
        "own. On a CPU it also says who computes norms, rotations and gates",
    )
    linear_backend: Literal["auto", "torch", "transposed", "onednn", "numba", "widened"] = flag(
        "auto",
        "matrix products on a CPU; auto: the fastest for each shape, tried when the model is loaded, or widened (as "
        "float32) where the processor has no arithmetic for the dtype",
    )
    disable_cuda_graph: bool = flag(False, "launch every kernel by itself, on a CPU too; starts faster, decodes slower")
    cuda_graph_max_bs: int = flag(
        512,
        "largest decode step, in sequences, that runs as a CUDA graph; 0: none. On a CPU: largest recorded step, in "
        "tokens of any kind, 48 at most",
    )
    cuda_graph_max_tokens: int = flag(
        512, "largest extend, in new tokens, that runs as a CUDA graph, on a GPU; 0: none"
    )
    mem_fraction_static: float = flag(
        0.85, "share of free memory for weights and KV pool; on a CPU the pool gets 4 GiB at most unless set by tokens"
    )


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Where KV stays that the device has no room for."""

    host_cache_gb: float = flag(0.0, "host memory for KV that leaves the device, in GiB; 0: none")
    host_cache_ratio: float = flag(0.0, "the same in tokens, as a multiple of the KV pool's; 0: none")
    host_write_policy: Literal["write_through", "write_through_selective", "write_back"] = flag(
        "write_through", "KV goes to the host as soon as it is computed, once it was hit again, or when it is evicted"
    )
    disk_cache_path: str = flag("", "folder for KV that outlives the host's memory and the server; needs a host cache")
    remote_cache_url: str = flag(
        "", "Redis server for KV that servers share, redis://… or rediss://…, or env:NAME of a variable that holds that"
    )
    remote_cache_ttl: int = flag(86400, "seconds for which an unused block stays there; 0: until the server drops it")
    disk_cache_gb: float = flag(0.0, "the most that one model's KV may take of that disk, in GiB")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What is written down of the jobs of agents."""

    tool_history: str = flag("", "file in which the times of tools are kept from one start to the next")
    scheduler_trace: str = flag("", "file that every event of a job is appended to, one JSON object a line")


KVEventForm = Literal["maps", "arrays"]


@dataclass(frozen=True, kw_only=True)
class KVEventConfig:
    """Whom this server tells what its KV cache holds."""

    kv_events_endpoint: str = flag(
        "",
        "address, such as tcp://127.0.0.1:5557 or ipc://PATH, on which every block of KV that comes or goes is "
        "published, as vLLM and SGLang do; whoever reaches it reads the token ids of all prompts",
    )
    kv_events_replay_endpoint: str = flag("", "address at which followers ask for events they have missed")
    kv_events_topic: str = flag("", "first frame of every message, for followers of several servers")
    kv_events_block_size: int = flag(
        0, "tokens of a block in events, a multiple of --page-size; 0: a page, but 16 at least"
    )
    kv_events_tiers: Literal["all", "device"] = flag(
        "all", "device: say nothing of host memory, for followers that do not know of tiers"
    )
    kv_events_buffer_mb: int = flag(64, "memory for events that followers may ask for again")
    kv_events_format: KVEventForm = flag(
        "maps", "form of an event: maps with named fields, as vLLM and SGLang send today; arrays, as both sent before"
    )


@dataclass(frozen=True, kw_only=True)
class RecordingConfig:
    """What is written down of requests, for `baton.entrypoints.analyze`."""

    record_requests: str = flag("", "file that a line for each request is appended to: its token ids, no text")
    record_requests_hashed: bool = flag(False, "with salted hashes of blocks of 16 tokens in it in place of the ids")
    record_requests_gb: float = flag(1.0, "the most that this file and the one before it (PATH.1) take, in GiB")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a scheduler worker needs, as plain data."""

    model: ModelArgs
    scheduler: SchedulerConfig
    tiers: TierConfig = field(default_factory=TierConfig)
    jobs: JobConfig = field(default_factory=JobConfig)
    kv_events: KVEventConfig = field(default_factory=KVEventConfig)
    item_tries: dict[str, str] = field(default_factory=dict)
    """The item tries to start with: name -> .npy file."""
    max_item_tries: int = 64
    max_item_trie_bytes: int = 2**30
    """Of all item tries together."""
    log_level: str = "info"
