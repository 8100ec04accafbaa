"""The scheduler of a simulation has its own decode part, and only that one."""

from __future__ import annotations

from baton.entrypoints.simulate.simulated_engine import build_engine
from baton.runtime.pool_sizes import PoolSizes
from baton.scheduler.batch import StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.specs import make_spec

LONG = SamplingParams(max_new_tokens=20)


def test_recovery_removes_requests_from_the_simulated_decode() -> None:
    config = SchedulerConfig(context_length=64, max_running_requests=4, max_leased_requests=4, chunked_prefill_size=64)
    pools = PoolSizes(tokens=256, page_size=1, bytes_per_token=1)
    engine = build_engine(config, pools, lambda requests: [1] * len(requests))
    (bad,) = engine.scheduler.add_request(make_spec("bad", [5] * 8, LONG), 0.0)
    (good,) = engine.scheduler.add_request(make_spec("good", [6] * 8, LONG), 0.0)
    batch = engine.scheduler.next_batch(0.0)
    assert batch is not None
    engine.scheduler.process_result(StepResult.of_rows([[9]] * len(batch)), 0.0)
    assert engine.burst.running == [bad, good]
    (event,) = engine.scheduler.contain(RuntimeError("a fault"), [bad], 0.0)
    assert event.request is bad and engine.burst.running == [good]
    assert engine.scheduler.next_batch(0.0) is not None
