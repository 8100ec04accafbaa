"""Times decodes of one layer on a CPU: sparse by a kernel and by torch, and in full by Numba's kernel and by torch.

    python -m benchmarks.kernels.double_sparse
    python -m benchmarks.kernels.double_sparse --lengths 32000 --dtype bfloat16

Sparse and full runs alternate; the table has the fastest of each, the JSON also the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from baton.attention.backend import AttentionBackend, AttentionSpec
from baton.attention.double_sparse import DoubleSparseBackend, Sparsity
from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.label_scores import LabelScores
from baton.attention.numba_paged.team import Team
from baton.attention.probe import ProbeScene, ProbeStep
from baton.attention.torch_native import TorchNativeBackend
from benchmarks.common.measured import RESULTS, about_this_run


def run_step(backend: AttentionBackend, scene: ProbeScene) -> float:
    """Milliseconds."""
    batch = replace(scene.batch, decodes=np.ones(len(scene.batch.extend_lens), dtype=bool))
    began = time.perf_counter()
    backend.plan(batch)
    backend.run(scene.spec, scene.q)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 8000, 32000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    team, results = Team(), []
    spec = AttentionSpec(0, args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5)
    order = torch.arange(args.head_dim).repeat(args.kv_heads, 1)
    sparsity = Sparsity(channels=args.channels, tokens=args.tokens, threshold=1, orders={0: order})
    print(f"{'ms a layer':<24}{'dtype':<10}{'sparse':>9}{'by torch':>9}{'numba':>9}{'torch':>9}")
    for dtype in (getattr(torch, name) for name in args.dtype):
        for length in args.lengths:
            for rows in args.rows:
                step = ProbeStep(f"{rows} × {length} tokens", ((length - 1, 1),) * rows)
                scene = ProbeScene(step, spec, page_size=1, dtype=dtype, device=torch.device("cpu"))
                full = NumbaPagedBackend(scene.pool, [spec], team=team)
                backends: dict[str, AttentionBackend] = {
                    "sparse": DoubleSparseBackend(scene.pool, full, sparsity, LabelScores(team)),
                    "by torch": DoubleSparseBackend(scene.pool, full, sparsity),
                    "numba": NumbaPagedBackend(scene.pool, [spec], team=team),
                    "torch": TorchNativeBackend(scene.pool),
                }
                times: dict[str, list[float]] = {name: [] for name in backends}
                for turn in range(args.repeat + 1):
                    for name in list(backends)[:: 1 if turn % 2 else -1]:
                        taken = run_step(backends[name], scene)
                        if turn:
                            times[name].append(taken)
                least = {name: min(found) for name, found in times.items()}
                about = str(dtype).removeprefix("torch.")
                print(f"{step.name:<24}{about:<10}" + "".join(f"{each:>9.2f}" for each in least.values()), flush=True)
                medians = {name: statistics.median(found) for name, found in times.items()}
                results.append(
                    {"length": length, "rows": rows, "dtype": about, "least_ms": least, "median_ms": medians}
                )
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "double_sparse.json"
    path.write_text(json.dumps({"about": about_this_run("cpu"), "settings": vars(args), "results": results}, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
