"""Three ways to run two-stage requests with a beam search as their second stage; search_stage.py compares them.

    native         our search: a continuation of stage 1, one request, one batch of `width` rows per step
    serving layer  a loop around an engine that only samples: each step sends one request per beam, for one token and
                   its 2 × width likeliest logprobs, and the caller ranks them (as engines without native beams do it)
    transformers   generate() for stage 1, generate(num_beams) over the whole ids for stage 2, all pairs as one batch

No sequence ends early: eos is ignored, so that every search does all its steps and all find the same.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.clients import SAMPLED, Call, EngineClient, NativeClient

Ids = list[int]

RETAIN_S = 3600.0
"""Longer than any benchmark."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The results of one search, best first, and its time."""

    sequences: list[Ids]
    scores: list[float]
    """Sum of the log-probabilities over the number of generated tokens."""
    seconds: float
    computed_tokens: int | None = None
    """Prompt tokens that were not cached, of all requests of the search; None where nothing is cached."""
    path: str | None = None
    margin: float = math.inf
    """Smallest distance in log-probability between the last candidate that was kept and the first that was not."""


class Peer(Protocol):
    name: str

    async def think(self, prompts: list[Ids], num_tokens: int) -> list[Ids]:
        """Stage 1 of all pairs together: what each generates, so many tokens."""
        ...

    async def search(self, wholes: list[Ids], suffix: Ids, width: int, steps: int) -> list[Search]:
        """Stage 2 of all pairs together. wholes: prompt + stage 1 + suffix of each."""
        ...


class _Engine:
    """Stage 1 on our engine, in this process or behind a URL."""

    retain_ttl: float | None

    def __init__(self, client: EngineClient | NativeClient) -> None:
        self._client = client
        self._parents: list[str] = []

    async def think(self, prompts: list[Ids], num_tokens: int) -> list[Ids]:
        calls = [
            Call(prompt=prompt, max_tokens=num_tokens, sampling=SAMPLED | {"seed": seed}, retain_ttl=self.retain_ttl)
            for seed, prompt in enumerate(prompts)
        ]
        replies = await asyncio.gather(*map(self._client.send_call, calls))
        self._parents = [reply.name for reply in replies]
        return [reply.output for reply in replies]


class NativeBeams(_Engine):
    name = "native"
    retain_ttl = RETAIN_S

    async def search(self, wholes: list[Ids], suffix: Ids, width: int, steps: int) -> list[Search]:
        return await asyncio.gather(*(self._search(parent, suffix, width, steps) for parent in self._parents))

    async def _search(self, parent: str, suffix: Ids, width: int, steps: int) -> Search:
        sampling = {"beam_width": width, "n": width, "max_new_tokens": steps, "ignore_eos": True}
        fields = {"continuation_of": parent, "continuation_ids": suffix, "sampling_params": sampling}
        began = time.perf_counter()
        outputs = await self._client.answer(fields)
        seconds = time.perf_counter() - began
        meta = outputs[0]["meta_info"]
        return Search(
            sequences=[output["output_ids"] for output in outputs],
            scores=[output["meta_info"]["sequence_score"] for output in outputs],
            seconds=seconds,
            computed_tokens=meta["prompt_tokens"] - meta["cached_tokens"],
            path=meta["continuation"]["path"],
        )


class LayerBeams(_Engine):
    name = "serving layer"
    retain_ttl = None

    async def search(self, wholes: list[Ids], suffix: Ids, width: int, steps: int) -> list[Search]:
        return await asyncio.gather(*(self._search(whole, width, steps) for whole in wholes))

    async def _search(self, whole: Ids, width: int, steps: int) -> Search:
        began = time.perf_counter()
        beams: list[tuple[float, Ids]] = [(0.0, [])]
        computed, margin = 0, math.inf
        for _ in range(steps):
            outputs = await self._client.answer(
                {
                    "input_ids": [whole + ids for _, ids in beams],
                    "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
                    "return_logprob": True,
                    "top_logprobs_num": 2 * width,
                }
            )
            ranked = []
            for (score, ids), output in zip(beams, outputs, strict=True):
                meta = output["meta_info"]
                computed += meta["prompt_tokens"] - meta["cached_tokens"]
                ranked += [(score + logprob, [*ids, token]) for logprob, token, _ in meta["output_top_logprobs"][0]]
            ranked.sort(key=lambda candidate: -candidate[0])
            beams = ranked[:width]
            if len(ranked) > width:
                margin = min(margin, ranked[width - 1][0] - ranked[width][0])
        return Search(
            sequences=[ids for _, ids in beams],
            scores=[score / steps for score, _ in beams],
            seconds=time.perf_counter() - began,
            computed_tokens=computed,
            margin=margin,
        )


class TransformersBeams:
    name = "transformers"

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    async def think(self, prompts: list[Ids], num_tokens: int) -> list[Ids]:
        output = self._generate(prompts, num_tokens, do_sample=True, **SAMPLED)
        return output[:, len(prompts[0]) :].tolist()

    async def search(self, wholes: list[Ids], suffix: Ids, width: int, steps: int) -> list[Search]:
        began = time.perf_counter()
        output = self._generate(
            wholes,
            steps,
            num_beams=width,
            num_return_sequences=width,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = output.sequences[:, len(wholes[0]) :].tolist()
        scores = output.sequences_scores.tolist()
        seconds = time.perf_counter() - began
        parts = [slice(start, start + width) for start in range(0, len(sequences), width)]
        return [Search(sequences=sequences[part], scores=scores[part], seconds=seconds) for part in parts]

    def _generate(self, prompts: list[Ids], num_tokens: int, **settings: Any) -> Any:
        """All prompts have one length: no padding, and nothing to mask."""
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            return self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **({"do_sample": False} | settings),
            )
