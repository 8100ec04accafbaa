"""Decode steps of a model with experts: Baton's own code beside transformers' with its own cache.

    python -m benchmarks.models.expert_speed             a table, and JSON in benchmarks/results

A Qwen3-MoE of random weights (hidden 512, 8 layers, 32 experts of width 256, 4 chosen), in rounds with the order
swapped. Baton's steps are timed with scheduler and sampling, transformers' with an argmax. A prompt step computes the
prompts of all rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.worker import build_worker
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS, about_this_run, device_name

SHAPE: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
PROMPT, WARM, TIMED = 300, 5, 30
"""Tokens of each prompt; steps that are not timed, and that are."""


def prompts(rows: int) -> list[list[int]]:
    rng = random.Random(rows)
    return [[rng.randrange(5, SHAPE["vocab_size"]) for _ in range(PROMPT)] for _ in range(rows)]


class Native:
    def __init__(self, folder: Path, dtype: Any, linear_backend: Any) -> None:
        model = ModelArgs(model_path=str(folder), device="cpu", dtype=dtype, linear_backend=linear_backend)
        config = SchedulerConfig(max_total_tokens=65536, disable_radix_cache=True)
        self._scheduler, self._step_runner, *_ = build_worker(WorkerConfig(model=model, scheduler=config))

    def time_steps(self, rows: int) -> tuple[float, list[float]]:
        """Seconds of the prompts, and of each decode step."""
        sampling = SamplingParams(max_new_tokens=1000, temperature=0.0, ignore_eos=True)
        for row, ids in enumerate(prompts(rows)):
            self._scheduler.add_request(RequestSpec(rid=str(row), input_ids=pack_ids(ids), sampling=sampling), 0.0)
        taken: list[float] = []
        prompt = 0.0
        while len(taken) < WARM + TIMED:
            began = time.perf_counter()
            batch = self._scheduler.next_batch(0.0)
            if batch is None:
                continue
            self._scheduler.process_result(self._step_runner.run(batch).result, 0.0)
            if batch.is_extend:
                prompt += time.perf_counter() - began
            elif len(batch) == rows:
                taken.append(time.perf_counter() - began)
        self._scheduler.abort_all_requests(0.0, "measured")
        return prompt, taken[WARM:]


class Foreign:
    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def time_steps(self, rows: int) -> tuple[float, list[float]]:
        """Seconds of the prompts, and of each decode step."""
        began = time.perf_counter()
        output = self._model(torch.tensor(prompts(rows)), use_cache=True, logits_to_keep=1)
        prompt = time.perf_counter() - began
        taken: list[float] = []
        for _ in range(WARM + TIMED):
            began = time.perf_counter()
            ids = output.logits[:, -1:].argmax(-1)
            output = self._model(ids, past_key_values=output.past_key_values, use_cache=True)
            taken.append(time.perf_counter() - began)
        return prompt, taken[WARM:]


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=4, help="every second one in the other order")
    parser.add_argument(
        "--linear-backend", default="auto", help="as the server's flag; trials suffer on a busy machine"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for expert_speed.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE)).to(dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        arms = {"baton": Native(Path(folder), args.dtype, args.linear_backend), "transformers": Foreign(model)}
    report: dict[str, Any] = about_this_run("cpu") | {"dtype": args.dtype, "steps": {}, "prompts": {}}
    print(f"\n{device_name('cpu')}, {torch.get_num_threads()} threads, {args.dtype}; milliseconds, least and median")
    print(f"{'':8} {'rows':>5} {'baton':>17} {'transformers':>17} {'ratio':>12}")
    for rows in args.rows:
        taken: dict[str, list[float]] = {name: [] for name in arms}
        prompt: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(args.rounds):
            for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
                prompt_s, steps = arms[name].time_steps(rows)
                prompt[name].append(prompt_s)
                taken[name] += steps
        for kind, times in (("decode", taken), ("prompt", prompt)):
            least = {name: 1e3 * min(times[name]) for name in arms}
            usual = {name: 1e3 * statistics.median(times[name]) for name in arms}
            shown = [f"{least[name]:.1f} / {usual[name]:.1f}" for name in arms]
            ratios = [of["transformers"] / of["baton"] for of in (least, usual)]
            print(f"{kind:8} {rows:>5} {shown[0]:>17} {shown[1]:>17} {ratios[0]:>5.2f} / {ratios[1]:.2f}", flush=True)
            report["steps" if kind == "decode" else "prompts"][rows] = {"least_ms": least, "median_ms": usual}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "expert_speed.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
