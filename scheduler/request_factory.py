"""Makes live requests from a client's spec: numbers them, seeds them, checks their limits."""

from __future__ import annotations

import numpy as np

from ..memory_pool.allocator import Allocator
from ..radix.node import StateKind
from .beam.search import BeamGroup
from .config import SchedulerConfig
from .constraints.constraint import Constraint
from .limits import (
    check_allowed_ids,
    check_beam_limits,
    check_lengths,
    check_logprob_limit,
    check_logprob_start,
    check_pooling,
)
from .request import Request
from .request_spec import RequestSpec
from .stopping_criteria import StoppingCriteria
from .token_buffer import TokenBuffer


class RequestFactory:
    """Owns the count of requests and the seeds of those that bring none."""

    def __init__(self, config: SchedulerConfig, allocator: Allocator, stopping_criteria: StoppingCriteria) -> None:
        self._config = config
        self._allocator = allocator
        self._stopping_criteria = stopping_criteria
        # The entrypoint that starts a worker draws its seed; nothing is drawn here.
        self._seeds = np.random.default_rng(config.random_seed or 0)
        self._num_requests = 0

    def make_requests(
        self,
        spec: RequestSpec,
        now: float,
        own_ids: np.ndarray | None,
        constraint: Constraint | None,
        adapter: str = "",
    ) -> list[Request]:
        """Make ``spec.sampling.num_requests`` sequences; their prompt may not be known yet. Raises RequestRefused for a
        beam width, or a number of logprobs, that can never be served."""
        config = self._config
        check_pooling(spec)
        check_logprob_limit(spec.logprobs, config.max_logprobs)
        check_beam_limits(
            spec.sampling,
            max_beam_width=config.max_beam_width,
            rows=config.max_running_requests,
            states=config.max_states,
        )
        seed, count = spec.sampling.seed, spec.sampling.num_requests
        if seed is None:
            seed = int(self._seeds.integers(2**62))
        first = self._num_requests
        self._num_requests += count
        return [
            Request(
                spec,
                index=index,
                seed=(seed + index) % 2**64,
                arrival=now,
                serial=first + index,
                own_ids=own_ids,
                constraint=constraint,
                adapter=adapter,
                default_retain_ttl=config.default_retain_ttl,
                max_retain_ttl=config.max_retain_ttl,
            )
            for index in range(count)
        ]

    def set_prompt(self, requests: list[Request], prompt: TokenBuffer) -> None:
        """Give sequences of one request their prompt. Raises RequestRefused if they can never fit."""
        first = requests[0]
        max_new_tokens = check_lengths(first, len(prompt), self._config.context_length, self._allocator)
        check_allowed_ids(first, self._stopping_criteria.end_ids(first))
        if first.logprobs is not None:
            check_logprob_start(first.logprobs, len(prompt))
        first.set_prompt(prompt, max_new_tokens)
        for sibling in requests[1:]:
            sibling.set_prompt(prompt.share(), max_new_tokens)
        if self._config.max_states:
            warms_cache = not max_new_tokens and first.spec.pooling is None and first.logprobs is None
            for sibling in requests:
                _leave_state_for_same_prompt(sibling, is_expected=len(requests) > 1 or warms_cache)
        if first.is_search:  # then it is alone
            num_end_ids = len(self._stopping_criteria.end_ids(first))
            first.beams = BeamGroup(first.sampling, max_new_tokens, first.constraint, num_end_ids)


def _leave_state_for_same_prompt(request: Request, *, is_expected: bool) -> None:
    """Have a request leave its state where the same prompt continues: behind all but its last token. is_expected: it
    will be sent again. Else it may be; but a client that names points, and a continuation, have a state close by."""
    if is_expected:
        request.state_points[request.prefix_limit] = StateKind.BRANCH
    elif not request.state_points and request.spec.continuation is None and request.spec.pooling is None:
        request.state_points[request.prefix_limit] = StateKind.PASSING
