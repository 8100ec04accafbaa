"""The runtime settings of an operator. As in scheduler/config.py, each part is one frozen dataclass, and flags are
generated from its fields. entrypoints/server_args.py composes them once; the worker gets them as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..scheduler.config import SchedulerConfig, flag


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Which model to run, in which dtype, on which device."""

    model_path: str = flag("", "Model to serve: a Hugging Face folder, a GGUF file, or a hub id, which is downloaded.")
    tokenizer_path: str = flag("", "Folder that contains tokenizer.json. Empty: the model's folder.")
    load_format: Literal["auto", "dummy"] = flag(
        "auto",
        "Source of the weights. auto: the model's safetensors or GGUF files. dummy: random weights, no files needed.",
    )
    model_impl: Literal["auto", "baton", "transformers"] = flag(
        "auto",
        "Code that computes the model. baton: Baton's own, for the architectures in docs/models.md. transformers: the "
        "modelling of Hugging Face's transformers, with Baton's attention and KV cache. auto: Baton's own if there is "
        "one, else transformers.",
    )
    pooling: Literal["auto", "last", "mean", "cls"] = flag(
        "auto",
        "Pooling of embeddings: the final hidden state of the last token, the mean over all tokens, or the state of "
        "the first token (cls). auto: as the model's 1_Pooling/config.json says, else last. With any other value, "
        "scores of text pairs are computed from embeddings.",
    )
    trust_remote_code: bool = flag(
        False,
        "Run Python code that comes with the model's files, for models that transformers does not contain. Such code "
        "can do anything; read it first.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto",
        "Type of weights, and of KV (see --kv-cache-dtype). auto: the checkpoint's type; on a CPU float32, or "
        "bfloat16 if both checkpoint and processor have it and it is faster.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"] = flag(
        "auto",
        "Type of the numbers in the KV cache, on all tiers. auto: --dtype, but with weights in few bits on a CPU "
        "bfloat16 instead of float32. int8, fp8 (e4m3) and fp8_e5m2: one byte each, and a scale for each token and "
        "head; an approximation. A GPU and latent attention take auto only.",
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] = flag(
        "auto",
        "Weights of matrix products and of the head in few bits. int8: 8.5 bits per weight, groups of 32 inputs with "
        "a scale; int4: 5 bits, groups of 32 with a scale and a minimum, and the head as with int8; fp8: e4m3 with a "
        "scale for each output, multiplied by inputs that are not rounded, and the head as with int8. Made from floats "
        "when the model is loaded; what the checkpoint has in few bits stays as it is. auto: as the checkpoint has "
        "them.",
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "Device that runs the model. auto: cuda if there is one, else cpu."
    )
    attention_backend: Literal["auto", "torch_native", "flashinfer", "numba"] = flag(
        "auto",
        "Attention implementation. auto: FlashInfer on a GPU, Baton's Numba kernels on a CPU; torch where these do not"
        " work, and on a CPU for small models. On a CPU this also selects the implementation of norms, rotations and "
        "gates.",
    )
    enable_double_sparsity: bool = flag(
        False,
        "DoubleSparse: decodes of long sequences attend only to the tokens whose keys fit best in a few channels. An "
        "approximation. Needs --ds-channel-config-path.",
    )
    ds_channel_config_path: str = flag(
        "", "JSON file with the channels of each layer's keys, heaviest first; baton ds-channels writes one."
    )
    ds_heavy_channel_type: Literal["qk", "q", "k"] = flag(
        "qk", "The file's lists to use: by products of queries and keys (qk), by queries (q) or by keys (k) alone."
    )
    ds_heavy_channel_num: int = flag(32, "Channels of each key that choose the tokens.")
    ds_heavy_token_num: int = flag(256, "Tokens that each head attends to in a sparse decode.")
    ds_sparse_decode_threshold: int = flag(4096, "Length in tokens from which decodes are sparse.")
    linear_backend: Literal["auto", "torch", "transposed", "onednn", "numba", "widened"] = flag(
        "auto",
        "Implementation of matrix products on a CPU. auto: for each weight shape the fastest one, measured "
        "while the server is idle and kept for later starts. auto and numba multiply weights in few bits as they are, "
        "rounding inputs to 8 bits, and 16-bit floats that the processor does not multiply, as float32; with any other "
        "value both become floats of --dtype when the model is loaded. widened: each product makes them float32.",
    )
    disable_cuda_graph: bool = flag(
        False,
        "Launch every kernel by itself: no CUDA graphs on a GPU, no recorded steps on a CPU. Starts faster, "
        "decodes more slowly.",
    )
    cuda_graph_max_bs: int = flag(
        512,
        "Largest decode step that runs as a CUDA graph, in sequences; 0: none. On a CPU: largest step that is"
        " recorded, in tokens, at most 48.",
    )
    cuda_graph_max_tokens: int = flag(
        512, "Largest extend step that runs as a CUDA graph, in new tokens; 0: none. No effect on a CPU."
    )
    mem_fraction_static: float = flag(
        0.85,
        "Fraction of the free memory that weights and KV pool may use together, 0 to 1. On a CPU the KV pool "
        "gets at most 4 GiB unless --max-total-tokens sets its size.",
    )


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Host memory, disk and remote store: where KV goes when it leaves the device."""

    host_cache_gb: float = flag(
        0.0,
        "Host memory for KV that leaves the device, in GiB; 0: no host cache, unless --host-cache-ratio sets its size. "
        "Recurrent states get the same share of it as of the device's memory.",
    )
    host_cache_ratio: float = flag(
        0.0,
        "Size of the host cache as a multiple of the KV pool's number of tokens, and of recurrent states likewise; "
        "0: no host cache, unless --host-cache-gb sets its size.",
    )
    host_write_policy: Literal["write_through", "write_through_selective", "write_back"] = flag(
        "write_through",
        "Time at which KV is copied to the host cache. write_through: as soon as it is computed. "
        "write_through_selective: when it has been hit again. write_back: when it is evicted from the device.",
    )
    disk_cache_path: str = flag(
        "",
        "Folder for KV that leaves the host cache; it survives a restart of the server. Needs a host cache "
        "and --disk-cache-gb.",
    )
    remote_cache_url: str = flag(
        "",
        "Redis server for KV that several servers share: redis://… or rediss://…, or env:NAME for an "
        "environment variable that holds the URL. Needs a host cache.",
    )
    remote_cache_ttl: int = flag(
        86400, "Seconds after which the Redis server drops an unused block; 0: never, unless it runs out of memory."
    )
    disk_cache_gb: float = flag(0.0, "Maximum size of one model's KV in --disk-cache-path, in GiB.")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Files about agents' jobs."""

    tool_history: str = flag(
        "", "File that keeps the measured times of agents' tools from one start to the next. Empty: they are forgotten."
    )
    scheduler_trace: str = flag(
        "",
        "File to which every event of an agent's job is appended as a line of JSON, also after a restart. "
        "Empty: none is written.",
    )


KVEventForm = Literal["maps", "arrays"]


@dataclass(frozen=True, kw_only=True)
class KVEventConfig:
    """KV cache events: addresses, format and buffer."""

    kv_events_endpoint: str = flag(
        "",
        "ZMQ address, such as tcp://127.0.0.1:5557 or ipc://PATH, on which an event is published for every "
        "block of KV that is stored or removed, in the form of vLLM and SGLang. Everyone who reaches it can "
        "read the token ids of all prompts. Empty: no events.",
    )
    kv_events_replay_endpoint: str = flag(
        "", "ZMQ address at which followers request events that they missed. Empty: none."
    )
    kv_events_topic: str = flag("", "First frame of every event message. Lets a follower tell several servers apart.")
    kv_events_block_size: int = flag(
        0, "Tokens per block in events; a multiple of --page-size. 0: the page size, but at least 16."
    )
    kv_events_tiers: Literal["all", "device"] = flag(
        "all", "Tiers that events report. device: leave out host memory, for followers that do not know tiers."
    )
    kv_events_buffer_mb: int = flag(64, "Memory for past events that followers may request again, in MiB.")
    kv_events_format: KVEventForm = flag(
        "maps",
        "Encoding of an event. maps: named fields, as vLLM and SGLang send today. arrays: positional fields, "
        "as they sent before.",
    )


@dataclass(frozen=True, kw_only=True)
class RecordingConfig:
    """The recording of requests that `baton.entrypoints.analyze` reads."""

    record_requests: str = flag(
        "",
        "File to which each request is appended as a line of JSON, for baton.entrypoints.analyze: token ids, "
        "no text. Empty: nothing is recorded.",
    )
    record_requests_hashed: bool = flag(
        False, "Write salted hashes of blocks of 16 tokens to --record-requests instead of token ids."
    )
    record_requests_gb: float = flag(
        1.0, "Maximum size of --record-requests and its predecessor (PATH.1) together, in GiB."
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a scheduler worker needs, as plain data."""

    model: ModelArgs
    scheduler: SchedulerConfig
    tiers: TierConfig = field(default_factory=TierConfig)
    jobs: JobConfig = field(default_factory=JobConfig)
    kv_events: KVEventConfig = field(default_factory=KVEventConfig)
    item_tries: dict[str, str] = field(default_factory=dict)
    """Item tries to load at start: name -> .npy file."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Adapters to load at start: name -> folder."""
    max_adapters: int = 0
    """Adapters at a time; 0 for any number."""
    max_item_tries: int = 64
    max_item_trie_bytes: int = 2**30
    """Memory of all item tries together."""
    log_level: str = "info"
