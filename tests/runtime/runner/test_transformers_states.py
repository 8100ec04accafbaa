"""Hybrid and recurrent models computed by transformers' own code on Baton's pools: equal to transformers alone, however
a sequence is cut into steps and wherever its states are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs, TierConfig
from baton.runtime.runner import model_runner
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.runner.transformers_model import TransformersModel
from baton.runtime.runner.transformers_states import find_mixers
from baton.runtime.tier_setup import make_host_pool
from tests.doubles.model_driver import DrivenSequence, ModelDriver
from tests.doubles.tiny_models import STATEFUL, TINY, make_reference

pytestmark = pytest.mark.equality

MAMBA_1 = {"jamba", "mamba", "falcon_mamba", "zamba"}
"""Their tokens are computed one by one behind a state, as transformers' code starts longer pieces from zeros."""
RECURRENT = {"mamba2", "mamba", "falcon_mamba"}
"""Their layers keep no K and V."""


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The form of a recurrence for many tokens rounds otherwise than that for one."""
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    args = ModelArgs(
        model_path=str(folder), device="cpu", model_impl="transformers", dtype=settings.pop("dtype", "auto")
    )
    given: dict[str, Any] = {"page_size": 1, "max_total_tokens": 4096, "max_states": 40} | settings
    return ModelRunner(args, context_length=0, num_rows=8, **given)


@pytest.fixture(scope="module", params=STATEFUL.keys())
def model(request, tmp_path_factory) -> tuple[str, Any, Path, ModelRunner]:
    name, architecture, changes = STATEFUL[request.param]
    folder = tmp_path_factory.mktemp("model")
    reference = make_reference(name, changes, architecture=architecture or f"{name}ForCausalLM")
    reference.save_pretrained(folder)
    return request.param, reference, folder, make_runner(folder)


def random_ids(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY["vocab_size"], length)


@torch.no_grad()
def expected_logits(reference: Any, ids: np.ndarray) -> torch.Tensor:
    """float32 [tokens, vocab]: of the whole sequence at once, without a cache."""
    return reference(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].float()


def check_step(
    driver: ModelDriver, reference: Any, spans: list[tuple[DrivenSequence, int]], **how: Any
) -> list[torch.Tensor]:
    """Compute the step and compare the logits of every token. Returns them."""
    starts = [sequence.computed for sequence, _ in spans]
    output = driver.step(spans, logprob_starts=[0] * len(spans), **how)
    assert output.logprob_hidden is not None
    found = driver.runner.compute_logits(output.logprob_hidden).split([count for _, count in spans])
    for row, (start, (sequence, count)) in enumerate(zip(starts, spans, strict=True)):
        expected = expected_logits(reference, sequence.ids[: start + count])[start:]
        assert_close(found[row], expected)
    return list(found)


def test_matrix_products_are_batons_except_of_weights_that_the_modelling_reads(model):
    name, _, _, runner = model
    served = runner._model
    assert isinstance(served, TransformersModel)
    own = {each.rpartition(".")[2] for each, layer in served._base.named_modules() if type(layer) is torch.nn.Linear}
    assert own == ({"dt_proj"} if name in MAMBA_1 - {"zamba"} else set())
    assert served._linears


def test_what_the_layers_keep(model):
    name, _, _, runner = model
    served = runner._model
    assert isinstance(served, TransformersModel) and runner.state_pool is not None and runner.max_states == 40
    assert runner.state_pool.bytes_per_state > 0 and len(runner.state_pool.layers) == len(served.state_shapes) >= 2
    assert {layer.one_by_one for layer in served._state_layers} == {name in MAMBA_1}
    assert (runner.kv_pool.bytes_per_token == 0) == (name in RECURRENT)
    mixers = tuple(f"{served._base_name}.{mixer}." for mixer in find_mixers(served._base))
    assert len(mixers) == len(served.state_shapes)
    assert not any(target.startswith(mixers) for target in served.adapter_targets()), "their rows are not the step's"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 7, 64, 70])
def test_chunks_of_every_size(model, size):
    _, reference, _, runner = model
    driver = ModelDriver(runner, seed=size)
    sequence = driver.open(random_ids(70, seed=1))
    found = []
    while (left := len(sequence.ids) - sequence.computed) > 0:
        output = driver.step([(sequence, min(size, left))], logprob_starts=[0])
        assert output.logprob_hidden is not None
        found.append(runner.compute_logits(output.logprob_hidden))
    assert_close(torch.cat(found), expected_logits(reference, sequence.ids))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("page_size", "in_place"), [(1, True), (1, False), (16, True)])
def test_rows_of_all_kinds_share_steps(model, page_size, in_place):
    _, reference, folder, runner = model
    if page_size > 1:
        runner = make_runner(folder, page_size=page_size)
    driver = ModelDriver(runner, page_size=page_size, seed=3)
    a, b, c = (driver.open(random_ids(length, seed=length)) for length in (70, 33, 7))
    for spans in ([(a, 30)], [(b, 1), (a, 10), (c, 3)], [(c, 1), (a, 1), (b, 1)], [(b, 30), (c, 2), (a, 27)], [(a, 1)]):
        check_step(driver, reference, spans, in_place=in_place)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1, 1], [2, 1, 1, 2, 5], [1, 2, 3, 1, 4]], ids=str)
def test_pieces_shorter_than_the_window(model, sizes):
    """Of two rows that do the same at different times."""
    _, reference, _, runner = model
    driver = ModelDriver(runner, seed=4)
    first, second = (driver.open(random_ids(12, seed=seed)) for seed in (5, 6))
    check_step(driver, reference, [(first, sizes[0])])
    for mine, other in zip(sizes[1:], sizes):
        check_step(driver, reference, [(second, other), (first, mine)])


def test_states_inside_of_a_step_are_those_of_their_tokens(model):
    """Sequences that fork there go on as if they had computed the tokens themselves."""
    _, reference, _, runner = model
    driver = ModelDriver(runner, seed=7)
    a, b = driver.open(random_ids(50, seed=8)), driver.open(random_ids(20, seed=9))
    check_step(driver, reference, [(b, 4)])
    check_step(driver, reference, [(a, 40), (b, 9)], ends=[[1, 2, 17, 39], [5]])
    forks = [driver.fork(a, length, random_ids(6, seed=length)) for length in (1, 2, 17, 39)]
    forks.append(driver.fork(b, 9, random_ids(4, seed=10)))
    check_step(driver, reference, [(fork, 1 + number % 3) for number, fork in enumerate(forks)])
    check_step(driver, reference, [(a, 10), *((fork, 2) for fork in forks), (b, 7)], ends=[[4], *[[]] * 5, [1, 2]])
    again = driver.fork(a, 17, random_ids(3, seed=11))
    check_step(driver, reference, [(again, 3)])


def test_greedy_outputs_are_those_of_generate(model):
    name, reference, _, runner = model
    driver = ModelDriver(runner, seed=12)
    prompts = [random_ids(length, seed=length) for length in (2, 23, 41)]
    sequences = [driver.open(ids) for ids in prompts]
    driver.generate(sequences, 12)
    for ids, sequence in zip(prompts, sequences, strict=True):
        with torch.no_grad():
            whole = reference.generate(
                torch.from_numpy(ids)[None],
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),  # token 0 is a token like others
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        assert sequence.ids.tolist() == whole[0].tolist(), name


def test_padding_and_beginnings_stay_zero(model):
    runner = model[3]
    assert not any(tensor[0].any() for layer in runner.state_pool.layers for tensor in layer.values())


@pytest.mark.parametrize("name", ["qwen3_next", "granite_hybrid", "lfm2", "jamba"])
def test_bfloat16_keeps_states_as_transformers_does(tmp_path, name):
    """Recurrent states in float32, inputs of convolutions in the model's type."""
    kind, architecture, changes = STATEFUL[name]
    reference = make_reference(kind, changes, architecture=architecture or f"{kind}ForCausalLM").bfloat16()
    reference.save_pretrained(tmp_path)
    runner = make_runner(tmp_path, dtype="bfloat16")
    driver = ModelDriver(runner, seed=13)
    sequence = driver.open(random_ids(30, seed=14))
    found = torch.cat([driver.step([(sequence, count)]).logits for count in (9, 1, 11, 1, 8)])
    expected = expected_logits(reference, sequence.ids)[[8, 9, 20, 21, 29]]
    assert (found - expected).abs().mean() <= 0.1 * expected.abs().mean()
    assert isinstance(runner._model, TransformersModel)
    assert {layer.one_by_one for layer in runner._model._state_layers} == {name in MAMBA_1}
    kept = {name: tensor.dtype for name, tensor in runner._model.state_shapes[0].items()}
    assert kept["conv"] == torch.bfloat16 and kept.get("recurrent", torch.float32) == torch.float32


@pytest.mark.parametrize(
    ("name", "changes"), [("Rwkv", {"attention_hidden_size": 48}), ("RecurrentGemma", {}), ("MiniMax", {})]
)
def test_states_outside_of_the_cache_are_refused_by_name(tmp_path, name, changes):
    make_reference(name, changes).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=f"{name}ForCausalLM keeps recurrent states outside of transformers' cache"
    ):
        make_runner(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize(("spoiled", "in_place", "sound"), [("state", False, 0), ("state", True, 20), ("kv", False, 7)])
def test_nothing_is_sound_behind_a_spoiled_state(tmp_path, spoiled, in_place, sound):
    """K and V of the tokens before are finite: without a look at the state they would count as sound, and whatever
    starts there would fail again. A state that was written over is gone."""
    kind, _, changes = STATEFUL["olmo_hybrid"]
    make_reference(kind, changes).save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    driver = ModelDriver(runner, seed=15)
    a, b = (driver.open(random_ids(21, seed=seed)) for seed in (16, 17))
    driver.step([(a, 20), (b, 20)])
    assert runner.state_pool is not None
    if spoiled == "state":
        runner.state_pool.layers[0]["recurrent"][b.states[20], 0, 0, 0] = torch.nan
    else:
        runner.kv_pool.k[0][driver.pool.rows[b.row, 7], 0, 0] = torch.nan
    batches = []
    forward = runner.forward
    runner.forward = lambda batch: batches.append(batch) or forward(batch)  # type: ignore[method-assign]
    output = driver.step([(a, 1), (b, 1)], in_place=in_place)
    assert output.logits.isfinite().all(1).tolist() == [True, False]
    assert runner.sound_tokens(batches[0], [1]) == {1: sound}


def test_trial_of_step_sizes_starts_from_nothing(tmp_path, monkeypatch):
    kind, _, changes = STATEFUL["mamba2"]
    make_reference(kind, changes).save_pretrained(tmp_path)
    monkeypatch.setattr(model_runner, "SMALL_MODEL_BYTES", 0)
    runner = make_runner(tmp_path, chunked_prefill_size=0)
    monkeypatch.setattr(runner._others, "busy_cores", lambda: 0.0)
    while runner.run_late_work() is not None:
        pass
    assert make_runner(tmp_path, chunked_prefill_size=0).chunked_prefill_size in (256, 512)


def test_heavy_channels_do_not_depend_on_chunks(tmp_path):
    kind, _, changes = STATEFUL["granite_hybrid"]
    make_reference(kind, changes).save_pretrained(tmp_path)
    ids = random_ids(40, seed=18).tolist()
    whole, pieces = (make_runner(tmp_path, chunked_prefill_size=size).find_heavy_channels(ids) for size in (40, 9))
    assert whole == pieces and len(whole) == 3, "of the only layer with attention"


def test_models_without_attention_keep_no_kv(tmp_path):
    """Their tokens have slots, so that the tree can name them, but no memory; one context fits for each row."""
    kind, _, changes = STATEFUL["mamba2"]
    make_reference(kind, changes).save_pretrained(tmp_path)
    runner = make_runner(tmp_path, max_total_tokens=0, page_size=16)
    assert runner.kv_pool.bytes_per_token == 0 and runner.max_total_tokens == 8 * 512
    tiers = TierConfig(host_cache_ratio=2.0)
    pool = make_host_pool(tiers, runner.kv_pool, runner.transfer_kv, runner.state_pool)
    assert pool is not None and pool.num_tokens == 2 * 8 * 512 and not pool.memory.nbytes
