"""The distributions after every token of a text: by Baton's model runner, and by llama.cpp's library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from baton.scheduler.batch import ForwardMode, KVCopies, ScheduleBatch

CHUNK = 128
"""Tokens of a step. All but the first of a window read what is kept of K and V."""


class Predictor(Protocol):
    vocab_size: int

    def logprobs(self, ids: np.ndarray) -> torch.Tensor:
        """int32 [length] -> float32 [length, vocab_size]: of what follows each token"""
        ...

    def close(self) -> None: ...


class Baton:
    """A model runner with one row, which each text fills anew."""

    def __init__(self, args: ModelArgs, length: int, chunk: int = CHUNK) -> None:
        """length: of the longest text, in tokens; chunk: tokens of a step. Raises ModelLoadError."""
        self._chunk = chunk
        self.runner = ModelRunner(
            args, context_length=length, num_rows=1, page_size=1, max_total_tokens=length, chunked_prefill_size=chunk
        )
        self._pool = ReqToTokenPool(*self.runner.req_to_token.shape)
        row = self._pool.alloc()
        assert row is not None, "the only one"
        self._row = row
        self._pool.write(row, 0, 1 + np.arange(length, dtype=np.int32))
        self.vocab_size = self.runner.config.vocab_size

    def logprobs(self, ids: np.ndarray) -> torch.Tensor:
        starts = range(0, len(ids), self._chunk)
        parts = [self._step(ids, start, min(start + self._chunk, len(ids))) for start in starts]
        return torch.cat(parts)

    def _step(self, ids: np.ndarray, start: int, end: int) -> torch.Tensor:
        """Logprobs after the tokens ``start`` to ``end`` - 1."""
        one = np.ones(1, dtype=np.int32)
        output = self.runner.forward(
            ScheduleBatch(
                step_id=0,
                mode=ForwardMode.EXTEND,
                opened=[],
                closed=[],
                serials=np.zeros(1, dtype=np.int64),
                input_ids=ids[start:end],
                out_cache_loc=1 + np.arange(start, end, dtype=np.int32),
                req_pool_indices=self._row * one,
                prefix_lens=start * one,
                extend_lens=(end - start) * one,
                samples=np.zeros(1, dtype=bool),
                output_positions=0 * one,
                logprob_starts=0 * one,
                logprob_targets=[np.zeros(end - start, dtype=np.int32)],  # only their number matters here
                row_updates=self._pool.take_updates(),
                copies=KVCopies.join([]),
            )
        )
        assert output.logprob_hidden is not None, "every token asks for its logprobs"
        return self.runner.compute_logits(output.logprob_hidden).log_softmax(-1)

    def close(self) -> None:
        del self.runner


class Opaque(ctypes.Structure):
    """A struct of parameters. Its fields differ between versions of llama.cpp, so it is reserved as plain memory,
    larger than any of them. Only the first fields of a context's parameters are set here; their defaults are
    checked."""

    _fields_ = [("numbers", ctypes.c_uint32 * 256)]


class TokenBatch(ctypes.Structure):
    """llama.cpp's ``llama_batch``."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class LlamaCpp:
    """llama.cpp through its C interface, with its default settings and a KV cache of 16 bits. (The server in the
    package xllamacpp returns no logprobs of prompts.)"""

    N_CTX, N_BATCH = 0, 1
    DEFAULTS = (512, 2048, 512, 1)
    """The default values of n_ctx, n_batch, n_ubatch and n_seq_max, which come first in a context's parameters."""

    def __init__(self, library: Path, file: Path, length: int, vocab_size: int) -> None:
        """Raises ValueError for a library that has changed, or cannot load the file."""
        self._library: Any = ctypes.CDLL(str(library))
        self.vocab_size = vocab_size
        for name, result, arguments in (
            ("llama_model_default_params", Opaque, []),
            ("llama_context_default_params", Opaque, []),
            ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Opaque]),
            ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Opaque]),
            ("llama_set_n_threads", None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
            ("llama_get_memory", ctypes.c_void_p, [ctypes.c_void_p]),
            ("llama_memory_clear", None, [ctypes.c_void_p, ctypes.c_bool]),
            ("llama_batch_init", TokenBatch, [ctypes.c_int32] * 3),
            ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, TokenBatch]),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
            ("llama_batch_free", None, [TokenBatch]),
            ("llama_free", None, [ctypes.c_void_p]),
            ("llama_model_free", None, [ctypes.c_void_p]),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._library.llama_backend_init()
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._library.llama_log_set(self._quiet, None)
        params = self._library.llama_context_default_params()
        if tuple(params.numbers[: len(self.DEFAULTS)]) != self.DEFAULTS:
            raise ValueError(
                f"the parameters of this llama.cpp begin with {list(params.numbers[:4])}: an unknown layout"
            )
        params.numbers[self.N_CTX] = params.numbers[self.N_BATCH] = length
        self._model = self._library.llama_model_load_from_file(
            str(file).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {file.name}")
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp opens no context of {length} tokens")
        threads = len(os.sched_getaffinity(0))
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._batch = self._library.llama_batch_init(length, 0, 1)

    def logprobs(self, ids: np.ndarray) -> torch.Tensor:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids.tolist()):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        if status := self._library.llama_decode(self._context, batch):
            raise ValueError(f"llama.cpp computed nothing: status {status}")
        found = self._library.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(found, (len(ids), self.vocab_size))
        return torch.from_numpy(logits.copy()).log_softmax(-1)

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)
