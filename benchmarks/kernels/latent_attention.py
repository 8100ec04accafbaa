"""Times attention over latents on a CPU, by Numba's kernel and by torch: one layer of a model of DeepSeek's sizes.
Then prompts with the projections around it: absorbed by each, and with keys and values of heads made first.

python -m benchmarks.kernels.latent_attention
python -m benchmarks.kernels.latent_attention --heads 128 --dtype float32
"""

from __future__ import annotations

import argparse
import time

import torch

from baton.attention.backend import AttentionBackend, AttentionSpec
from baton.attention.latent import LatentBackend, LatentWeights, attend_absorbed
from baton.attention.numba_paged.backend import ANY_EXTEND, NumbaPagedBackend
from baton.attention.numba_paged.team import Team
from baton.attention.probe import ProbeScene, ProbeStep
from baton.attention.torch_native import TorchNativeBackend

STEPS = (
    ProbeStep("decode, 4 sequences of 2000 tokens", ((2000, 1),) * 4),
    ProbeStep("decode, 32 sequences of 200", ((200, 1),) * 32),
    ProbeStep("512 new tokens over 512", ((512, 512),)),
    ProbeStep("2000 new tokens", ((0, 2000),)),
)


PROMPTS = STEPS[2:]


def with_projections(scene: ProbeScene, backend: AttentionBackend, size: int, repeat: int) -> float:
    """Milliseconds from queries to values of heads."""
    spec, q = scene.spec, scene.q
    heads, latent = spec.num_heads, spec.value_size
    weights = LatentWeights(q.new_ones(heads, size, latent), q.new_ones(heads, latent, size))
    queries = q.new_ones(len(q), heads, size + spec.head_dim - latent)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        backend.plan(scene.batch)
        if isinstance(backend, LatentBackend):
            backend.run_latent(spec, queries, weights)
        else:
            attend_absorbed(backend.run, spec, queries, weights)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def milliseconds(backend: AttentionBackend, scene: ProbeScene, repeat: int) -> float:
    """The fastest of some runs."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        scene.run(backend)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rotary", type=int, default=64)
    parser.add_argument("--head", type=int, default=128, help="size of a head's value, and of its key but for the rest")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, team = args.latent + args.rotary, Team()
    print(f"{'ms a layer':<38}{'heads':>6} {'dtype':<9}{'kernel':>9}{'torch':>9}")
    for dtype in (getattr(torch, name) for name in args.dtype):
        for heads in args.heads:
            spec = AttentionSpec(0, heads, 1, size, size**-0.5, value_dim=args.latent, values_in_keys=True)
            for step in STEPS:
                scene = ProbeScene(step, spec, page_size=1, dtype=dtype, device=torch.device("cpu"))
                backends = (
                    NumbaPagedBackend(scene.pool, [spec], team=team, longest_extend=ANY_EXTEND),
                    TorchNativeBackend(scene.pool),
                )
                times = [milliseconds(backend, scene, args.repeat) for backend in backends]
                name = str(dtype).removeprefix("torch.")
                print(f"{step.name:<38}{heads:>6} {name:<9}{times[0]:>9.2f}{times[1]:>9.2f}", flush=True)
                if step in PROMPTS:
                    times = [with_projections(scene, backend, args.head, args.repeat) for backend in backends]
                    expanded = with_projections(scene, LatentBackend(scene.pool, backends[1]), args.head, args.repeat)
                    print(f"{'  with projections':<38}{'':16}{times[0]:>9.2f}{times[1]:>9.2f}, expanded {expanded:.2f}")


if __name__ == "__main__":
    main()
