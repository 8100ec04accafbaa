"""How a checkpoint pools: the files of sentence-transformers, and the heads of architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.checkpoint.hf_config import parse_model_config
from baton.runtime.checkpoint.model_files import ModelLoadError, UnsupportedModelError
from baton.runtime.checkpoint.pooling_files import read_embedding_config
from baton.runtime.model_config import EmbeddingConfig
from baton.runtime.models.registry import decoder_of
from tests.runtime.checkpoint.test_hf_config import LLAMA

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def write(folder: Path, modules: Any, pooling: Any = None) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_folder_without_modules_has_defaults(tmp_path: Path) -> None:
    assert read_embedding_config(tmp_path) == EmbeddingConfig(is_embedder=False, pooling="last", normalizes=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"word_embedding_dimension": 4}, "mean"),
        (None, "mean"),
    ],
)
def test_pooling_of_modules(pooling: Any, kind: str, tmp_path: Path) -> None:
    found = read_embedding_config(write(tmp_path, [TRANSFORMER, POOLING], pooling))
    assert found == EmbeddingConfig(is_embedder=True, pooling=kind, normalizes=False)  # type: ignore[arg-type]
    write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE])
    assert read_embedding_config(tmp_path).normalizes


@pytest.mark.parametrize(
    ("modules", "pooling", "says"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "1_Pooling/config.json .* another pooling"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "another pooling"),
        ([POOLING], {"pooling_mode": "weightedmean"}, "another pooling"),
        ([TRANSFORMER, {"path": "3", "type": "sentence_transformers.models.Dense"}], None, "module of type Dense"),
    ],
)
def test_other_modules_and_poolings_are_refused_later(modules: Any, pooling: Any, says: str, tmp_path: Path) -> None:
    """The model may still generate."""
    assert re.search(says, read_embedding_config(write(tmp_path, modules, pooling)).refusal)


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '["x"]'])
def test_broken_modules_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        read_embedding_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("LlamaForCausalLM", ("LlamaForCausalLM", "language")),
        ("LlamaForSequenceClassification", ("LlamaForCausalLM", "labels")),
        ("MistralModel", ("MistralForCausalLM", "none")),
        ("Gemma3TextModel", ("Gemma3ForCausalLM", "none")),
        ("Gemma3TextForSequenceClassification", ("Gemma3ForCausalLM", "labels")),
        ("BertModel", None),
        ("BertForSequenceClassification", None),
        ("LlamaForTokenClassification", None),
    ],
)
def test_decoders_and_heads(name: str, found: Any) -> None:
    assert decoder_of(name) == found


def parse(**changes: Any) -> Any:
    return parse_model_config(LLAMA | changes)


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
ONE: dict[str, Any] = {"id2label": {"0": "x"}}
TWO = ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "bad", "0": "good"}}, ("good", "bad"), "softmax"),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, ("x",), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"id2label": {"0": "x"}, "problem_type": "single_label_classification"}, ("x",), "sigmoid"),
        (ONE | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ("x",), "none"),
        (ONE | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ("x",), "none"),
        (
            ONE
            | {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
            | {"problem_type": "regression"},
            ("x",),
            "sigmoid",
        ),
        (ONE | {"sentence_transformers": {"version": "4.1.0"}}, ("x",), "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, TWO, "softmax"),
    ],
)
def test_labels_of_classifiers(changes: dict[str, Any], labels: tuple[str, ...], activation: str) -> None:
    config = parse(**CLASSIFIER, **changes)
    assert (config.head, config.labels, config.label_activation) == ("labels", labels, activation)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name"),
        ({"id2label": ["a"]}, "id2label must name"),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"num_labels": "two"}, "num_labels is 'two'"),
        ({"problem_type": "ranking"}, "problem_type 'ranking'"),
        (
            ONE | {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            r"activation_fn 'torch\.nn\.modules\.activation\.Tanh' of sentence-transformers is not one of Sigmoid",
        ),
    ],
)
def test_wrong_labels_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        parse(**CLASSIFIER, **changes)


def test_head_of_base_models() -> None:
    assert parse(architectures=["LlamaModel"]).head == "none"
    assert parse(architectures=["LlamaModel"], tie_word_embeddings=True).head == "language", "it is the embedding"
    assert parse().head == "language" and parse().labels == ()


@pytest.mark.parametrize("changes", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_attention_is_refused_whatever_computes_it(changes: dict[str, Any]) -> None:
    """Not as unsupported: transformers' code would be tried next, which ignores is_causal."""
    with pytest.raises(ModelLoadError, match="bidirectional") as caught:
        parse(**changes)
    assert not isinstance(caught.value, UnsupportedModelError)
