"""What the whole worker says, against transformers, token for token: under every page size, chunk size and pressure.

On the random models a token may differ only where transformers' own two best logits are closer than 1e-4; the trained
toy model gets no such allowance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.tiny_models import MODELS, save_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
TIE = 1e-4
CLOSE = 2e-4
"""Between logprobs, as every batch adds up in another order: 1.14e-4 was seen on AVX2, of a random mixture of experts
with recurrent states."""


@dataclass
class Reference:
    """Greedy output of transformers for one prompt."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    """Between the two best logits, at each token."""
    logprobs: list[float]
    prompt_logprobs: list[float]
    """Logprobs of the prompt's tokens from position 1 on."""


@torch.inference_mode()
def reference_of(model: Any, prompt: list[int], num_tokens: int, end_ids: frozenset[int]) -> Reference:
    """Models with recurrent states compute every token anew: transformers' steps of one token do not all agree with its
    own whole prompts (Bamba's do not)."""
    result = Reference(prompt, [], [], [], [])
    ids, past = torch.tensor([prompt]), None
    for _ in range(num_tokens):
        output = model(ids, use_cache=False) if model._is_stateful else model(ids, past_key_values=past, use_cache=True)
        logprobs = output.logits[0].float().log_softmax(-1)
        if not result.tokens:
            result.prompt_logprobs = logprobs[:-1].gather(1, ids[0, 1:, None]).view(-1).tolist()
        past = None if model._is_stateful else output.past_key_values
        best = logprobs[-1].topk(2)
        result.tokens.append(int(best.indices[0]))
        result.gaps.append(float(best.values[0] - best.values[1]))
        result.logprobs.append(float(best.values[0]))
        if result.tokens[-1] in end_ids:
            break
        next_id = best.indices[:1][None]
        ids = torch.cat((ids, next_id), 1) if model._is_stateful else next_id
    return result


def assert_same_tokens(tokens: list[int], reference: Reference, allowed_gap: float) -> None:
    for position, (mine, theirs) in enumerate(zip(tokens, reference.tokens)):
        if mine != theirs:
            gap = reference.gaps[position]
            assert gap < allowed_gap, f"token {position} is {mine}, transformers says {theirs} with a gap of {gap}"
            return
    assert len(tokens) == len(reference.tokens)


# -- the toy model ------------------------------------------------------


@pytest.fixture(scope="module")
def toy_references() -> list[Reference]:
    """Held-out prompts of both languages; later turns of a conversation share the earlier ones as a prefix."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.toy_model.make_data import conversations

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    prompts = [p for c in conversations(seed=77, count=8) for p, _ in c.prompts()]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    end_ids = model.generation_config.eos_token_id
    ends = frozenset(end_ids if isinstance(end_ids, list) else [end_ids])
    return [reference_of(model, prompt, 60, ends) for prompt in ids if len(prompt) < 500]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 16},
        {"page_size": 64},
        {"disable_radix_cache": True},
        {"disable_radix_cache": True, "page_size": 64, "chunked_prefill_size": 50},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 37, "page_size": 16},
        {"schedule_policy": "lpm", "max_running_requests": 3},
    ],
    ids=str,
)
def test_toy_model_generation_matches_transformers(toy_references: list[Reference], options: dict) -> None:
    worker = LocalWorker(TOY, **{"max_total_tokens": 16384, **options})
    if options.get("chunked_prefill_size") == 1:
        toy_references = [r for r in toy_references if len(r.prompt) < 150]
    prompts = [reference.prompt for reference in toy_references]
    for round_number in range(2):  # the second round finds everything in the cache
        answers = worker.generate(prompts, SamplingParams(max_new_tokens=60, temperature=0.0))
        for answer, reference in zip(answers, toy_references):
            assert answer.tokens == reference.tokens
        if round_number == 1 and not options.get("disable_radix_cache"):
            page = options.get("page_size", 1)
            for answer, prompt in zip(answers, prompts):  # one that continues another has a part of the last page too
                whole = (len(prompt) - 1) // page * page
                assert whole <= answer.cached_tokens < whole + page


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_retraction_changes_nothing(toy_references: list[Reference], page_size: int) -> None:
    prompts = [r.prompt for r in toy_references if len(r.prompt) < 150][:6]
    sampling = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)
    roomy = LocalWorker(TOY, page_size=page_size).generate(prompts, sampling)
    # Admission keeps only a share of max_new_tokens free, and nobody stops early: memory must run out.
    tight = LocalWorker(TOY, max_total_tokens=576, page_size=page_size)
    answers = tight.generate(prompts, sampling)
    assert tight.scheduler.stats().retractions > 0
    assert [a.tokens for a in answers] == [a.tokens for a in roomy]
    for answer, reference in zip(answers, (r for r in toy_references if len(r.prompt) < 150)):
        assert answer.tokens[: len(reference.tokens)] == reference.tokens


def test_toy_model_logprobs_match_transformers(toy_references: list[Reference]) -> None:
    worker = LocalWorker(TOY, max_total_tokens=16384, chunked_prefill_size=64)
    references = toy_references[:6]
    options = LogprobOptions(start_len=0, top_k=2)
    answers = worker.generate(
        [r.prompt for r in references], SamplingParams(max_new_tokens=60, temperature=0.0), options
    )
    for answer, reference in zip(answers, references):
        assert_logprobs(answer, reference)


@pytest.mark.parametrize("options", [{"chunked_prefill_size": 64}, {"page_size": 16}], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_toy_model_prompt_logprobs_match_transformers(
    toy_references: list[Reference], options: dict, overlap: bool
) -> None:
    worker = LocalWorker(TOY, max_total_tokens=16384, overlap=overlap, **options)
    references = toy_references[:6]
    sampling = SamplingParams(max_new_tokens=0)
    for answer, reference in zip(
        worker.generate([r.prompt for r in references], sampling, LogprobOptions(start_len=0)), references
    ):
        assert answer.tokens == [] and answer.output_logprobs == []
        assert_input_logprobs(answer, reference)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_greedy_picks_the_likeliest_allowed_token(overlap: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()
    rng = random.Random(11)
    prompts = [[rng.randrange(1000) for _ in range(30)] for _ in range(6)]
    params = [
        SamplingParams(max_new_tokens=8, temperature=0.0, allowed_token_ids=tuple(rng.sample(range(1600), 40)))
        for _ in prompts
    ]
    answers = LocalWorker(TOY, overlap=overlap).generate(prompts, params)
    for prompt, few, answer in zip(prompts, params, answers):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        allowed = logits[:, list(few.allowed_token_ids)]
        assert set(answer.tokens) <= set(few.allowed_token_ids) and len(answer.tokens) == 8
        assert (logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] >= allowed.max(1).values - TIE).all()


def assert_logprobs(answer, reference: Reference) -> None:
    outputs = np.concatenate([chunk.values for chunk in answer.output_logprobs])
    np.testing.assert_allclose(outputs, reference.logprobs[: len(outputs)], atol=CLOSE)
    assert_input_logprobs(answer, reference)
    for chunk in answer.output_logprobs:
        assert chunk.top_ids[0, 0] == chunk.ids[0] and chunk.top_values[0, 0] >= chunk.top_values[0, 1]


def assert_input_logprobs(answer, reference: Reference) -> None:
    inputs = np.concatenate([chunk.values for chunk in answer.input_logprobs])
    assert len(inputs) == len(reference.prompt) - 1
    np.testing.assert_allclose(inputs, reference.prompt_logprobs, atol=CLOSE)


# -- random models of every architecture ------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS.keys())
def random_model(request, tmp_path_factory) -> tuple[Path, list[Reference]]:
    folder = tmp_path_factory.mktemp("model")
    model = save_reference(request.param, folder)
    rng = random.Random(5)
    stem = [rng.randrange(131) for _ in range(70)]
    prompts = [stem[: rng.randrange(70)] + [rng.randrange(131) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    return folder, [reference_of(model, prompt, 16, frozenset()) for prompt in prompts]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 16, "chunked_prefill_size": 20},
        {"page_size": 64, "max_total_tokens": 256},
        {"disable_radix_cache": True, "chunked_prefill_size": 7},
    ],
    ids=str,
)
def test_random_model_generation_matches_transformers(
    random_model: tuple[Path, list[Reference]], options: dict
) -> None:
    folder, references = random_model
    worker = LocalWorker(folder, **options)
    prompts = [reference.prompt for reference in references]
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0)
    for _ in range(2):
        for answer, reference in zip(worker.generate(prompts, sampling), references):
            assert_same_tokens(answer.tokens, reference, TIE)


def test_random_model_logprobs_match_transformers(random_model: tuple[Path, list[Reference]]) -> None:
    folder, references = random_model
    worker = LocalWorker(folder, chunked_prefill_size=25)
    answers = worker.generate(
        [r.prompt for r in references], SamplingParams(max_new_tokens=1, temperature=0.0), LogprobOptions(0, 2)
    )
    for answer, reference in zip(answers, references):
        assert_logprobs(answer, reference)


# -- many prompts at once ------------------------------------------------------


def random_prefix_tree(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that are nodes of a random tree: each extends a random earlier one."""
    prompts: list[list[int]] = [[rng.randrange(1000) for _ in range(3)]]
    while len(prompts) < count:
        parent = rng.choice(prompts)
        child = parent + [rng.randrange(1000) for _ in range(rng.randrange(1, 24))]
        if len(child) < 250:
            prompts.append(child)
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("page_size", [1, 16])
def test_batch_of_400_tree_prompts_equals_sequential_runs(page_size: int) -> None:
    prompts = random_prefix_tree(random.Random(1), 400)
    sampling = [SamplingParams(max_new_tokens=4, temperature=0.0)] * 400
    sampled = [SamplingParams(max_new_tokens=4, temperature=0.8, top_p=0.9, seed=i) for i in range(400)]
    together = LocalWorker(TOY, max_total_tokens=8192, page_size=page_size)
    alone = LocalWorker(TOY, max_total_tokens=8192, disable_radix_cache=True)
    for params in (sampling, sampled):
        batch = together.generate(prompts, params)
        assert sum(a.cached_tokens for a in batch) > 0
        for prompt, own, answer in zip(prompts, params, batch):
            (single,) = alone.generate([prompt], own)
            assert answer.tokens == single.tokens
