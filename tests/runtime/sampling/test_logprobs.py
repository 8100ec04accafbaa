from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.runtime.runner.device_copy import to_host
from baton.runtime.sampling import logprobs
from baton.runtime.sampling.logprobs import LogprobsInFlight, TokenLogprobs, input_logprobs, output_logprobs

VOCAB = 60


def check(result: TokenLogprobs, logits: torch.Tensor, ids: list[int], k: int) -> None:
    """Against log_softmax and a full, stable sort."""
    expected = logits.double().log_softmax(-1)
    order = expected.sort(dim=-1, descending=True, stable=True)
    assert (result.ids.dtype, result.values.dtype) == (np.int32, np.float32)
    assert (result.top_ids.dtype, result.top_values.dtype) == (np.int32, np.float32)
    assert result.ids.tolist() == ids
    np.testing.assert_allclose(result.values, expected[range(len(ids)), ids], atol=1e-5)
    assert np.array_equal(result.top_ids, order.indices[:, :k])
    np.testing.assert_allclose(result.top_values, order.values[:, :k], atol=1e-5)


def read(scores: LogprobsInFlight, ids: list[np.ndarray]) -> list[TokenLogprobs]:
    """As a finished step does it."""
    return scores.read_logprobs(to_host(scores.tensors).wait(), ids)


def of_outputs(logits: torch.Tensor, ids: torch.Tensor, top_ks: list[int]) -> list[TokenLogprobs]:
    return read(output_logprobs(logits, ids, [1] * len(ids), top_ks), list(ids.numpy().astype(np.int32).reshape(-1, 1)))


def of_inputs(hidden: torch.Tensor, targets: list[np.ndarray], top_ks: list[int], head) -> list[TokenLogprobs]:
    return read(input_logprobs(hidden, targets, top_ks, head), targets)


def random_logits(seed: int, n: int) -> torch.Tensor:
    return (torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5).bfloat16().float()


def test_output_logprobs_with_a_top_k_for_each_row():
    logits, ids, top_ks = random_logits(0, 4), torch.tensor([3, 59, 0, 7]), [0, 5, 1, 100]
    results = of_outputs(logits, ids, top_ks)
    for i, k in enumerate(top_ks):
        check(results[i], logits[i : i + 1], [int(ids[i])], min(k, VOCAB))
    assert of_outputs(logits[:0], ids[:0], []) == []


@pytest.mark.parametrize("prompt_slice", [1, 3, 256])
def test_input_logprobs_of_ragged_requests(monkeypatch, prompt_slice):
    monkeypatch.setattr(logprobs, "PROMPT_SLICE", prompt_slice)
    generator = torch.Generator().manual_seed(1)
    head, rows = torch.randn(8, VOCAB, generator=generator), []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return hidden @ head

    lengths, top_ks = [5, 1, 0, 9], [2, 0, 3, 4]
    hidden = torch.randn(sum(lengths), 8, generator=generator)
    targets = [np.arange(n, dtype=np.int32) + i for i, n in enumerate(lengths)]
    results = of_inputs(hidden, targets, top_ks, compute_logits)
    assert max(rows) <= prompt_slice and sum(rows) == sum(lengths)
    start = 0
    for result, target, k in zip(results, targets, top_ks):
        check(result, (hidden @ head)[start : start + len(target)], target.tolist(), k)
        start += len(target)


def test_row_slices_change_no_result(monkeypatch):
    logits, ids = random_logits(2, 10), torch.arange(10)
    whole = of_outputs(logits, ids, [3] * 10)
    monkeypatch.setitem(logprobs.SLICE_ELEMENTS, "cpu", 3 * VOCAB)
    for a, b in zip(whole, of_outputs(logits, ids, [3] * 10)):
        assert np.array_equal(a.values, b.values) and np.array_equal(a.top_ids, b.top_ids)


def test_targets_and_hidden_states_must_match():
    with pytest.raises(ValueError, match="3 hidden states for 2 target tokens"):
        input_logprobs(torch.zeros(3, 8), [np.zeros(2, np.int32)], [0], lambda h: h)


def test_results_do_not_alias_the_logits():
    logits = random_logits(3, 1)
    result = of_outputs(logits, torch.tensor([4]), [2])[0]
    before = result.values.copy()
    logits.zero_()
    assert np.array_equal(result.values, before)


NAMED = [(3, 59), (), (7, 0, 7, 11), (1,)]


def test_output_logprobs_of_named_tokens():
    logits, ids, top_ks = random_logits(4, 4), torch.tensor([3, 59, 0, 7]), [2, 0, 1, 0]
    scores = output_logprobs(logits, ids, [1] * len(ids), top_ks, named=NAMED)
    results = read(scores, list(ids.numpy().astype(np.int32).reshape(-1, 1)))
    expected = logits.double().log_softmax(-1)
    for i, (result, named, k) in enumerate(zip(results, NAMED, top_ks)):
        check(result, logits[i : i + 1], [int(ids[i])], k)
        if not named:
            assert result.named_values is None
        else:
            assert result.named_values is not None and result.named_values.dtype == np.float32
            np.testing.assert_allclose(result.named_values, expected[i : i + 1, list(named)], atol=1e-5)
            none = result.first(0).named_values
            assert none is not None and none.shape == (0, len(named))


@pytest.mark.parametrize("prompt_slice", [1, 4, 256])
def test_input_logprobs_of_named_tokens(monkeypatch, prompt_slice):
    monkeypatch.setattr(logprobs, "PROMPT_SLICE", prompt_slice)
    monkeypatch.setitem(logprobs.SLICE_ELEMENTS, "cpu", 3 * VOCAB)
    generator = torch.Generator().manual_seed(1)
    head, lengths, top_ks = torch.randn(8, VOCAB, generator=generator), [5, 3, 0, 9], [2, 0, 3, 4]
    hidden = torch.randn(sum(lengths), 8, generator=generator)
    targets = [np.arange(n, dtype=np.int32) + i for i, n in enumerate(lengths)]
    scores = input_logprobs(hidden, targets, top_ks, lambda states: states @ head, [True, False, True, False], NAMED)
    start, expected = 0, (hidden @ head).log_softmax(-1)
    for result, target, k, named in zip(read(scores, targets), targets, top_ks, NAMED):
        part = slice(start, start + len(target))
        check(result, (hidden @ head)[part], target.tolist(), k)
        assert (result.named_values is None) is not bool(named)
        assert (result.ranks is None) is (k in (0, 4))
        if result.named_values is not None:
            np.testing.assert_allclose(result.named_values, expected[part][:, list(named)], atol=1e-5)
        start += len(target)


def test_requests_without_named_tokens_compute_no_named_logprobs():
    logits, ids = random_logits(5, 2), torch.tensor([3, 4])
    assert len(output_logprobs(logits, ids, [1, 1], [1, 0]).tensors) == 3
    assert len(input_logprobs(torch.zeros(2, VOCAB), [np.zeros(2, np.int32)], [1], lambda h: h).tensors) == 3


def test_a_row_of_nan_logits_has_no_named_logprobs():
    logits = random_logits(6, 2)
    logits[1, 5] = torch.nan
    first, second = read(
        output_logprobs(logits, torch.tensor([0, 0]), [1, 1], [0, 0], [(1,), (1,)]), [np.zeros(1, np.int32)] * 2
    )
    assert first.named_values is not None and np.isfinite(first.named_values).all()
    assert second.named_values is not None and np.isnan(second.named_values).all()


@pytest.mark.equality
def test_logprobs_equal_transformers():
    """Logprobs of a prompt and of the token after it, from hidden states, as the model's own forward gives them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 500, (1, 300))
    with torch.inference_mode():
        output = model(prompt, output_hidden_states=True)
        expected = output.logits[0].log_softmax(-1)
        hidden = output.hidden_states[-1][0]
    result = of_inputs(hidden[:-1], [prompt[0, 1:].numpy().astype(np.int32)], [5], model.lm_head)[0]
    np.testing.assert_allclose(result.values, expected[range(299), prompt[0, 1:]], atol=1e-4)
    np.testing.assert_allclose(result.top_values, expected[:-1].topk(5).values, atol=1e-4)
    next_id = output.logits[:, -1].argmax(-1)
    last = of_outputs(output.logits[:, -1], next_id, [5])[0]
    np.testing.assert_allclose(last.values, expected[-1, next_id], atol=1e-4)
    assert np.array_equal(last.top_ids[0], expected[-1].topk(5).indices)


@pytest.mark.parametrize("prompt_slice", [1, 3, 256])
def test_ranks_of_requests_that_want_them(monkeypatch, prompt_slice):
    """Against a full sort; equal logits share the best place."""
    monkeypatch.setattr(logprobs, "PROMPT_SLICE", prompt_slice)
    monkeypatch.setitem(logprobs.SLICE_ELEMENTS, "cpu", 2 * VOCAB)
    lengths = [4, 3, 5]
    hidden = random_logits(3, sum(lengths)).round()  # many ties
    targets = [np.arange(n, dtype=np.int32) * 7 + i for i, n in enumerate(lengths)]
    for ranked in ([True, False, True], [False] * 3, [True] * 3):
        scores = input_logprobs(hidden, targets, [0, 2, 1], lambda rows: rows, ranked)
        start = 0
        for result, target, wanted in zip(read(scores, targets), targets, ranked):
            if wanted:
                assert result.ranks is not None and result.ranks.dtype == np.int32
                for row, token, rank in zip(hidden[start:], target.tolist(), result.ranks.tolist()):
                    assert row.sort(descending=True).values.tolist().index(row[token].item()) + 1 == rank
            else:
                assert result.ranks is None
            start += len(target)
