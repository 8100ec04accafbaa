"""Sequences and scores of a beam search are those of transformers' `generate(num_beams=…)`.

Two sequences may differ only at a rank where their scores are closer than 1e-4 (of the score, if that is beyond 1).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import Answer, LocalWorker
from tests.doubles.specs import make_spec
from tests.doubles.tiny_models import save_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
TIE = 1e-4
TINY_MODELS = ("qwen3, bias, tied", "mistral, window")
Found = list[tuple[list[int], float]]
"""(generated ids, score), best first."""


@dataclass(frozen=True)
class Search:
    """Parameters of both sides."""

    width: int = 4
    n: int | None = None
    """All by default."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    end_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int = 8

    def sampling(self, **more: Any) -> SamplingParams:
        return SamplingParams(
            beam_width=self.width,
            n=self.n or self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=True,
            stop_token_ids=self.end_ids,
            min_new_tokens=self.min_new_tokens,
            max_new_tokens=self.max_new_tokens,
            **more,
        )


@dataclass
class Subject:
    """A model on both sides."""

    folder: Path
    reference: Any
    prompts: list[list[int]]
    end_ids: tuple[int, int] = (-1, -1)
    """Two that turn up in likely sequences."""
    known: dict[tuple[int, Search], Found] = field(default_factory=dict)

    def expected(self, search: Search) -> list[Found]:
        """What transformers finds for each prompt."""
        for i, prompt in enumerate(self.prompts):
            if (i, search) not in self.known:
                self.known[i, search] = transformers_search(self.reference, prompt, search)
        return [self.known[i, search] for i in range(len(self.prompts))]

    def check(self, search: Search, worker: LocalWorker) -> None:
        answers = worker.generate(self.prompts, search.sampling())
        for answer, expected in zip(answers, self.expected(search)):
            assert_same(found_by(answer), expected)


@torch.inference_mode()
def transformers_search(
    model: Any, prompt: list[int], search: Search, allowed: Callable[[list[int]], list[int]] | None = None
) -> Found:
    """allowed: generated ids -> the ids that may follow."""
    limits: dict[str, Any] = {"max_new_tokens": search.max_new_tokens}
    if search.min_new_tokens:
        limits["min_new_tokens"] = search.min_new_tokens
    if search.end_ids:
        limits["eos_token_id"] = list(search.end_ids)
    if allowed is not None:
        limits["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(ids[len(prompt) :].tolist())
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=search.n or search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **limits,
    )
    if search.width == 1:  # its greedy search has no scores
        (ids,) = output.sequences[:, len(prompt) :].tolist()
        logprobs = [float(step[0].log_softmax(-1)[token]) for step, token in zip(output.logits, ids, strict=True)]
        return [(ids, sum(logprobs) / len(ids) ** search.length_penalty)]
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    rows = output.sequences[:, len(prompt) :].tolist()
    return [(ids[:length], score) for ids, length, score in zip(rows, lengths, output.sequences_scores.tolist())]


def found_by(answer: Answer) -> Found:
    assert answer.beams is not None and answer.beams.done
    assert answer.beams.shortfall is None
    return [(hypothesis.ids.tolist(), hypothesis.score) for hypothesis in answer.beams.results]


def assert_same(found: Found, expected: Found) -> None:
    assert len(found) == len(expected)
    for rank, ((ids, score), (their_ids, their_score)) in enumerate(zip(found, expected)):
        tie = TIE * max(1.0, abs(their_score))  # a negative length_penalty multiplies the rounding too
        assert abs(score - their_score) < tie, f"rank {rank}: {ids} at {score}, transformers {their_ids} {their_score}"
    ours, theirs = {tuple(ids) for ids, _ in found}, {tuple(ids) for ids, _ in expected}
    assert len(ours) == len(found)
    for ids in ours ^ theirs:  # only what ties with the last place may be missing
        score = next(score for other, score in found + expected if tuple(other) == ids)
        assert abs(score - expected[-1][1]) < TIE * max(1.0, abs(score)), f"{ids} at {score} is on one side only"


def make_subject(folder: Path, model: Any, prompts: list[list[int]]) -> Subject:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # the checkpoint's eos would come back where a search has none
    subject = Subject(folder, model, prompts)
    (best, _), (second, _), *_ = subject.expected(Search(width=4, max_new_tokens=8))[0]
    subject.end_ids = best[3], next(token for token in second[1:] if token != best[3])
    return subject


def toy_subject() -> Subject:
    """Held-out prompts of both languages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.toy_model.make_data import conversations

    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    texts = [conversation.prompts()[0][0] for conversation in conversations(seed=99, count=8)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return make_subject(TOY, model, [prompt for prompt in ids if len(prompt) < 250][:3])


def tiny_subject(name: str, folder: Path) -> Subject:
    model = save_reference(name, folder)
    rng = np.random.default_rng(3)
    return make_subject(folder, model, [rng.integers(0, 131, length).tolist() for length in (1, 9, 16, 30, 45)])


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> Callable[[str], Subject]:
    """Each is made once."""
    return functools.cache(
        lambda name: toy_subject() if name == "toy" else tiny_subject(name, tmp_path_factory.mktemp("model"))
    )


@pytest.fixture(params=["toy", *TINY_MODELS])
def subject(request, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(params=TINY_MODELS)
def tiny(request, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_beam_ends_and_length_penalties_match_transformers(
    subject: Subject, length_penalty: float, early_stopping: Any
) -> None:
    """Sequences of several lengths compete, with one end id and with two."""
    worker = LocalWorker(subject.folder)
    for end_ids in (subject.end_ids[:1], subject.end_ids):
        search = Search(length_penalty=length_penalty, early_stopping=early_stopping, end_ids=end_ids)
        subject.check(search, worker)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_ends", [20, 40])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_frequent_end_tokens_match_transformers(tiny: Subject, length_penalty: float, num_ends: int) -> None:
    """Sequences end all the time, so that it matters when the search itself ends."""
    ends = tuple(np.random.default_rng(0).choice(131, num_ends, replace=False).tolist())
    worker = LocalWorker(tiny.folder)
    found: list[list[Found]] = []
    for mode in (False, True, "never"):
        search = Search(4, None, length_penalty, mode, ends, max_new_tokens=14)
        tiny.check(search, worker)
        found.append(tiny.expected(search))
    assert len({len(ids) for ids, _ in itertools.chain(*found[1])}) > 3
    if length_penalty >= 1.0:  # else longer sequences are worse ones, and all modes agree
        assert found[0] != found[1], "the modes should differ, or this compares nothing"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", [1, 2, 4, 32])
def test_beam_widths_match_transformers(subject: Subject, width: int) -> None:
    worker = LocalWorker(subject.folder)
    subject.check(Search(width=width), worker)
    # early_stopping: transformers' greedy search, which width 1 is, ends at the first end.
    subject.check(Search(width=width, end_ids=subject.end_ids, early_stopping=width == 1), worker)


def test_fewer_results_than_beams(subject: Subject) -> None:
    subject.check(Search(width=6, n=2, end_ids=subject.end_ids), LocalWorker(subject.folder))


@pytest.mark.parametrize("min_new_tokens", [1, 5])
def test_min_new_tokens(subject: Subject, min_new_tokens: int) -> None:
    search = Search(end_ids=subject.end_ids, min_new_tokens=min_new_tokens)
    subject.check(search, LocalWorker(subject.folder))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 64},
        {"chunked_prefill_size": 7},
        {"page_size": 16, "chunked_prefill_size": 32},
        {"disable_radix_cache": True},
        {"disable_radix_cache": True, "page_size": 64, "chunked_prefill_size": 40},
        {"max_running_requests": 32},
    ],
    ids=str,
)
def test_beam_search_matches_across_pages_chunks_and_cache(subject: Subject, options: dict[str, Any]) -> None:
    """Twice: the second round finds the prompts in the cache, where there is one."""
    worker = LocalWorker(subject.folder, **{"max_total_tokens": 16384, **options})
    for search in (Search(width=32), Search(end_ids=subject.end_ids), Search(width=32)):
        subject.check(search, worker)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_batch_of_searches_and_samples_matches_separate_runs(subject: Subject, page_size: int) -> None:
    """One batch of searches of several widths and of requests that sample: each says what it says alone."""
    searches = [Search(width=32), Search(end_ids=subject.end_ids), Search(width=2, max_new_tokens=5)]
    worker = LocalWorker(subject.folder, page_size=page_size, max_running_requests=200, max_total_tokens=16384)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    prompts, params = [], []
    for prompt in subject.prompts:
        prompts += [prompt] * 4
        params += [greedy, *(search.sampling() for search in searches)]
    answers = worker.generate(prompts, params)
    expected = [subject.expected(search) for search in [Search(width=1), *searches]]
    for i in range(len(subject.prompts)):
        said, *found = answers[4 * i : 4 * i + 4]
        assert said.tokens == expected[0][i][0][0]
        for answer, theirs in zip(found, expected[1:]):
            assert_same(found_by(answer), theirs[i])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_item_trie_equals_prefix_allowed_tokens_fn(subject: Subject, page_size: int) -> None:
    """Items of one length, so that both sides end by it. Some nodes have one child, some very many."""
    rng = np.random.default_rng(0)
    vocab_size = subject.reference.config.vocab_size
    items = rng.integers(0, vocab_size, (300, 3)).astype(np.int32)
    items[:200, 0] = rng.choice(items[:5, 0], 200)
    trie = ItemTrie.build(items)
    following: dict[tuple[int, ...], list[int]] = {}
    for item in np.unique(items, axis=0).tolist():
        for depth in range(3):
            known = following.setdefault(tuple(item[:depth]), [])
            if item[depth] not in known:
                known.append(item[depth])
    search = Search(width=8, max_new_tokens=3)
    worker = LocalWorker(subject.folder, page_size=page_size)
    specs = [make_spec(f"trie{i}", p, search.sampling(item_trie="items")) for i, p in enumerate(subject.prompts)]
    for answer, prompt in zip(worker.run(specs, items=trie), subject.prompts):
        expected = transformers_search(subject.reference, prompt, search, lambda ids: following[tuple(ids)])
        assert_same(found_by(answer), expected)
        assert answer.beams is not None
        assert {hypothesis.finish.matched for hypothesis in answer.beams.results} == {"item"}


def test_beam_result_logprobs_match_a_forward_pass(subject: Subject) -> None:
    """Every token's own and the likeliest ones, by a forward over each sequence."""
    worker = LocalWorker(subject.folder, chunked_prefill_size=20)
    params = Search(end_ids=subject.end_ids).sampling()
    answers = worker.generate(subject.prompts, params, LogprobOptions(start_len=0, top_k=3))
    for prompt, answer in zip(subject.prompts, answers):
        inputs = np.concatenate([chunk.values for chunk in answer.input_logprobs] or [np.empty(0)])
        assert len(inputs) == len(prompt) - 1
        assert answer.beams is not None
        for hypothesis in answer.beams.results:
            ids = torch.tensor([prompt + hypothesis.ids.tolist()])
            with torch.inference_mode():
                expected = subject.reference(ids).logits[0, :-1].log_softmax(-1)
            own = expected.gather(1, ids[0, 1:, None]).view(-1)
            np.testing.assert_allclose(inputs, own[: len(prompt) - 1], atol=TIE)
            np.testing.assert_allclose(hypothesis.logprobs, own[len(prompt) - 1 :], atol=TIE)
            assert abs(hypothesis.cumulative_logprob - float(hypothesis.logprobs.sum())) < TIE
            best = expected[len(prompt) - 1 :].topk(3)
            assert hypothesis.top_ids is not None and hypothesis.top_logprobs is not None
            np.testing.assert_allclose(hypothesis.top_logprobs, best.values, atol=TIE)
            np.testing.assert_allclose(
                expected[len(prompt) - 1 :].gather(1, torch.from_numpy(hypothesis.top_ids).long()),
                best.values,
                atol=TIE,
            )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_retraction_changes_nothing(subject: Subject, page_size: int, disable_radix_cache: bool) -> None:
    """Again and again a search gives its memory back, and computes again the tokens it had."""
    search = Search(width=8, end_ids=subject.end_ids, max_new_tokens=12)
    worker = LocalWorker(subject.folder, page_size=page_size, disable_radix_cache=disable_radix_cache)
    rng = np.random.default_rng(0)

    def retract_one() -> None:
        running = worker.scheduler._decode.running
        if running and rng.random() < 0.2:
            worker.scheduler._retract(running[int(rng.integers(len(running)))])

    params = search.sampling()
    specs = [make_spec(f"r{i}", p, params) for i, p in enumerate(subject.prompts)]
    answers = worker.run(specs, retract_one)
    assert worker.scheduler.stats().retractions > 3
    for answer, expected in zip(answers, subject.expected(search)):
        assert_same(found_by(answer), expected)


def test_one_character_stop_string_equals_a_set_of_end_ids(subjects: Callable[[str], Subject]) -> None:
    """Every token that holds it ends the sequence, in transformers by eos_token_id."""
    from baton.runtime.text.stop_strings import find_final_stop
    from baton.runtime.text.tokenizer import Tokenizer

    toy, tokenizer, stop = subjects("toy"), Tokenizer.load(TOY), "."
    pieces = {i: tokenizer.token_bytes[i] for i in range(toy.reference.config.vocab_size)}
    end_ids = tuple(i for i, piece in pieces.items() if stop.encode() in piece)
    theirs = toy.expected(Search(end_ids=end_ids, max_new_tokens=12))
    params = Search(max_new_tokens=12).sampling(stop=(stop,))
    matched = 0
    for answer, expected in zip(LocalWorker(TOY).generate(toy.prompts, params), theirs):
        assert_same(found_by(answer), expected)
        assert answer.beams is not None
        for hypothesis in answer.beams.results:
            found = find_final_stop(tokenizer.token_bytes, hypothesis.ids.tolist(), stop)
            if hypothesis.finish.matched == stop:
                assert found is not None and (found.kept_tokens, found.visible_tail) == (
                    hypothesis.kept_tokens,
                    hypothesis.visible_tail,
                )
                matched += 1
            else:
                assert found is None and hypothesis.finish.type == "length"
    assert matched >= 3


@pytest.mark.parametrize("greedy", [True, False])
def test_sampling_with_item_trie_yields_items(subjects: Callable[[str], Subject], greedy: bool) -> None:
    """Greedy, it takes the likeliest child at each node."""
    toy, worker = subjects("toy"), LocalWorker(TOY)
    rng = np.random.default_rng(1)
    items = rng.integers(0, toy.reference.config.vocab_size, (500, 3)).astype(np.int32)
    items[:, 0] = rng.choice(items[:6, 0], 500)
    trie, known = ItemTrie.build(items), {tuple(item) for item in items.tolist()}
    params = [
        SamplingParams(temperature=0.0 if greedy else 2.0, seed=None if greedy else i, item_trie="items")
        for i in range(12)
    ]
    prompts = [toy.prompts[i % len(toy.prompts)] for i in range(12)]
    specs = [make_spec(f"{greedy}{i}", p, sampling) for i, (p, sampling) in enumerate(zip(prompts, params))]
    answers = worker.run(specs, items=trie)
    said = [tuple(answer.tokens) for answer in answers]
    assert set(said) <= known
    assert all(answer.finish is not None and answer.finish.matched == "item" for answer in answers)
    assert greedy or len(set(said)) > len(toy.prompts)
    if greedy:
        for prompt, item in zip(toy.prompts, said):
            for depth in range(3):
                children = sorted({other[depth] for other in known if other[:depth] == item[:depth]})
                with torch.inference_mode():
                    logits = toy.reference(torch.tensor([prompt + list(item[:depth])])).logits[0, -1]
                assert logits[item[depth]] >= logits[children].max() - TIE
