"""OpenVINO GenAI's pipeline with continuous batching, its steps called one by one; see serve.py."""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
BLOCK = 32
"""Tokens of a block of its KV on a CPU."""


class Engine:
    def __init__(self, model: str, dtype: str, cores: list[int], rows: int, kv_tokens: int, kv_gib: int | None) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        if kv_gib is not None:
            scheduler.cache_size = kv_gib
        else:
            scheduler.num_kv_blocks = kv_tokens // BLOCK
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048  # its default of 256 makes prompts slow
        scheduler.max_num_seqs = rows
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(cores)}
        if (precision := PRECISIONS.get(dtype)) is not None:  # else everything is as it is by default
            properties["INFERENCE_PRECISION_HINT"] = precision
            properties["KV_CACHE_PRECISION"] = precision  # its default is 8 bits: as accurate as the others
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._numbers = itertools.count()
        self.about = {"version": self._genai.__version__.split("-")[0]}

    def _config(self, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.eos_token_id = 2  # it wants one all the same
        config.apply_chat_template = False
        config.do_sample = False
        return config

    def _add(self, ids: list[int], config: Any) -> Any:
        tensor = self._openvino.Tensor(self._numpy.array([ids], dtype=self._numpy.int64))
        return self._pipeline.add_request(next(self._numbers), tensor, config)

    def generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        configs = []
        for request in requests:
            config = self._config(request["tokens"])
            if request.get("seed") is not None:
                config.do_sample, config.rng_seed = True, request["seed"]
                config.temperature, config.top_p, config.top_k = 0.6, 0.95, 50
            configs.append(config)
        found = [{"ids": [], "first_s": None, "total_s": None} for _ in requests]
        began = time.perf_counter()
        handles = [self._add(request["ids"], config) for request, config in zip(requests, configs)]
        steps = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - began
            if stream:
                steps.append((now, [self._read(handle, mine, now) for handle, mine in zip(handles, found)]))
        seconds = time.perf_counter() - began
        for handle, mine in zip(handles, found):
            if not stream:
                mine["ids"] = list(handle.read_all()[0].generated_ids)
            mine["total_s"] = mine["total_s"] or seconds
        whole = [1] * len(requests)
        return {
            "seconds": seconds,
            "steps_s": [b - a for (a, before), (b, after) in itertools.pairwise(steps) if before == after == whole],
            "requests": [{"name": "", **mine} for mine in found],
        }

    def _read(self, handle: Any, mine: dict[str, Any], now: float) -> int:
        """(the new part of a request, as a stream gets it; its number of tokens)."""
        if not handle.can_read():
            return 0
        ids = [token for output in handle.read().values() for token in output.generated_ids]
        mine["ids"] += ids
        mine["first_s"] = mine["first_s"] or now
        mine["total_s"] = now
        return len(ids)

    def beam(self, requests: list[dict[str, Any]], width: int, steps: int) -> dict[str, Any]:
        config = self._config(steps)
        config.num_beams = config.num_return_sequences = width
        config.num_beam_groups = 1
        began = time.perf_counter()
        handles = [self._add(request["ids"], config) for request in requests]
        seconds: dict[int, float] = {}
        running = self._genai.GenerationStatus.RUNNING
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - began
            for place, handle in enumerate(handles):
                if place not in seconds and handle.get_status() != running:
                    seconds[place] = now
        sequences = [[list(output.generated_ids) for output in handle.read_all()] for handle in handles]
        return {"seconds": [seconds[place] for place in range(len(handles))], "sequences": sequences}

    def press(self) -> dict[str, int]:
        return {"tokens": 0}
