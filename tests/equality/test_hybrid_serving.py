"""What the whole worker says with models that keep recurrent states, computed by transformers' code, against
transformers alone, token for token: under every page size, chunk size and pressure. test_serving.py has those that
Baton's own code computes.

A token may differ only where transformers' own two best logits are closer than TIE."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.tiny_models import STATEFUL, make_reference
from tests.equality.test_serving import Reference, assert_same_tokens

pytestmark = pytest.mark.equality

TIE = 1e-3
NEW_TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
FOREIGN = {"model_impl": "transformers"}
KINDS = ["qwen3_next", "granite_hybrid", "lfm2", "mamba2", "jamba"]
"""One of each: gated delta net, Mamba 2 and experts, short convolution, no attention at all, Mamba 1."""


class Models:
    """Each is made once: its folder, and what it says to the prompts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, list[Reference]]] = {}

    def __getitem__(self, key: str) -> tuple[Path, list[Reference]]:
        if key not in self._made:
            name, architecture, changes = STATEFUL[key]
            reference = make_reference(name, changes, architecture=architecture or f"{name}ForCausalLM")
            reference.save_pretrained(self._folder / key)
            rng = random.Random(5)
            stem = [rng.randrange(131) for _ in range(70)]
            prompts = [
                stem[: rng.randrange(70)] + [rng.randrange(131) for _ in range(rng.randrange(1, 40))] for _ in range(6)
            ]
            self._made[key] = self._folder / key, [greedy(reference, prompt) for prompt in prompts]
        return self._made[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@torch.inference_mode()
def greedy(reference: Any, prompt: list[int]) -> Reference:
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # token 0 is a token like others
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).float().topk(2).values
    return Reference(prompt, output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist(), [], [])


def check(models: Models, key: str, **options: Any) -> LocalWorker:
    folder, references = models[key]
    worker = LocalWorker(folder, model_options=FOREIGN, **options)
    for _ in range(2):  # the second time, prefixes with states are cached
        answers = worker.generate([reference.prompt for reference in references], GREEDY)
        for answer, reference in zip(answers, references, strict=True):
            assert_same_tokens(answer.tokens, reference, TIE)
    return worker


@pytest.mark.parametrize("key", STATEFUL)
def test_every_family_says_what_transformers_says(models, key):
    check(models, key, chunked_prefill_size=33, max_states=200)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 1, "max_running_requests": 3},
        {"page_size": 16, "chunked_prefill_size": 20},
        {"page_size": 64, "max_total_tokens": 320, "max_states": 12},
        {"disable_radix_cache": True, "chunked_prefill_size": 7},
        {"max_states": 6},
    ],
    ids=str,
)
def test_pages_chunks_and_pressure_change_nothing(models, key, options):
    check(models, key, **({"max_states": 200} | options))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("key", KINDS)
def test_next_turn_resumes_where_the_last_one_ended(models, key, page_size):
    folder, references = models[key]
    worker = check(models, key, page_size=page_size, max_states=200)
    prompts = [[*reference.prompt, *reference.tokens, 5, 6, 7] for reference in references]
    found = worker.generate(prompts, GREEDY)
    # The last token of the turn before was sampled, and never computed.
    assert [answer.cached_tokens for answer in found] == [len(prompt) - 4 for prompt in prompts]
    anew = LocalWorker(folder, model_options=FOREIGN, disable_radix_cache=True)
    assert [answer.tokens for answer in anew.generate(prompts, GREEDY)] == [answer.tokens for answer in found]


def test_few_slots_bound_the_requests_that_run(models):
    worker = check(models, "mamba2", max_states=4, max_running_requests=8)
    assert worker.info["scheduler"]["max_states"] == 4


@pytest.mark.parametrize("key", ["lfm2", "mamba2"])
def test_number_of_states_comes_from_memory(models, key):
    worker = check(models, key)
    assert worker.info["scheduler"]["max_states"] > 100
