"""Scores of text pairs (``/v1/score`` and ``/v1/rerank``), of labels as the next token (SGLang's ``/v1/score``) and of
classes (``/classify``).

How a pair is scored depends on the model, as in vLLM:

    head of one class (a cross-encoder)      its score of the two texts, joined
    embeddings                               the cosine of the two embeddings
    language model (Qwen3-Reranker and any   P("yes") ÷ (P("yes") + P("no")) as the answer to the question whether the
    model with a chat template)              document meets the query, in the words of Qwen3-Reranker

The prompts of a language model differ only in the document, which comes last, so all documents of a query share the
cached prefix before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...runtime.answer import Output
from ...runtime.prompt import Prompt
from ...runtime.text.prompt_tokenizer import check_tokens_of_call
from ...scheduler.outcome import RequestRefused
from ...scheduler.request_spec import PoolingSpec
from ..description.json_schema import (
    COUNT,
    IDS,
    TOKEN_ID,
    Properties,
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    opened,
    string,
    taken,
    whole,
)
from ..fields.field_names import FieldNames
from ..fields.ignored import Ignored
from ..fields.prompts import MAX_NAMED_TOKENS
from ..fields.reading import shown, typed
from .answers import USAGE, list_answer, list_schema, response_id, usage_of
from .embeddings import ENCODE_OFF, ENCODE_PROPERTIES, activated, shaped
from .prompts import (
    COMMON,
    INPUT,
    Inputs,
    JoinedTexts,
    PooledModel,
    PoolingFields,
    PoolingTools,
    check_count,
    make_prompts,
    names_of,
    read_common,
    read_inputs,
    read_texts,
    settle_pooling_fields,
    unsupported_by_model,
    vector_of,
)

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own instruction, for requests without one."""

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_YES_NO = ("yes", "no")
_ACTIVATES = flag("Scores between 0 and 1 instead of logits, where the model has a classification head.", default=True)
_OFF: dict[str, tuple] = {
    "mm_processor_kwargs": ({},), "padding": ("do_not_pad",), "softmax": (), "rank_fields": ([],),
    "return_pooled_hidden_states": (False,),
}  # fmt: skip
_A_TEXT_OR_MORE = either(string(), {"type": "array", "items": string(), "minItems": 1})

_PAIRS: tuple[tuple[str, str], ...] = (
    ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
)  # fmt: skip
"""vLLM's names for the two sides of a pair."""

SCORE_PROPERTIES: Properties = {
    "text_1": _A_TEXT_OR_MORE | {"description": "One text for all of text_2, or one for each."},
    "text_2": _A_TEXT_OR_MORE,
    "queries": _A_TEXT_OR_MORE | {"description": "Another name of text_1, with documents or items."},
    "documents": _A_TEXT_OR_MORE,
    "data_1": _A_TEXT_OR_MORE | {"description": "Another name of text_1, with data_2."},
    "data_2": _A_TEXT_OR_MORE,
    "instruction": string("For language models: what the query asks for."),
    "use_activation": _ACTIVATES,
    "query": either(string(), IDS, about="SGLang's: the text before each item; with label_token_ids."),
    "items": either(string(), list_of(string()), list_of(IDS), about="SGLang's: what follows the query."),
    "label_token_ids": list_of(
        TOKEN_ID, "SGLang's: the tokens whose probabilities as the next one are the scores.", most=MAX_NAMED_TOKENS
    ),
    "apply_softmax": flag("Divide these probabilities by their sum.", default=False),
    "item_first": flag("Items come before the query.", default=False),
    **COMMON,
}
SCORE_BODY = taken(SCORE_PROPERTIES, title="ScoreBody", unsupported=_OFF)
SCORE_EXAMPLES: Mapping[str, dict[str, Any]] = {
    "labels": {
        "query": "Is this good? ", "items": ["It is.", "No."], "label_token_ids": [10, 20], "apply_softmax": True,
    },
}  # fmt: skip
"""No example has pairs: whether a model can score them depends on its head and its template."""

SCORE_ANSWER = either(
    list_schema(answered({"index": COUNT, "object": enum("score"), "score": number()}), title="PairScores"),
    answered(
        {
            "object": enum("scoring"),
            "scores": list_of(list_of(number())),
            "model": string(),
            "usage": USAGE,
        },
        title="LabelScores",
    ),
)

_DOCUMENT = either(string(), opened(taken({"text": string()}, required=("text",))))
RERANK_PROPERTIES: Properties = {
    "query": string(),
    "documents": {"type": "array", "items": _DOCUMENT, "minItems": 1},
    "top_n": whole("Best documents that are returned; 0: all.", 0, default=0),
    "return_documents": flag("Return each document's text.", default=True),
    "instruction": string("For language models: what the query asks for."),
    "instruct": string("SGLang's name of instruction."),
    "use_activation": _ACTIVATES,
    **COMMON,
}
RERANK_OFF = _OFF | {"max_chunks_per_doc": (), "max_tokens_per_doc": ()}
RERANK_BODY = taken(RERANK_PROPERTIES, title="RerankBody", required=("query", "documents"), unsupported=RERANK_OFF)
RERANK_ANSWER = answered(
    {
        "id": string(),
        "model": string(),
        "usage": USAGE,
        "results": list_of(
            answered(
                {"index": whole("The document's place in the request.", 0), "relevance_score": number()},
                optional={"document": answered({"text": string()})},
            ),
            "Best first.",
        ),
    },
    title="Ranking",
)

CLASSIFY_PROPERTIES: Properties = {"input": INPUT, "use_activation": _ACTIVATES, **COMMON}
CLASSIFY_OFF = _OFF | {"messages": ()}
CLASSIFY_BODY = taken(
    {**ENCODE_PROPERTIES, **CLASSIFY_PROPERTIES, "rid": ENCODE_PROPERTIES["rid"]},
    "vLLM's fields (`input`), or SGLang's (`text` or `input_ids`).",
    title="ClassifyBody",
    unsupported=ENCODE_OFF | CLASSIFY_OFF,
)
CLASSIFY_ANSWER = list_schema(
    answered(
        {
            "index": COUNT,
            "label": nullable(string("Name of the class with the highest score.")),
            "probs": list_of(number("", None, None)),
            "num_classes": COUNT,
        }
    ),
    title="Classes",
)


# -- pairs -------------------------------------------------------------------------------------------------------------

Method = Literal["head", "cosine", "judgement"]


def method_of(model: PooledModel) -> Method:
    """How pairs are scored. Raises RequestRefused where they cannot be."""
    if model.head == "labels":
        if len(model.labels) != 1:
            raise unsupported_by_model(
                f"this model's classification head has {len(model.labels)} classes; pairs are scored by a head of one. "
                "Use /classify"
            )
        return "head"
    if model.is_embedder or model.head == "none":
        model.require_embeddings()
        return "cosine"
    return "judgement"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPairs:
    """queries: one for all documents, or one for each. names: fields of both."""

    queries: list[str]
    documents: list[str]
    names: tuple[str, str]
    instruction: str
    activates: bool

    def __len__(self) -> int:
        return len(self.documents)

    def query_of(self, index: int) -> str:
        return self.queries[0] if len(self.queries) == 1 else self.queries[index]

    async def make_prompts(self, fields: PoolingFields, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        method = method_of(tools.model)
        if method == "judgement":
            return await self._judgements(fields, tools)
        if method == "head":
            ids = await tools.tokens_of_pairs(self.queries, self.documents, fields, self.names)
            return make_prompts(ids, PoolingSpec(output="labels"), fields, is_list=True)
        of_queries = await tools.tokens_of(Inputs(self.names[0], is_list=True, texts=self.queries), fields)
        of_documents = await tools.tokens_of(Inputs(self.names[1], is_list=True, texts=self.documents), fields)
        pooling = PoolingSpec(kind=tools.model.kind)
        return make_prompts([*of_queries, *of_documents], pooling, fields, is_list=True)

    async def _judgements(self, fields: PoolingFields, tools: PoolingTools) -> list[Prompt]:
        if fields.truncate_to is not None:
            raise RequestRefused(
                "truncate_prompt_tokens would cut off the end of a language model's prompt; shorten the documents",
                param="truncate_prompt_tokens",
            )
        words = await tools.plain_tokens_of(list(_YES_NO), self.names[1])
        if any(len(ids) != 1 for ids in words):
            raise unsupported_by_model('"yes" and "no" are not single tokens of this model, so it cannot judge pairs')
        texts = JoinedTexts(
            name=self.names[1],
            lengths=[
                len(self.instruction) + len(self.query_of(index)) + len(document)
                for index, document in enumerate(self.documents)
            ],
            make_text=lambda index: tools.render(self._chat(index)),
        )
        ids = await tools.tokens_of_joined(texts, dataclasses.replace(fields, add_special_tokens=False))
        pooling = PoolingSpec(output="tokens", token_ids=(words[0][0], words[1][0]))
        return make_prompts(ids, pooling, fields, is_list=True)

    def _chat(self, index: int) -> list[dict[str, Any]]:
        asked = f"<Instruct>: {self.instruction}\n<Query>: {self.query_of(index)}\n<Document>: {self.documents[index]}"
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]

    def scores(self, outputs: list[Output], tools: PoolingTools) -> list[float]:
        """One score per document."""
        model = tools.model
        method = method_of(model)
        vectors = [vector_of(output) for output in outputs]
        if method == "head":
            activation = model.label_activation if self.activates else "none"
            return [float(activated(vector, activation)[0]) for vector in vectors]
        if method == "judgement":  # the first of both is "yes"
            return [float(activated(vector[:1] - vector[1:], "sigmoid")[0]) for vector in vectors]
        unit = [shaped(vector, dimensions=None, normalizes=True).astype(np.float64) for vector in vectors]
        queries, documents = unit[: len(self.queries)], unit[len(self.queries) :]
        return [
            float(queries[0 if len(queries) == 1 else index] @ document) for index, document in enumerate(documents)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScoreCall:
    fields: PoolingFields
    names: FieldNames
    pairs: TextPairs

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        return await self.pairs.make_prompts(self.fields, tools)

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> dict[str, Any]:
        scores = self.pairs.scores(outputs, tools)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return list_answer("score", outputs, tools.shown_model(self.fields.model), data)

    def answer_size(self, outputs: list[Output]) -> int:
        return 3 * len(outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankCall:
    fields: PoolingFields
    names: FieldNames
    pairs: TextPairs
    top_n: int
    returns_documents: bool

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        return await self.pairs.make_prompts(self.fields, tools)

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> dict[str, Any]:
        scores = self.pairs.scores(outputs, tools)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])  # equal ones stay in order
        results = []
        for index in ranked[: self.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.returns_documents:
                result["document"] = {"text": self.pairs.documents[index]}
            results.append(result)
        return {
            "id": response_id("rerank", outputs),
            "model": tools.shown_model(self.fields.model),
            "usage": usage_of(outputs),
            "results": results,
        }

    def answer_size(self, outputs: list[Output]) -> int:
        texts = sum(map(len, self.pairs.documents)) if self.returns_documents else 0
        return 3 * len(outputs) + texts


def parse_score(
    fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None, ignored: Ignored | None = None
) -> PairScoreCall | LabelScoreCall:
    """Fields of ``POST /v1/score``, in vLLM's form or SGLang's. Raises RequestRefused."""
    fields = settle_pooling_fields(fields, SCORE_PROPERTIES, _OFF, ignored or Ignored())
    names_labels = "query" in fields or "label_token_ids" in fields
    if names_labels or ("items" in fields and "queries" not in fields):
        return _label_scores(fields, rid, max_prompts)
    for name in ("apply_softmax", "item_first"):
        if fields.get(name):
            raise RequestRefused(f"{name} is set without label_token_ids; leave it out", param=name)
    given = [pair for pair in _PAIRS if pair[0] in fields and pair[1] in fields]
    if len(given) != 1 or any(name in fields and name not in given[0] for pair in _PAIRS for name in pair):
        raise RequestRefused(
            "give text_1 and text_2; or query, items and label_token_ids, to score labels as the next token",
            param="text_1",
        )
    (one, two) = given[0]
    queries, documents = read_texts(fields[one], one, max_prompts), read_texts(fields[two], two, max_prompts)
    if len(queries) not in (1, len(documents)):
        raise RequestRefused(
            f"{one} has {len(queries)} texts and {two} has {len(documents)}; give one for all, or one for each",
            param=one,
        )
    pairs = TextPairs(
        queries=queries.texts or [],
        documents=documents.texts or [],
        names=(one, two),
        instruction=_text(fields, "instruction", INSTRUCTION),
        activates=typed(fields.get("use_activation", True), bool, "use_activation"),
    )
    return PairScoreCall(fields=read_common(fields, rid), names=names_of(two), pairs=pairs)


def parse_rerank(
    fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None, ignored: Ignored | None = None
) -> RerankCall:
    """Fields of ``POST /v1/rerank``. Raises RequestRefused."""
    fields = settle_pooling_fields(fields, RERANK_PROPERTIES, RERANK_OFF, ignored or Ignored())
    if "instruct" in fields and "instruction" in fields:
        raise RequestRefused("instruct and instruction are the same; give one of them", param="instruct")
    query, given = fields.get("query"), fields.get("documents")
    if not isinstance(query, str):
        raise RequestRefused(f"query is {shown(query)}; it takes a text", param="query")
    if not isinstance(given, list) or not given:
        raise RequestRefused(f"documents is {shown(given)}; it takes a list of texts", param="documents")
    check_count(len(given), "documents", max_prompts)
    documents = [each.get("text") if isinstance(each, dict) else each for each in given]
    if not all(isinstance(each, str) for each in documents):
        raise RequestRefused('documents takes texts, or objects with a "text"', param="documents")
    top_n = typed(fields.get("top_n", 0), int, "top_n")
    if top_n < 0:
        raise RequestRefused(f"top_n is {top_n}; use 0, for all, or more", param="top_n")
    name = "instruct" if "instruct" in fields else "instruction"
    pairs = TextPairs(
        queries=[query],
        documents=[str(each) for each in documents],
        names=("query", "documents"),
        instruction=_text(fields, name, INSTRUCTION),
        activates=typed(fields.get("use_activation", True), bool, "use_activation"),
    )
    return RerankCall(
        fields=read_common(fields, rid),
        names=names_of("documents"),
        pairs=pairs,
        top_n=top_n,
        returns_documents=typed(fields.get("return_documents", True), bool, "return_documents"),
    )


def _text(fields: dict[str, Any], name: str, default: str) -> str:
    return typed(fields.get(name, default), str, name)


# -- labels as the next token ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScoreCall:
    """query and items are either all texts or all token ids."""

    fields: PoolingFields
    names: FieldNames
    query: str | list[int]
    items: list[Any]
    label_token_ids: tuple[int, ...]
    softmax: bool
    item_first: bool

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        tools.model.require_language()
        lengths = [len(self.query) + len(item) for item in self.items]
        if isinstance(self.query, str):
            ids = await tools.tokens_of_joined(JoinedTexts("items", lengths, self._joined), self.fields)
        else:
            check_tokens_of_call(sum(lengths), "items")
            inputs = Inputs("items", is_list=True, id_lists=[self._joined(index) for index in range(len(self.items))])
            ids = await tools.tokens_of(inputs, self.fields)
        pooling = PoolingSpec(output="tokens", token_ids=self.label_token_ids)
        return make_prompts(ids, pooling, self.fields, is_list=True)

    def _joined(self, index: int) -> Any:
        query, item = self.query, self.items[index]
        return item + query if self.item_first else query + item

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> dict[str, Any]:
        return {
            "object": "scoring",
            "scores": [self._scores(vector_of(output)) for output in outputs],
            "model": tools.shown_model(self.fields.model),
            "usage": usage_of(outputs),
        }

    def _scores(self, logprobs: np.ndarray) -> list[float]:
        if self.softmax:
            return activated(logprobs, "softmax").tolist()
        return np.exp(logprobs.astype(np.float64)).tolist()

    def answer_size(self, outputs: list[Output]) -> int:
        return len(outputs) * len(self.label_token_ids)


def _label_scores(fields: dict[str, Any], rid: str | None, max_prompts: int | None) -> LabelScoreCall:
    for name in (name for pair in _PAIRS for name in pair if name != "items"):
        if name in fields:
            raise RequestRefused(f"{name} does not go with query, items and label_token_ids", param=name)
    query, items, labels = fields.get("query"), fields.get("items"), fields.get("label_token_ids")
    if not isinstance(labels, list) or not labels or not all(type(each) is int for each in labels):
        raise RequestRefused(
            f"label_token_ids is {shown(labels)}; it takes a list of token ids", param="label_token_ids"
        )
    if len(labels) > MAX_NAMED_TOKENS:
        raise RequestRefused(
            f"label_token_ids has {len(labels)} ids; use at most {MAX_NAMED_TOKENS}", param="label_token_ids"
        )
    if isinstance(items, str):
        items = [items]
    is_text = isinstance(query, str)
    is_ids = isinstance(query, list) and all(type(each) is int for each in query)
    if not is_text and not is_ids:
        raise RequestRefused(f"query is {shown(query)}; it takes a text or a list of token ids", param="query")
    if not isinstance(items, list) or not items:
        raise RequestRefused(f"items is {shown(items)}; it takes a list", param="items")
    check_count(len(items), "items", max_prompts)
    fits = (
        all(isinstance(item, str) for item in items)
        if is_text
        else all(isinstance(item, list) and all(type(each) is int for each in item) for item in items)
    )
    if not fits:
        raise RequestRefused("items takes texts beside a query that is one, else lists of token ids", param="items")
    return LabelScoreCall(
        fields=read_common(fields, rid),
        names=names_of("items"),
        query=query,  # type: ignore[arg-type]
        items=items,
        label_token_ids=tuple(labels),
        softmax=typed(fields.get("apply_softmax", False), bool, "apply_softmax"),
        item_first=typed(fields.get("item_first", False), bool, "item_first"),
    )


# -- classes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyCall:
    fields: PoolingFields
    names: FieldNames
    inputs: Inputs
    activates: bool

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        tools.model.require_labels()
        ids = await tools.tokens_of(self.inputs, self.fields)
        return make_prompts(ids, PoolingSpec(output="labels"), self.fields, is_list=self.inputs.is_list)

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> dict[str, Any]:
        model = tools.model
        activation = model.label_activation if self.activates else "none"
        data = []
        for index, output in enumerate(outputs):
            scores = activated(vector_of(output), activation)
            label = model.labels[int(scores.argmax())]
            data.append({"index": index, "label": label, "probs": scores.tolist(), "num_classes": len(scores)})
        return list_answer("classify", outputs, tools.shown_model(self.fields.model), data)

    def answer_size(self, outputs: list[Output]) -> int:
        return sum(len(output.vector) // 4 for output in outputs)


def parse_classify(
    fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None, ignored: Ignored | None = None
) -> ClassifyCall:
    """Fields of vLLM's ``POST /classify``. Raises RequestRefused."""
    fields = settle_pooling_fields(fields, CLASSIFY_PROPERTIES, CLASSIFY_OFF, ignored or Ignored())
    return ClassifyCall(
        fields=read_common(fields, rid),
        names=names_of("input"),
        inputs=read_inputs(fields.get("input"), "input", max_prompts),
        activates=typed(fields.get("use_activation", True), bool, "use_activation"),
    )
