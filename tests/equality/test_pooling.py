"""Vectors of pooled prompts against transformers: embeddings, logits of a classification head, named tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.scheduler.request_spec import PoolingSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.specs import make_pooled_spec, make_spec
from tests.doubles.tiny_adapters import EVERY, add_adapter, save_adapter
from tests.doubles.tiny_models import MODELS, TINY, make_reference, save_reference

pytestmark = pytest.mark.equality

KINDS: dict[str, PoolingSpec] = {kind: PoolingSpec(kind=kind) for kind in ("last", "mean", "cls")}
NAMED = PoolingSpec(output="tokens", token_ids=(3, 77, 130))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"page_size": 16},
    {"page_size": 64, "chunked_prefill_size": 50},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7, "page_size": 16},
    {"disable_radix_cache": True, "chunked_prefill_size": 7},
]


def prompts_of(seed: int, lengths: tuple[int, ...] = (1, 2, 16, 17, 90)) -> list[list[int]]:
    """Random ones; the last continues the one before it, so that both share a prefix."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, TINY["vocab_size"], length).tolist() for length in lengths]
    return [*prompts, [*prompts[-1], *prompts[-2]]]


@torch.no_grad()
def final_states(reference: Any, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, hidden]: transformers' last hidden states, after the norm."""
    base = getattr(reference, "model", reference)
    return base(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0].float()


@torch.no_grad()
def expected_vector(reference: Any, ids: list[int], pooling: PoolingSpec) -> torch.Tensor:
    if pooling.output == "labels":
        return reference(torch.tensor([ids])).logits[0]
    if pooling.output == "tokens":
        return reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[list(pooling.token_ids)]
    states = final_states(reference, ids)
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling.kind]


def check_vectors(
    worker: LocalWorker, reference: Any, prompts: list[list[int]], poolings: list[PoolingSpec], round_number: int = 0
) -> None:
    specs = [
        make_pooled_spec(f"{round_number}-{i}-{j}", ids, pooling)
        for i, ids in enumerate(prompts)
        for j, pooling in enumerate(poolings)
    ]
    for spec, answer in zip(specs, worker.run(specs), strict=True):
        assert answer.vector is not None and answer.vector.dtype == np.float32
        assert answer.finish is not None and answer.finish.type == "length" and answer.tokens == []
        assert spec.pooling is not None
        expected = expected_vector(reference, spec.token_ids.tolist(), spec.pooling)
        torch.testing.assert_close(torch.from_numpy(answer.vector), expected, atol=1e-4, rtol=1e-4)
    worker.scheduler.check_invariants()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("qwen3")
    return save_reference("qwen3", folder), folder


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_vectors_equal_transformers(qwen3: tuple[Any, Path], options: dict[str, Any], overlap: bool) -> None:
    """All kinds in the same steps; in the second round the prompts are cached."""
    reference, folder = qwen3
    worker = LocalWorker(folder, overlap=overlap, **options)
    for round_number in range(2):
        check_vectors(worker, reference, prompts_of(1), [*KINDS.values(), NAMED], round_number)
    assert len(worker.step_runner._pooler) == 0


def test_mean_and_cls_compute_cached_prompt_and_last_does_not(qwen3: tuple[Any, Path]) -> None:
    """The cache holds K and V, and no hidden states."""
    _, folder = qwen3
    worker = LocalWorker(folder)
    ids = prompts_of(2)[-1]
    worker.generate([ids], SamplingParams(max_new_tokens=1))
    found = {
        kind: worker.run([make_pooled_spec(kind, ids, pooling)])[0].cached_tokens for kind, pooling in KINDS.items()
    }
    assert found == {"last": len(ids) - 1, "mean": 0, "cls": 0}


def test_vectors_of_mixed_steps_leave_generation_as_it_is(qwen3: tuple[Any, Path]) -> None:
    """Prompts that are pooled share steps with running requests, and prepare the cache for them."""
    reference, folder = qwen3
    worker = LocalWorker(folder, chunked_prefill_size=20, enable_mixed_chunk=True, page_size=16)
    prompts = prompts_of(3)[-3:]
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    specs = []
    for i, ids in enumerate(prompts):
        specs += [make_spec(f"g{i}", ids, greedy), make_pooled_spec(f"p{i}", ids, KINDS["mean"])]
    answers = worker.run(specs)
    assert [answer.tokens for answer in answers[::2]] == expected
    for ids, answer in zip(prompts, answers[1::2]):
        assert answer.vector is not None
        expected_mean = expected_vector(reference, ids, KINDS["mean"])
        torch.testing.assert_close(torch.from_numpy(answer.vector), expected_mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ["llama", "gemma2", "granite", "phi3", "qwen3_moe", "deepseek_v3", "llama4"])
def test_embeddings_of_architectures_equal_transformers(key: str, tmp_path: Path) -> None:
    reference = save_reference(key, tmp_path)
    check_vectors(LocalWorker(tmp_path), reference, prompts_of(4), [*KINDS.values(), NAMED])


def test_embeddings_of_transformers_code_equal_its_own(qwen3: tuple[Any, Path]) -> None:
    """Its hidden states are normed already: they must not be normed twice."""
    reference, folder = qwen3
    worker = LocalWorker(folder, model_options={"model_impl": "transformers"})
    check_vectors(worker, reference, prompts_of(5), [*KINDS.values(), NAMED])


LABELLED = {
    "llama": {"num_labels": 1},
    "qwen2": {"num_labels": 3},
    "qwen3": {"num_labels": 5, "head_dim": 16, "tie_word_embeddings": True},
    "gemma": {"num_labels": 2, "head_dim": 16},
    "gemma2": {"num_labels": 4, "final_logit_softcapping": 0.5, "head_dim": 16, "query_pre_attn_scalar": 24},
    "mistral, window": {"num_labels": 2, "sliding_window": 20, "head_dim": 8},
}


@pytest.mark.parametrize("key", LABELLED)
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7, "page_size": 16}], ids=str)
def test_labels_equal_transformers(key: str, options: dict[str, Any], tmp_path: Path) -> None:
    """gemma2: soft caps are of the vocabulary's logits alone."""
    name, changes = MODELS[key]
    architecture = f"{name}ForSequenceClassification"
    reference = make_reference(name, changes | LABELLED[key], architecture=architecture, pad_token_id=0)
    reference.save_pretrained(tmp_path)
    worker = LocalWorker(tmp_path, **options)
    for round_number in range(2):
        prompts = [[token or 1 for token in ids] for ids in prompts_of(6)]  # transformers pools before its padding
        check_vectors(worker, reference, prompts, [PoolingSpec(output="labels"), *KINDS.values()], round_number)
    assert worker.info["pooling"]["head"] == "labels"
    assert len(worker.info["pooling"]["labels"]) == LABELLED[key]["num_labels"]


@pytest.mark.parametrize(("name", "changes"), [("GPT2", {"n_positions": 512}), ("Qwen3", {"head_dim": 16})])
def test_labels_of_transformers_code_equal_its_own(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2 has no code of Baton's own."""
    reference = make_reference(
        name, changes | {"num_labels": 3}, architecture=f"{name}ForSequenceClassification", pad_token_id=0
    )
    reference.save_pretrained(tmp_path)
    impl = "auto" if name == "GPT2" else "transformers"
    worker = LocalWorker(tmp_path, model_options={"model_impl": impl}, chunked_prefill_size=20)
    prompts = [[token or 1 for token in ids] for ids in prompts_of(6)]
    check_vectors(worker, reference, prompts, [PoolingSpec(output="labels")])
    assert worker.info["model_impl"] == "transformers" and worker.info["pooling"]["head"] == "labels"


def save_embedder(folder: Path, *, prefix: str = "", architecture: str | None = None) -> Any:
    """A model as sentence-transformers saves it: no head, which is not tied, and names without a prefix."""
    reference = save_reference("qwen3", folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    tensors = {
        prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if architecture is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return reference


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_checkpoint_without_head_embeds(architecture: str, prefix: str, tmp_path: Path) -> None:
    """Qwen3-Embedding has no head; that of 8B parameters is not tied either."""
    reference = save_embedder(tmp_path, prefix=prefix, architecture=architecture)
    worker = LocalWorker(tmp_path, chunked_prefill_size=30)
    check_vectors(worker, reference, prompts_of(7), list(KINDS.values()))
    described = worker.info["pooling"]
    assert (described["head"], described["is_embedder"], described["normalizes"]) == ("none", True, True)


def test_missing_head_of_other_checkpoints_is_an_error(tmp_path: Path) -> None:
    """Without the files of sentence-transformers a head is missing, not absent."""
    save_embedder(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ModelLoadError, match=r"missing tensor\(s\): lm_head"):
        LocalWorker(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_embedding_is_as_close_as_transformers(dtype: str, tmp_path: Path) -> None:
    reference = make_reference("Qwen3", MODELS["qwen3"][1], initializer_range=0.05)
    reference.save_pretrained(tmp_path)
    ids = prompts_of(8)[-1]
    exact = expected_vector(reference, ids, KINDS["mean"])
    theirs = expected_vector(type(reference).from_pretrained(tmp_path, dtype=dtype), ids, KINDS["mean"])
    worker = LocalWorker(tmp_path, model_options={"dtype": dtype}, chunked_prefill_size=16)
    vector = worker.run([make_pooled_spec("half", ids, KINDS["mean"])])[0].vector
    assert vector is not None
    assert (torch.from_numpy(vector) - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_adapters_embed_apart(tmp_path: Path) -> None:
    """Prompts with an adapter and without in the same steps; neither finds the other's KV."""
    reference = save_reference("qwen3", tmp_path / "base")
    model = add_adapter(reference, "all", EVERY, 2)
    worker = LocalWorker(tmp_path / "base", chunked_prefill_size=30)
    worker.adapters.load("all", str(save_adapter(model, "all", tmp_path / "adapters")))
    for round_number in range(2):
        specs = [
            make_pooled_spec(f"{round_number}-{i}-{kind}-{adapter}", ids, pooling, adapter=adapter)
            for i, ids in enumerate(prompts_of(9))
            for kind, pooling in KINDS.items()
            for adapter in ("", "all")
        ]
        for spec, answer in zip(specs, worker.run(specs), strict=True):
            assert answer.vector is not None and spec.pooling is not None
            if spec.adapter:
                expected = expected_vector(model.get_base_model(), spec.token_ids.tolist(), spec.pooling)
            else:
                with model.disable_adapter():
                    expected = expected_vector(model.get_base_model(), spec.token_ids.tolist(), spec.pooling)
            torch.testing.assert_close(torch.from_numpy(answer.vector), expected, atol=2e-4, rtol=2e-4)
