"""Requests as a sampler sees them, without a scheduler."""

from __future__ import annotations

import numpy as np

from baton.radix.cache import KVSequence
from baton.scheduler.request import Request
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams


def make_request(
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
    row: int = 0,
    rid: str = "r",
    **sampling,
) -> Request:
    """A running request that has generated ``output`` and holds request row ``row``."""
    spec = RequestSpec(rid, np.array(prompt or [1], dtype=np.int32), SamplingParams(**sampling))
    request = Request(spec, index=0, seed=seed, arrival=0.0, sequence_number=0)
    request.begin(request.token_ids, max_new_tokens=1000)
    request.kv = KVSequence(namespace="", row=row, node=None, tree_len=0, length=0)
    for token_id in output or []:
        request.token_ids.append(token_id)
    return request
