"""A request that was answered before is answered again by drafts, and the client hears of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.server_config import UsageError

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=["off", "on"], ids=["plain", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options: dict[str, Any] = {"max_total_tokens": 4096, "overlap_schedule": request.param}
    with Engine(model_path=TOY, device="cpu", speculative_algorithm="NGRAM", **options) as running:
        yield running


def ask(engine: Engine, **more: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 16}
    return engine.generate(TASK, sampling_params=sampling, **more)


def until(drafted: Callable[[Any], bool], again: Callable[[], Any]) -> Any:
    """The first answer for which that holds. Where other processes take the cores, steps with drafts may look too dear,
    and are left out for up to 64 steps."""
    for _ in range(40):
        if drafted(answer := again()):
            return answer
    raise AssertionError("nothing was drafted in 40 answers")


def test_meta_info_reports_accepted_drafts(engine: Engine) -> None:
    first = ask(engine)
    again = until(lambda answer: answer["meta_info"].get("spec_accept_token_num", 0) >= 8, lambda: ask(engine))
    assert again["text"] == first["text"] and again["output_ids"] == first["output_ids"]
    meta = again["meta_info"]
    assert meta["finish_reason"] == first["meta_info"]["finish_reason"]
    assert meta["completion_tokens"] == first["meta_info"]["completion_tokens"]
    assert meta["spec_verify_ct"] >= 1 and meta["spec_accept_token_num"] >= 8
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]


def test_stream_event_may_carry_several_tokens_with_logprobs(engine: Engine) -> None:
    whole = ask(engine, return_logprob=True)
    events = until(
        lambda events: "spec_verify_ct" in events[-1]["meta_info"],
        lambda: list(ask(engine, return_logprob=True, stream=True)),
    )
    assert len(events) < len(whole["output_ids"])
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    found, expected = (each["meta_info"]["output_token_logprobs"] for each in (events[-1], whole))
    assert [row[1:] for row in found] == [row[1:] for row in expected]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=1e-4)
    assert [("spec_verify_ct" in event["meta_info"]) for event in events] == [False] * (len(events) - 1) + [True]


def test_unknown_speculative_algorithms_are_refused() -> None:
    with pytest.raises(UsageError, match="--speculative-algorithm is 'EAGLE'; use one of off, NGRAM"):
        Engine(model_path=TOY, speculative_algorithm="EAGLE")
    with pytest.raises(UsageError, match="--speculative-num-draft-tokens is 0"):
        Engine(model_path=TOY, speculative_num_draft_tokens=0)
