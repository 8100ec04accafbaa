"""vLLM in this process, its steps called one by one; see serve.py."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from typing import Any

SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 50}


class Engine:
    def __init__(self, model: str, dtype: str, cores: list[int], rows: int, kv_tokens: int, kv_gib: int | None) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        vllm = importlib.import_module("vllm")
        self._params = importlib.import_module("vllm.sampling_params")
        self._llm: Any = vllm.LLM(
            model,
            dtype=dtype,
            max_num_seqs=rows,
            max_logprobs=64,  # a search asks for two per beam
            enable_prefix_caching=True,
        )
        self._numbers = itertools.count()
        self.about = {"version": vllm.__version__, "torch": importlib.import_module("torch").__version__}

    def generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        engine, kinds = self._llm.llm_engine, self._params.RequestOutputKind
        found = {str(next(self._numbers)): {"ids": [], "first_s": None, "total_s": None} for _ in requests}
        began = time.perf_counter()
        for name, request in zip(found, requests):
            # Without the seed: on a CPU, vLLM 0.32 fails at seeded requests whose prompts are computed in chunks.
            sampling = {"temperature": 0.0} if request.get("seed") is None else SAMPLED
            params = self._params.SamplingParams(
                max_tokens=request["tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=kinds.DELTA if stream else kinds.FINAL_ONLY,
                **sampling,
            )
            engine.add_request(name, {"prompt_token_ids": request["ids"]}, params)
        steps = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                mine = found[output.request_id.split("-")[0]]
                mine["ids"] += output.outputs[0].token_ids
                mine["cached"] = output.num_cached_tokens
                if mine["ids"] and mine["first_s"] is None:
                    mine["first_s"] = now
                if output.finished:
                    mine["total_s"] = now
            steps.append((now, [len(output.outputs[0].token_ids) for output in outputs]))
        whole = [1] * len(requests)
        return {
            "seconds": time.perf_counter() - began,
            "steps_s": [b - a for (a, before), (b, after) in itertools.pairwise(steps) if before == after == whole],
            "requests": [{"name": name, **mine} for name, mine in found.items()],
        }

    def beam(self, requests: list[dict[str, Any]], width: int, steps: int) -> dict[str, Any]:
        params = self._params.BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
        prompts = [{"prompt_token_ids": request["ids"]} for request in requests]
        began = time.perf_counter()
        outputs = self._llm.beam_search(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        sequences = [[beam.tokens[-steps:] for beam in output.sequences] for output in outputs]
        return {"seconds": [seconds] * len(requests), "sequences": sequences}

    def press(self) -> dict[str, int]:
        return {"tokens": 0}
