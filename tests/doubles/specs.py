"""Request specs from plain lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.scheduler.request_spec import PoolingSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids


def make_spec(
    rid: str, ids: Sequence[int] | np.ndarray, sampling: SamplingParams | None = None, **fields: Any
) -> RequestSpec:
    return RequestSpec(rid=rid, input_ids=pack_ids(ids), sampling=sampling or SamplingParams(), **fields)


def make_pooled_spec(
    rid: str, ids: Sequence[int] | np.ndarray, pooling: PoolingSpec | None = None, **fields: Any
) -> RequestSpec:
    """A prompt that is pooled, as the readers of embeddings make it."""
    sampling = SamplingParams(max_new_tokens=0)
    return make_spec(rid, ids, sampling, pooling=pooling or PoolingSpec(), **({"no_reuse_from": 0} | fields))
