"""Checks that a backend attends correctly on this device: runs a few steps of every kind over random pages and compares
them with plain arithmetic.

Run at start, as libraries may be compiled there or have been built for another card, and by the GPU tests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..memory_pool.kv_pool import KVPool, make_kv_pool
from ..memory_pool.kv_rows import is_quantized, read_rows, select_rows, store_rows
from .backend import AttentionBackend, AttentionBatch, AttentionSpec, SharedPrefix, kv_shapes
from .torch_native import capped, weights_of

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Absolute, for outputs of about 1."""


@dataclass(slots=True, frozen=True)
class ProbeStep:
    """lengths: (prefix, new tokens) of each sequence. shared: groups of beams that have their first pages in common."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    shared: tuple[SharedPrefix, ...] = ()


DECODE = ProbeStep("decode", ((5, 1), (130, 1), (0, 1), (64, 1), (1000, 1)))
EXTEND = ProbeStep("extend", ((5, 3), (64, 17), (0, 9), (700, 4)))
LONG = ProbeStep("long extend", ((40, 150), (0, 300)))
BEAMS = ProbeStep("beams", ((30, 1), *[(515, 1)] * 160), (SharedPrefix(1, 160, 512),))


class ProbeScene:
    """A step, and a pool of one layer that holds what it reads, on scattered pages."""

    def __init__(
        self,
        step: ProbeStep,
        spec: AttentionSpec,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: of the pool; None: ``dtype``, the model's."""
        rng = np.random.default_rng(0)
        totals = [prefix + new for prefix, new in step.lengths]
        counts = [-(-total // page_size) for total in totals]
        common = [0] * len(totals)
        """Pages that each row shares with the first row of its group."""
        first_row = list(range(len(totals)))
        for group in step.shared:
            for row in range(group.first + 1, group.first + group.count):
                common[row], first_row[row] = group.length // page_size, group.first
        num_pages = sum(counts) - sum(common)
        free = iter((rng.permutation(num_pages) + 1).tolist())
        pages: list[list[int]] = []
        for row, count in enumerate(counts):
            theirs = pages[first_row[row]][: common[row]] if common[row] else []
            pages.append([*theirs, *itertools.islice(free, count - common[row])])
        table = np.zeros((len(totals) + 1, max(counts) * page_size), dtype=np.int32)  # the last row is padding
        for row, own in enumerate(pages):
            table[row, : len(own) * page_size] = (np.array(own)[:, None] * page_size + np.arange(page_size)).ravel()
        self.spec = spec
        self.pool = make_kv_pool(
            num_tokens=num_pages * page_size,
            page_size=page_size,
            shapes=kv_shapes([spec]),
            dtype=kv_dtype or dtype,
            model_dtype=dtype,
            device=device,
        )
        generator = torch.Generator(device).manual_seed(0)
        used = torch.arange(page_size, self.pool.num_slots, device=device)
        parts = [(self.pool.k[0], spec.head_dim)]
        if not spec.values_in_keys:
            parts.append((self.pool.v[0], spec.value_size))
        for tensor, size in parts:
            numbers = torch.empty(len(used), tensor.shape[1], size, dtype=dtype, device=device)
            store_rows(tensor, used, numbers.normal_(generator=generator))
        self.batch = AttentionBatch(
            req_to_token=torch.from_numpy(table).to(device),
            host_rows=np.arange(len(totals), dtype=np.int32),
            prefix_lens=np.array([prefix for prefix, _ in step.lengths], dtype=np.int32),
            extend_lens=np.array([new for _, new in step.lengths], dtype=np.int32),
            pad_row=len(totals),
            shared=list(step.shared),
        )
        tokens = sum(new for _, new in step.lengths)
        self.q = torch.empty(tokens, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
        self.q.normal_(generator=generator)
        self.sinks = None
        if spec.has_sinks:
            self.sinks = torch.empty(spec.num_heads, device=device).normal_(generator=generator)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Plan and attend once."""
        backend.plan(self.batch)
        return backend.run(self.spec, self.q, self.sinks)

    def expected(self) -> torch.Tensor:
        """The right output, computed one sequence at a time in float32."""
        parts, first = [], 0
        q = self.q.float().unflatten(1, (self.spec.num_kv_heads, -1))  # [tokens, KV heads, heads of each, numbers]
        for row, (prefix, new) in enumerate(zip(self.batch.prefix_lens.tolist(), self.batch.extend_lens.tolist())):
            slots = self.batch.req_to_token[row, : prefix + new].long()
            k, v = (
                read_rows(select_rows(pool[0], slots), size, torch.float32)
                for pool, size in ((self.pool.k, self.spec.head_dim), (self.pool.v, self.spec.value_size))
            )
            scores = torch.einsum("qhgd,khd->hgqk", q[first : first + new], k) * self.spec.scale
            scores = capped(scores, self.spec.logit_cap)
            age = torch.arange(prefix, prefix + new, device=k.device)[:, None] - torch.arange(len(k), device=k.device)
            hidden = age < 0
            oldest = torch.from_numpy(self.spec.reach.first_keys(np.arange(prefix, prefix + new))).to(k.device)
            hidden |= torch.arange(len(k), device=k.device) < oldest[:, None]
            of_rows = None if self.sinks is None else self.sinks.view(k.shape[1], -1, 1).expand(-1, -1, new)
            weights = weights_of(scores.masked_fill(hidden, -torch.inf), of_rows)
            parts.append(torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2))
            first += new
        return torch.cat(parts).to(self.q.dtype)


def probe_backend(
    make: Callable[[KVPool, Sequence[AttentionSpec]], AttentionBackend],
    specs: Sequence[AttentionSpec],
    steps: Sequence[ProbeStep],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """kv_dtype: see `ProbeScene`. Raises AssertionError, which says what differs, or whatever a backend that cannot run
    raises."""
    # Kernels may round queries and weights to the pool's numbers.
    allowed = max(TOLERANCE[each] for each in (dtype, kv_dtype) if each is not None and not is_quantized(each))
    for spec in dict.fromkeys(dataclasses.replace(spec, layer_id=0) for spec in specs):
        for step in steps:
            scene = ProbeScene(step, spec, page_size=page_size, dtype=dtype, device=device, kv_dtype=kv_dtype)
            found, expected = scene.run(make(scene.pool, [spec])), scene.expected()
            assert found.shape == expected.shape, f"{step.name}: {list(found.shape)}, not {list(expected.shape)}"
            # torch.testing would import sympy and torch.distributed, in seconds.
            difference = float((found.double() - expected.double()).abs().max())
            assert torch.allclose(found, expected, atol=allowed, rtol=allowed), (
                f"{step.name}: differs by up to {difference:g}, which is more than {allowed:g}"
            )
