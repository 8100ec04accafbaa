"""How much longer a decode step takes in transformers' modelling on Baton's KV cache than in Baton's own code.

    python -m benchmarks.models.backend_speed            a table, and JSON in benchmarks/results

Both serve the same random weights of the 40 M Llama in this process, in rounds with the order swapped. A step is timed
from one to the next, scheduler and sampling included.
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
from benchmarks.common.models import LLAMA_40M, save_random_model

IMPLS = ("baton", "transformers")
PROMPT, WARM, TIMED = 300, 10, 40
"""Tokens of each prompt; steps that are not timed, and that are."""


class Arm:
    """One implementation of the model."""

    def __init__(self, impl: Any, folder: Path, linear_backend: Any) -> None:
        model = ModelArgs(
            model_path=str(folder), model_impl=impl, device="cpu", dtype="float32", linear_backend=linear_backend
        )
        config = SchedulerConfig(max_total_tokens=16384, disable_radix_cache=True)
        self._scheduler, self._step_runner, *_ = build_worker(WorkerConfig(model=model, scheduler=config))
        self.steps: dict[int, list[float]] = {}

    def run(self, rows: int, round_number: int) -> None:
        """Decode ``rows`` sequences, and note the seconds of each step."""
        rng = random.Random(rows)
        sampling = SamplingParams(max_new_tokens=WARM + TIMED, temperature=0.0, ignore_eos=True)
        for row in range(rows):
            ids = pack_ids([rng.randrange(5, LLAMA_40M["vocab_size"]) for _ in range(PROMPT)])
            self._scheduler.add_request(RequestSpec(rid=f"{round_number}-{row}", input_ids=ids, sampling=sampling), 0.0)
        taken: list[float] = []
        while True:
            began = time.perf_counter()
            batch = self._scheduler.next_batch(0.0)
            if batch is None:
                break
            self._scheduler.process_result(self._step_runner.run(batch).result, 0.0)
            if not batch.is_extend:
                taken.append(time.perf_counter() - began)
        self.steps.setdefault(rows, []).extend(taken[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=4, help="every second one in the other order")
    parser.add_argument(
        "--linear-backend", default="auto", help="as the server's flag; trials suffer on a busy machine"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for backend_speed.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), LLAMA_40M | {"bos_token_id": 1, "eos_token_id": 2})
        arms = {impl: Arm(impl, Path(folder), args.linear_backend) for impl in IMPLS}
    for number in range(args.rounds):
        for impl in IMPLS if number % 2 == 0 else IMPLS[::-1]:
            for rows in args.rows:
                arms[impl].run(rows, number)
    print(f"\n{device_name('cpu')}, {torch.get_num_threads()} threads; milliseconds of a step, least and median")
    print(f"{'rows':>5} {'baton':>15} {'transformers':>15} {'ratio':>12}")
    report: dict[str, Any] = about_this_run("cpu") | {"steps": {}}
    for rows in args.rows:
        least = {impl: 1e3 * min(arm.steps[rows]) for impl, arm in arms.items()}
        usual = {impl: 1e3 * statistics.median(arm.steps[rows]) for impl, arm in arms.items()}
        shown = [f"{least[impl]:.1f} / {usual[impl]:.1f}" for impl in IMPLS]
        ratios = [of["transformers"] / of["baton"] for of in (least, usual)]
        print(f"{rows:>5} {shown[0]:>15} {shown[1]:>15} {ratios[0]:>5.2f} / {ratios[1]:.2f}")
        report["steps"][rows] = {"least_ms": least, "median_ms": usual}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "backend_speed.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
