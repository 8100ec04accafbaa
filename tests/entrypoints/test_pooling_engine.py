"""Embeddings, scores, rankings and classes of the Engine against transformers, texts and tokenizers included."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.entrypoints.engine import Engine
from baton.scheduler.outcome import RequestRefused
from tests.doubles import pooled_models

pytestmark = pytest.mark.equality

TEXTS = ["yes", "A longer text — with café and 世界.", "The quick brown fox jumps over the lazy dog. " * 5, " "]
QUERY = "How many lines?"
DOCUMENTS = ["There are three lines.", "Paris", "<|im_end|> no", ""]


class Served:
    """A model with the Engine that serves it, and transformers' model and tokenizer."""

    def __init__(self, folder: Path, reference: Any, **settings: Any) -> None:
        from transformers import AutoTokenizer

        self.reference = reference
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.engine = Engine(
            model_path=str(folder), device="cpu", dtype="float32", max_total_tokens=8192, chunked_prefill_size=50,
            **settings,
        )  # fmt: skip

    @torch.no_grad()
    def states(self, text: str) -> torch.Tensor:
        """float32 [tokens, hidden]"""
        ids = torch.tensor([self.tokenizer(text).input_ids])
        return self.reference.model(input_ids=ids, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, *texts: str) -> torch.Tensor:
        """float32 [labels]: of one text or a pair. Given alone, an empty second text would not be taken for one."""
        ids = self.tokenizer(*([text] for text in texts)).input_ids
        return self.reference(torch.tensor(ids)).logits[0]


def normalized(vector: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vector, dim=-1).numpy()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("embedder")
    served = Served(folder, pooled_models.write_embedder(folder))
    with served.engine:
        yield served


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("language")
    served = Served(folder, pooled_models.write_language_model(folder), page_size=16)
    with served.engine:
        yield served


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("cross")
    served = Served(folder, pooled_models.write_classifier(folder, 1))
    with served.engine:
        yield served


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("classes")
    served = Served(folder, pooled_models.write_classifier(folder, 3))
    with served.engine:
        yield served


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_embeddings_equal_transformers(embedder: Served) -> None:
    """The last token is the <eos> that the tokenizer adds."""
    answers = embedder.engine.embed(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        np.testing.assert_allclose(answer["embedding"], normalized(embedder.states(text)[-1]), atol=1e-5)
        assert answer["meta_info"]["prompt_tokens"] == len(embedder.tokenizer(text).input_ids)
    alone = embedder.engine.embed(TEXTS[1])
    np.testing.assert_allclose(alone["embedding"], answers[1]["embedding"], atol=1e-5)
    assert alone["meta_info"]["cached_tokens"] == alone["meta_info"]["prompt_tokens"] - 1


@pytest.mark.parametrize("dimensions", [1, 7, 48])
def test_dimensions_are_cut_then_normalized(embedder: Served, dimensions: int) -> None:
    whole = embedder.states(TEXTS[1])[-1]
    answer = embedder.engine.embed(TEXTS[1], dimensions=dimensions)
    np.testing.assert_allclose(answer["embedding"], normalized(whole[:dimensions]), atol=1e-5)
    plain = embedder.engine.embed(TEXTS[1], dimensions=dimensions, normalize=False)
    np.testing.assert_allclose(plain["embedding"], whole[:dimensions].numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [1, 2, 9])
def test_truncation_keeps_the_last_special_token(embedder: Served, most: int, side: str) -> None:
    embedder.tokenizer.truncation_side = side
    ids = embedder.tokenizer(TEXTS[1], truncation=True, max_length=most).input_ids
    assert len(ids) == most
    fields = {"truncation_side": side} if side == "left" else {}
    answer = embedder.engine.embed(TEXTS[1], truncate_prompt_tokens=most, **fields)
    expected = embedder.engine.embed(input_ids=ids)
    assert answer["meta_info"]["prompt_tokens"] == most
    np.testing.assert_allclose(answer["embedding"], expected["embedding"], atol=1e-6)


def test_embedding_of_ids_and_of_plain_text(embedder: Served) -> None:
    plain = embedder.tokenizer(TEXTS[1], add_special_tokens=False).input_ids
    by_ids = embedder.engine.embed(input_ids=[plain, plain[:3]])
    by_text = embedder.engine.embed(TEXTS[1], add_special_tokens=False)
    np.testing.assert_allclose(by_ids[0]["embedding"], by_text["embedding"], atol=1e-6)
    assert [each["meta_info"]["prompt_tokens"] for each in by_ids] == [len(plain), 3]


@pytest.mark.parametrize(("pooling", "normalizes"), [("mean_tokens", False), ("cls_token", True)])
def test_pooling_of_the_checkpoint(pooling: str, normalizes: bool, tmp_path: Path) -> None:
    reference = pooled_models.write_embedder(tmp_path, pooling=pooling, normalizes=normalizes)
    served = Served(tmp_path, reference)
    with served.engine as engine:
        for _ in range(2):
            states = served.states(TEXTS[2])
            expected = states.mean(0) if pooling == "mean_tokens" else states[0]
            found = engine.embed(TEXTS[2])["embedding"]
            wanted = normalized(expected) if normalizes else expected.numpy()
            np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_language_model_embeds_without_a_flag(language_model: Served) -> None:
    generated = language_model.engine.generate(TEXTS[1], {"max_new_tokens": 4, "temperature": 0})
    found = language_model.engine.embed(TEXTS[1])
    np.testing.assert_allclose(found["embedding"], normalized(language_model.states(TEXTS[1])[-1]), atol=1e-5)
    assert found["meta_info"]["cached_tokens"] >= 16, "generation has left the prompt's pages in the cache"
    again = language_model.engine.generate(TEXTS[1], {"max_new_tokens": 4, "temperature": 0})
    assert again["output_ids"] == generated["output_ids"]


def test_async_embedding(embedder: Served) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(*(embedder.engine.async_embed(text) for text in TEXTS))

    for one, other in zip(asyncio.run(both()), embedder.engine.embed(TEXTS), strict=True):
        np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-5)


# -- scores ------------------------------------------------------------------------------------------------------------


def judgement(served: Served, query: str, document: str, instruction: str) -> float:
    """P("yes") among both, as the model card of Qwen3-Reranker computes it, from its text."""
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ids = torch.tensor([served.tokenizer(text, add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = served.reference(ids).logits[0, -1]
    words = served.tokenizer.convert_tokens_to_ids(["no", "yes"])
    return float(logits[words].log_softmax(-1).exp()[1])


def test_language_model_reranks_as_qwen3_reranker_does(language_model: Served) -> None:
    standard = "Given a web search query, retrieve relevant passages that answer the query"
    expected = [judgement(language_model, QUERY, document, standard) for document in DOCUMENTS]
    answer = language_model.engine.rerank(QUERY, DOCUMENTS)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose([found[i] for i in range(len(DOCUMENTS))], expected, atol=1e-5)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(np.round(scores, 4))) > 1
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in found]
    own = language_model.engine.rerank(QUERY, DOCUMENTS, instruction="Find it.", top_n=1, return_documents=False)
    best = max(judgement(language_model, QUERY, document, "Find it.") for document in DOCUMENTS)
    assert len(own["results"]) == 1 and "document" not in own["results"][0]
    assert own["results"][0]["relevance_score"] == pytest.approx(best, abs=1e-5)


def test_documents_of_a_query_share_its_prefix(language_model: Served) -> None:
    language_model.engine.flush_cache()
    language_model.engine.rerank("A query of its own", ["first"])
    usage = language_model.engine.rerank("A query of its own", ["second", "third"])["usage"]
    shared = len("<|im_start|>system\n")  # far less than what they share
    assert usage["prompt_tokens_details"]["cached_tokens"] > 2 * shared


def test_pair_scores_of_embeddings_are_cosines(embedder: Served) -> None:
    vectors = {text: normalized(embedder.states(text)[-1]).astype(float) for text in (QUERY, *DOCUMENTS)}
    answer = embedder.engine.score(text_1=QUERY, text_2=DOCUMENTS)
    expected = [float(vectors[QUERY] @ vectors[document]) for document in DOCUMENTS]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-5)
    paired = embedder.engine.score(text_1=DOCUMENTS, text_2=DOCUMENTS[::-1])
    expected = [float(vectors[one] @ vectors[other]) for one, other in zip(DOCUMENTS, DOCUMENTS[::-1])]
    np.testing.assert_allclose([each["score"] for each in paired["data"]], expected, atol=1e-5)


def test_pair_scores_of_cross_encoder_equal_transformers(cross_encoder: Served) -> None:
    """The tokenizer joins both texts, with <eos> between and behind them."""
    logits = [float(cross_encoder.logits(QUERY, document)) for document in DOCUMENTS]
    answer = cross_encoder.engine.score(text_1=QUERY, text_2=DOCUMENTS)
    found = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(found, torch.tensor(logits).sigmoid().numpy(), atol=1e-5)
    raw = cross_encoder.engine.score(text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose([each["score"] for each in raw["data"]], logits, atol=1e-4)
    assert [each["index"] for each in cross_encoder.engine.rerank(QUERY, DOCUMENTS)["results"]] == sorted(
        range(len(DOCUMENTS)), key=lambda index: -logits[index]
    )


@pytest.mark.parametrize("impl", ["baton", "transformers"])
def test_cross_encoder_scores_with_the_activation_that_was_saved(impl: str, tmp_path: Path) -> None:
    """sentence-transformers saves Identity for rerankers whose scores are logits."""
    saved = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
    reference = pooled_models.write_classifier(tmp_path, 1, sentence_transformers=saved)
    served = Served(tmp_path, reference, model_impl=impl)
    with served.engine as engine:
        answer = engine.score(text_1=QUERY, text_2=DOCUMENTS)
    logits = [float(served.logits(QUERY, document)) for document in DOCUMENTS]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], logits, atol=1e-4)


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_label_scores_equal_transformers(language_model: Served, item_first: bool, softmax: bool) -> None:
    labels, items = [7, 100, 257], ["one", "two", " three"]
    answer = language_model.engine.score(QUERY, items, labels, apply_softmax=softmax, item_first=item_first)
    for item, scores in zip(items, answer["scores"], strict=True):
        text = item + QUERY if item_first else QUERY + item
        ids = torch.tensor([language_model.tokenizer(text).input_ids])
        with torch.no_grad():
            logits = language_model.reference(ids).logits[0, -1]
        expected = logits[labels].softmax(-1) if softmax else logits.softmax(-1)[labels]
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-6)
    as_ids = [language_model.tokenizer(item).input_ids for item in items]
    by_ids = language_model.engine.score(language_model.tokenizer(QUERY).input_ids, as_ids, labels)
    by_text = language_model.engine.score(QUERY, items, labels)
    np.testing.assert_allclose(by_ids["scores"], by_text["scores"], atol=1e-6)


@pytest.mark.parametrize(
    ("problem", "activation"),
    [(None, "softmax"), ("multi_label_classification", "sigmoid"), ("regression", "none")],
)
def test_classes_equal_transformers(problem: str | None, activation: str, tmp_path: Path) -> None:
    served = Served(tmp_path, pooled_models.write_classifier(tmp_path, 3, problem_type=problem))
    with served.engine as engine:
        answer = engine.classify(TEXTS)
        for text, each in zip(TEXTS, answer["data"], strict=True):
            logits = served.logits(text)
            expected = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[activation]
            np.testing.assert_allclose(each["probs"], expected.numpy(), atol=1e-5, rtol=1e-4)
            assert (each["label"], each["num_classes"]) == (f"class {int(logits.argmax())}", 3)


# -- what models cannot do ---------------------------------------------------------------------------------------------


def test_models_refuse_by_name_what_they_lack(embedder: Served, classifier: Served, language_model: Served) -> None:
    for refused, says in (
        (lambda: embedder.engine.generate("x"), "generates no text"),
        (lambda: classifier.engine.generate("x"), "generates no text"),
        (lambda: embedder.engine.classify("x"), "no classification head"),
        (lambda: language_model.engine.classify("x"), "no classification head"),
        (lambda: classifier.engine.rerank("x", ["y"]), "3 classes"),
        (lambda: embedder.engine.score("x", ["y"], [1]), "no language head"),
        (lambda: classifier.engine.score("x", ["y"], [1]), "no language head"),
    ):
        with pytest.raises(RequestRefused, match=says) as caught:
            refused()
        assert caught.value.code == "unsupported_by_model"
    assert classifier.engine.embed("x")["embedding"], "a model with another head embeds too"


@pytest.mark.parametrize(
    ("call", "says", "param"),
    [
        (lambda engine: engine.embed("x", dimensions=49), "vectors have 48", "dimensions"),
        (lambda engine: engine.embed("x", dimensions=0), "use 1 or more", "dimensions"),
        (lambda engine: engine.embed(input_ids=[5, 10**12]), "input_ids holds 1000000000000", "input_ids"),
        (lambda engine: engine.embed(input_ids=[[5], [-1]]), "input_ids holds -1", "input_ids"),
        (lambda engine: engine.embed(["x", ""], add_special_tokens=False), r"text\[1\] is empty", "text"),
        (lambda engine: engine.embed("x " * 5000), "maximum context length is 2048", "text"),
        (lambda engine: engine.embed("a\ud800"), "not valid Unicode", "text"),
        (lambda engine: engine.score(text_1=["a", "b"], text_2=["c"]), "text_1 has 2 texts", "text_1"),
        (lambda engine: engine.embed("x", encoding_format="float"), "unknown field encoding_format", "encoding_format"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(embedder: Served, call: Any, says: str, param: str) -> None:
    with pytest.raises(RequestRefused, match=says) as caught:
        call(embedder.engine)
    assert caught.value.param == param


def test_labels_outside_the_vocabulary_are_refused(language_model: Served) -> None:
    with pytest.raises(RequestRefused, match=f"label_token_ids holds token id {pooled_models.VOCAB}") as caught:
        language_model.engine.score("x", ["y"], [1, pooled_models.VOCAB])
    assert caught.value.param == "label_token_ids"
