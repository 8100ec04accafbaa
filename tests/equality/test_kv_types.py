"""A KV pool of one-byte numbers under the whole worker: it says what transformers says with an attention function that
rounds K and V in the same way, whatever happens to the KV between two requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_rows import quantize, read_rows
from baton.runtime.config import TierConfig
from baton.runtime.runner.kv_dtype import KV_DTYPES
from baton.scheduler.request_spec import ContinuationSpec, LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.redis_servers import RedisServer
from tests.doubles.specs import make_spec
from tests.doubles.tiny_models import save_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
BY_DEFINITION = "rounded_by_definition"
CLOSE = 0.02
"""Logprobs of two ways to compute the same: where a sum in another order falls on the other side of a step, one number
of a row differs by 1/127 of the row's largest."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out prompts of both languages."""
    from baton.runtime.text.tokenizer import Tokenizer
    from examples.toy_model.make_data import conversations

    tokenizer = Tokenizer.load(TOY)
    texts = [c.prompts()[0][0] for c in conversations(seed=41, count=10)]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [prompt for prompt in ids if len(prompt) < 400][:6]


def serve(kv: str, folder: Path = TOY, **options: Any) -> LocalWorker:
    return LocalWorker(folder, **{"model_options": {"kv_cache_dtype": kv}, **options})


def rounding_attention(kv: str) -> Any:
    """For transformers' attention functions: K and V as they are read from a pool of this type, for each token and
    head."""
    from transformers.integrations.sdpa_attention import repeat_kv

    dtype = KV_DTYPES[kv]

    def attend(module: Any, query, key, value, attention_mask, scaling: float, **_: Any):
        key, value = (read_rows(quantize(x, dtype).view(dtype), x.shape[-1], x.dtype) for x in (key, value))
        key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), None

    return attend


@torch.inference_mode()
def by_definition(kv: str, prompts: list[list[int]], ends: set[int]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of transformers, each from all that comes before it, and their logprobs."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(BY_DEFINITION, rounding_attention(kv))
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32, attn_implementation=BY_DEFINITION).eval()
    found = []
    for prompt in prompts:
        tokens, values = [], []
        while len(tokens) < (GREEDY.max_new_tokens or 0) and not (tokens and tokens[-1] in ends):
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
            values.append(float(logits.log_softmax(-1).max()))
        found.append((tokens, values))
    return found


@pytest.mark.parametrize("kv", ["int8", "fp8", "fp8_e5m2"])
def test_tokens_are_those_of_the_definition(prompts: list[list[int]], kv: str) -> None:
    worker = serve(kv, chunked_prefill_size=64)
    answers = worker.generate(prompts, GREEDY, LogprobOptions(-1, 0))
    expected = by_definition(kv, prompts, set(worker.info["eos_token_ids"]))
    assert worker.info["kv_cache_dtype"] == str(KV_DTYPES[kv]).removeprefix("torch.")
    values = [float(value) for answer in answers for chunk in answer.output_logprobs for value in chunk.values]
    assert [answer.tokens for answer in answers] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(values, [value for _, own in expected for value in own], atol=CLOSE)
    plain = serve("auto").generate(prompts, GREEDY, LogprobOptions(-1, 0))
    others = [float(value) for answer in plain for chunk in answer.output_logprobs for value in chunk.values]
    assert values != others, "something was rounded"


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "chunked_prefill_size": 33},
        {"page_size": 64, "overlap": True, "enable_mixed_chunk": True, "chunked_prefill_size": 100},
    ],
    ids=str,
)
def test_continuations_equal_replays(prompts: list[list[int]], kv: str, options: dict[str, Any]) -> None:
    worker, replay = serve(kv, max_leased_ratio=0.9, **options), serve(kv, disable_radix_cache=True)
    parents = [make_spec(f"p{i}", p, GREEDY, retain_ttl=1e9) for i, p in enumerate(prompts)]
    said = worker.run(parents)
    suffix = prompts[0][:5]
    kept = [
        answer.tokens[:-1] if answer.finish is not None and answer.finish.type == "stop" else answer.tokens
        for answer in said
    ]
    children = [
        make_spec(f"c{i}{keep}", suffix, GREEDY, continuation=ContinuationSpec(f"p{i}", keep_parent=keep))
        for i in range(len(prompts))
        for keep in (True, False)
    ]
    continued = worker.run(children)
    assert [answer.tokens for answer in said] == [a.tokens for a in replay.generate(prompts, GREEDY)]
    expected = replay.generate([prompt + own + suffix for prompt, own in zip(prompts, kept)], GREEDY)
    for number, child in enumerate(continued):
        assert child.tokens == expected[number // 2].tokens
        assert child.inheritance is not None and child.inheritance.path == "handoff"
    worker.scheduler.check_invariants()


def test_transformers_code_stores_the_same(prompts: list[list[int]]) -> None:
    options = {"model_impl": "transformers", "kv_cache_dtype": "int8"}
    foreign = LocalWorker(TOY, model_options=options)
    assert foreign.info["model_impl"] == "transformers" and foreign.info["kv_cache_dtype"] == "int8"
    found, expected = (worker.generate(prompts[:3], GREEDY) for worker in (foreign, serve("int8")))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def said(answers: list[Any]) -> list[tuple]:
    beams = [[] if a.beams is None else [r.ids.tolist() for r in a.beams.results] for a in answers]
    return [(answer.tokens, own) for answer, own in zip(answers, beams)]


@pytest.mark.parametrize("page_size", [1, 64])
def test_kv_that_comes_back_from_host_and_disk_is_what_left(
    prompts: list[list[int]], page_size: int, tmp_path: Path
) -> None:
    """Greedy and sampled requests, and beams, whose prompts have beginnings in common."""
    tiers = TierConfig(host_cache_ratio=4.0, disk_cache_path=str(tmp_path), disk_cache_gb=0.05)
    options: dict[str, Any] = {"page_size": page_size, "max_total_tokens": 1280}
    ways = (
        GREEDY,
        SamplingParams(max_new_tokens=24, temperature=0.7, seed=3),
        SamplingParams(max_new_tokens=12, temperature=0.0, beam_width=3, n=1),
    )

    def requests() -> list[Any]:
        return [make_spec(f"r{i}-{j}", p, way) for i, p in enumerate(prompts) for j, way in enumerate(ways)]

    expected = said(serve("int8", disable_radix_cache=True).run(requests()))
    rng = np.random.default_rng(0)
    for start in range(2):
        worker = serve("int8", tiers=tiers, **options)
        for turn in range(2):
            found = worker.run(requests())
            worker.end_copies()
            assert said(found) == expected
            worker.generate([rng.integers(5, 1600, 600).tolist() for _ in range(3)], GREEDY)
            if turn or start:
                assert sum(answer.found.host + answer.found.disk for answer in found) > 100
        if start:
            assert worker.scheduler.stats().tiers[1].loads.tokens > 0
        worker.close()


def test_pools_of_other_types_are_never_read(tmp_path: Path) -> None:
    prompt = np.random.default_rng(1).integers(5, 1600, 300).tolist()
    tiers = TierConfig(host_cache_ratio=2.0, disk_cache_path=str(tmp_path), disk_cache_gb=0.05)
    found = []
    for kv in ("int8", "fp8", "auto", "bfloat16", "int8"):
        worker = serve(kv, tiers=tiers)
        (answer,) = worker.generate([prompt], GREEDY)
        worker.end_copies()
        worker.close()
        found.append(answer.found.disk)
    assert found == [0, 0, 0, 0, 256]


def test_two_servers_share_blocks_over_redis() -> None:
    prompt = np.random.default_rng(2).integers(5, 1600, 300).tolist()
    redis = RedisServer()
    try:
        tiers = TierConfig(host_cache_ratio=2.0, remote_cache_url=redis.url)
        one, other = serve("int8", tiers=tiers), serve("int8", tiers=tiers)
        (first,) = one.generate([prompt], GREEDY)
        one.end_copies()
        (second,) = other.generate([prompt], GREEDY)
        assert second.tokens == first.tokens and second.found.remote == 256
        one.close()
        other.close()
    finally:
        redis.stop()


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_next", "lfm2"])
def test_other_architectures_stay_close_to_their_own_replay(name: str, tmp_path: Path) -> None:
    """Windows in a pool of their own, sinks, and layers with recurrent states beside those with K and V. Random models
    have no margins, so logprobs of the prompt are compared."""
    save_reference(name, tmp_path)
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 131, 80).tolist()
    prompts = [stem[:70] + rng.integers(0, 131, count).tolist() for count in (3, 40, 21)]
    wanted = LogprobOptions(0, 0)
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    plain = serve("auto", tmp_path, disable_radix_cache=True).generate(prompts, one, wanted)
    replay = serve("int8", tmp_path, disable_radix_cache=True).generate(prompts, one, wanted)
    options = {"page_size": 16, "chunked_prefill_size": 16, "max_total_tokens": 1024, "swa_full_tokens_ratio": 0.2}
    worker = serve("int8", tmp_path, **options)
    assert (worker.scheduler._memory.windows is not None) == (name in ("gemma3", "gpt_oss"))

    def values(answers: list[Any]) -> np.ndarray:
        return np.concatenate([chunk.values for a in answers for chunk in (*a.input_logprobs, *a.output_logprobs)])

    found = values(worker.generate(prompts, one, wanted))
    np.testing.assert_allclose(found, values(replay), atol=CLOSE)
    assert 0 < np.abs(values(replay) - values(plain)).max() < 1
    again = worker.generate([prompt[:-1] for prompt in prompts], one, LogprobOptions(-1, 0))
    assert sum(answer.cached_tokens for answer in again) > 0
    worker.scheduler.check_invariants()
