"""Times decodes of one layer on a CPU over KV pools of different types.

    python -m benchmarks.kernels.kv_types
    python -m benchmarks.kernels.kv_types --lengths 4000 --heads 9 --kv-heads 3 --head-dim 64

Runs over the pools alternate; the table has the fastest of each, the JSON also the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from baton.attention.backend import AttentionSpec
from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.team import Team
from baton.attention.probe import ProbeScene, ProbeStep
from baton.runtime.runner.kv_dtype import KV_DTYPES
from benchmarks.common.measured import RESULTS, about_this_run


def run_step(backend: NumbaPagedBackend, scene: ProbeScene) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    backend.plan(scene.batch)
    backend.run(scene.spec, scene.q)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 4000, 32000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16", "int8", "fp8"], choices=KV_DTYPES)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    team, results = Team(), []
    spec = AttentionSpec(0, args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5)
    where = {"page_size": 1, "dtype": torch.float32, "device": torch.device("cpu")}
    print(f"{'ms a layer':<22}" + "".join(f"{name:>10}" for name in args.types))
    for length in args.lengths:
        for rows in args.rows:
            step = ProbeStep(f"{rows} × {length} tokens", ((length - 1, 1),) * rows)
            scenes = {name: ProbeScene(step, spec, kv_dtype=KV_DTYPES[name], **where) for name in args.types}
            backends = {name: NumbaPagedBackend(scene.pool, [spec], team=team) for name, scene in scenes.items()}
            times: dict[str, list[float]] = {name: [] for name in args.types}
            for turn in range(args.repeat + 1):
                for name in args.types[:: 1 if turn % 2 else -1]:
                    taken = run_step(backends[name], scenes[name])
                    if turn:
                        times[name].append(taken)
            least = {name: min(found) for name, found in times.items()}
            print(f"{step.name:<22}" + "".join(f"{each:>10.2f}" for each in least.values()), flush=True)
            medians = {name: statistics.median(found) for name, found in times.items()}
            results.append({"length": length, "rows": rows, "least_ms": least, "median_ms": medians})
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "kv_types.json"
    path.write_text(json.dumps({"about": about_this_run("cpu"), "settings": vars(args), "results": results}, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
