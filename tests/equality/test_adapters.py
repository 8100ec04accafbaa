"""LoRA adapters against peft, token for token: several in one batch, beside requests without any."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.specs import make_spec
from tests.doubles.tiny_adapters import ATTENTION, EVERY, add_adapter, save_adapter
from tests.doubles.tiny_models import save_reference
from tests.equality.test_serving import TIE, Reference, assert_same_tokens, reference_of

pytestmark = pytest.mark.equality

TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
NAMES = ("", "few", "all")
KEYS = (
    "llama, biases",
    "qwen3",
    "phi3",  # one weight for q, k and v, and one for gate and up
    "glm4",  # pairs of a part of each head are rotated: outputs are reordered
    "gemma2",
    "olmo2",  # q and k are normed over all heads
    "ernie",
    "qwen3_5",  # each head's gate is behind its q: one module's outputs are apart
    "youtu",  # the projections to latents are one weight, whose rotated outputs are reordered
)


class Scene:
    """A base model and two adapters, and what peft says with each."""

    def __init__(self, key: str, folder: Path) -> None:
        model = save_reference(key, folder / "base")
        rng = random.Random(key)
        self.prompts = [[rng.randrange(131) for _ in range(length)] for length in (5, 23, 40)]
        self.base = folder / "base"
        self.references: dict[str, list[Reference]] = {"": [self._reference(model, prompt) for prompt in self.prompts]}
        model = add_adapter(model, "few", ["q_proj", "v_proj", "qkv_proj", "kv_a_proj_with_mqa"], 1)
        patterns = {"alpha_pattern": {"o_proj": 24, r"layers\.1\.mlp\.down_proj": 3}, "rank_pattern": {"o_proj": 2}}
        model = add_adapter(model, "all", EVERY, 2, r=8, lora_alpha=12, use_rslora=True, **patterns)
        self.folders = {}
        for name in NAMES[1:]:
            model.set_adapter(name)
            self.references[name] = [self._reference(model, prompt) for prompt in self.prompts]
            self.folders[name] = save_adapter(model, name, folder / "adapters")
        model.set_adapter("all")
        self.merged = folder / "merged"
        model.merge_and_unload(adapter_names=["all"]).save_pretrained(self.merged)

    def _reference(self, model, prompt: list[int]) -> Reference:
        return reference_of(model, prompt, TOKENS, frozenset())

    def worker(self, **options) -> LocalWorker:
        worker = LocalWorker(self.base, **options)
        for name, folder in self.folders.items():
            worker.adapters.load(name, str(folder))
        return worker

    def specs(self, sampling: SamplingParams = GREEDY) -> list[RequestSpec]:
        """All prompts with each adapter and with none, side by side."""
        return [
            make_spec(f"{name}-{number}", prompt, sampling, adapter=name)
            for number, prompt in enumerate(self.prompts)
            for name in NAMES
        ]

    def assert_equal(self, worker: LocalWorker) -> None:
        answers = worker.run(self.specs())
        expected = [self.references[name][number] for number in range(len(self.prompts)) for name in NAMES]
        for answer, reference in zip(answers, expected, strict=True):
            assert_same_tokens(answer.tokens, reference, TIE)


@pytest.fixture(scope="module", params=KEYS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(request.param, tmp_path_factory.mktemp("adapters"))


def test_adapters_answer_as_in_peft(scene: Scene) -> None:
    """The three say different things, or the comparison would prove nothing."""
    said = [[reference.tokens for reference in scene.references[name]] for name in NAMES]
    assert said[0] != said[1] != said[2] != said[0]
    scene.assert_equal(scene.worker())


def test_pages_chunks_and_pressure(scene: Scene) -> None:
    worker = scene.worker(page_size=16, chunked_prefill_size=7, max_total_tokens=192, max_running_requests=4)
    scene.assert_equal(worker)
    scene.assert_equal(worker)  # from the cache, where there is still something


def test_merged_weights_answer_alike(scene: Scene) -> None:
    merged = LocalWorker(scene.merged)
    for answer, reference in zip(merged.generate(scene.prompts, GREEDY), scene.references["all"], strict=True):
        assert_same_tokens(answer.tokens, reference, TIE)


def test_transformers_backend(scene: Scene) -> None:
    scene.assert_equal(scene.worker(model_options={"model_impl": "transformers", "linear_backend": "auto"}))


def test_beam_search(scene: Scene) -> None:
    """Beside requests of another adapter; the merged weights are the twin."""
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, beam_width=4, n=4, ignore_eos=True)
    prompt = scene.prompts[1]
    expected, *_ = LocalWorker(scene.merged).run([make_spec("b", prompt, sampling)])
    worker = scene.worker()
    found, *_ = worker.run(
        [
            make_spec("b", prompt, sampling, adapter="all"),
            make_spec("other", prompt, GREEDY, adapter="few"),
            make_spec("none", prompt, GREEDY),
        ]
    )
    assert found.beams is not None and expected.beams is not None
    for mine, theirs in zip(found.beams.results, expected.beams.results, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()


def test_caches_never_mix(scene: Scene) -> None:
    worker = scene.worker()
    prompt = scene.prompts[2]
    first = worker.run([make_spec("one", prompt, GREEDY, adapter="few")])
    assert [answer.cached_tokens for answer in first] == [0]
    again = worker.run([make_spec(f"two-{name}", prompt, GREEDY, adapter=name) for name in NAMES])
    assert [answer.cached_tokens > 0 for answer in again] == [False, True, False]
    for answer, name in zip(again, NAMES, strict=True):
        assert_same_tokens(answer.tokens, scene.references[name][2], TIE)


def test_attention_alone_is_updated_in_a_model_of_experts(tmp_path: Path) -> None:
    model = save_reference("mixtral", tmp_path / "base")
    prompt = list(range(3, 30))
    model = add_adapter(model, "attention", ATTENTION, 3)
    reference = reference_of(model, prompt, TOKENS, frozenset())
    worker = LocalWorker(tmp_path / "base")
    worker.adapters.load("attention", str(save_adapter(model, "attention", tmp_path)))
    (answer,) = worker.run([make_spec("a", prompt, GREEDY, adapter="attention")])
    assert_same_tokens(answer.tokens, reference, TIE)
