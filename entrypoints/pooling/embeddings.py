"""Embeddings: OpenAI's ``/v1/embeddings`` with vLLM's fields, vLLM's ``/pooling``, SGLang's ``/encode``.

``dimensions`` cuts a vector to its first numbers and normalises the rest again, as Matryoshka representations are meant
to be used (Kusupati et al. 2022). Every model accepts it, since the files of a model do not say whether it was trained
that way.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...runtime.answer import Output
from ...runtime.prompt import Prompt
from ...scheduler.outcome import RequestRefused
from ...scheduler.request_spec import PoolingSpec
from ..description.json_schema import (
    COUNT,
    IDS,
    Properties,
    answered,
    either,
    enum,
    flag,
    list_of,
    nullable,
    number,
    string,
    taken,
    whole,
)
from ..fields.field_names import FieldNames
from ..fields.ignored import Ignored
from ..fields.reading import RID, one_of, typed
from .answers import list_answer, list_schema
from .prompts import (
    COMMON,
    INPUT,
    Inputs,
    PoolingFields,
    PoolingTools,
    make_prompts,
    names_of,
    read_common,
    read_inputs,
    settle_pooling_fields,
    unsupported_by_model,
    vector_of,
)

_FORM: Properties = {
    "encoding_format": enum(
        "float", "base64", about="base64: the bytes of little-endian float32 numbers.", default="float"
    ),
    "dimensions": whole("Keep only this many numbers of each vector, the first ones, and normalise them again.", 1),
    "normalize": flag("Divide each vector by its length. Default: as the model's files say, else true."),
}
_OFF: dict[str, tuple] = {
    "padding": ("do_not_pad",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "chat_template": (),
}
_TASKS = ("embed", "classify")

PROPERTIES: Properties = {
    "input": INPUT,
    **_FORM,
    "use_activation": flag("vLLM's name of normalize."),
    **COMMON,
}
BODY = taken(PROPERTIES, title="EmbeddingsBody", required=("input",), unsupported=_OFF)
EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a text": {"input": "The capital of France is Paris."},
    "texts, shortened vectors": {"input": ["One", "Two"], "dimensions": 8, "encoding_format": "base64"},
    "token ids": {"input": [[1, 2, 3], [4]], "normalize": False},
}
_VECTOR = either(list_of(number()), string("base64"))
ANSWER = list_schema(answered({"object": enum("embedding"), "index": COUNT, "embedding": _VECTOR}), title="Embeddings")

POOLING_PROPERTIES: Properties = {
    "task": enum(*_TASKS, about="embed, or classify (for models with a classification head)."),
    **PROPERTIES,
    "use_activation": flag("normalize; for classes: their scores instead of their logits (true)."),
}
POOLING_BODY = taken(POOLING_PROPERTIES, title="PoolingBody", required=("input",), unsupported=_OFF)
POOLING_ANSWER = list_schema(answered({"object": enum("pooling"), "index": COUNT, "data": _VECTOR}), title="Pooled")

_TEXTS = {"type": "array", "items": string(), "minItems": 1}
_ID_LISTS = {"type": "array", "items": IDS | {"minItems": 1}, "minItems": 1}
ENCODE_PROPERTIES: Properties = {
    "text": either(string(), _TEXTS, about="One text or several. Give either this or `input_ids`."),
    "input_ids": either(IDS, _ID_LISTS, about="The inputs as token ids."),
    "dimensions": _FORM["dimensions"],
    "normalize": _FORM["normalize"],
    **COMMON,
    "rid": either(RID, list_of(RID)),
}
ENCODE_OFF: dict[str, tuple] = {
    "sampling_params": ({},),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
    "log_metrics": (True, False),
    "return_prompt_token_ids": (False,),
}
ENCODE_BODY = taken(ENCODE_PROPERTIES, title="EncodeBody", unsupported=ENCODE_OFF)
_ENCODED = answered(
    {
        "embedding": list_of(number()),
        "meta_info": answered(
            {
                "id": string("The rid."),
                "finish_reason": answered({"type": enum("length"), "length": COUNT}),
                "prompt_tokens": COUNT,
                "cached_tokens": COUNT,
                "e2e_latency": nullable(number()),
            }
        ),
    },
    title="Encoded",
)
ENCODE_ANSWER = either(_ENCODED, list_of(_ENCODED))


def shaped(vector: np.ndarray, *, dimensions: int | None, normalizes: bool) -> np.ndarray:
    """float32: the first ``dimensions`` numbers, divided by their length if ``normalizes``."""
    kept = vector if dimensions is None else vector[:dimensions]
    if not normalizes:
        return kept
    wide = kept.astype(np.float64)  # squares of large numbers are infinite in float32
    return (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype(np.float32)


def written(vector: np.ndarray, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises RequestRefused."""
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise RequestRefused(
            f"dimensions is {dimensions}; this model's vectors have {hidden_size}: use 1 to {hidden_size}",
            param="dimensions",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """shape: form of the answer. task: None for the model's own task (/pooling and /encode)."""

    fields: PoolingFields
    names: FieldNames
    inputs: Inputs
    shape: Literal["embeddings", "pooling", "encode"]
    task: Literal["embed", "classify"] | None = "embed"
    encoding: str = "float"
    dimensions: int | None = None
    normalizes: bool | None = None
    activates: bool = False

    def _output(self, tools: PoolingTools) -> Literal["hidden", "labels"]:
        task = self.task or ("classify" if tools.model.head == "labels" else "embed")
        return "hidden" if task == "embed" else "labels"

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        model, output = tools.model, self._output(tools)
        if output == "hidden":
            model.require_embeddings()
            check_dimensions(self.dimensions, model.hidden_size)
        else:
            model.require_labels()
            if self.dimensions is not None:
                raise unsupported_by_model("dimensions is of embeddings; the scores of classes are all returned")
        ids = await tools.tokens_of(self.inputs, self.fields)
        kind = model.kind if output == "hidden" else "last"
        return make_prompts(ids, PoolingSpec(kind=kind, output=output), self.fields, is_list=self.inputs.is_list)

    def _vector(self, output: Output, tools: PoolingTools) -> np.ndarray:
        if self._output(tools) == "labels":
            logits = vector_of(output)
            return activated(logits, tools.model.label_activation) if self.activates else logits
        normalizes = tools.model.normalizes if self.normalizes is None else self.normalizes
        return shaped(vector_of(output), dimensions=self.dimensions, normalizes=normalizes)

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> Any:
        if self.shape == "encode":
            answers = [_encoded(output, self._vector(output, tools)) for output in outputs]
            return answers if self.inputs.is_list else answers[0]
        name, kind, prefix = (
            ("embedding", "embedding", "embd") if self.shape == "embeddings" else ("data", "pooling", "pool")
        )
        data = (
            {"object": kind, "index": index, name: written(self._vector(output, tools), self.encoding)}
            for index, output in enumerate(outputs)
        )
        return list_answer(prefix, outputs, tools.shown_model(self.fields.model), data)

    def answer_size(self, outputs: list[Output]) -> int:
        return sum(len(output.vector) // 4 for output in outputs)


def activated(logits: np.ndarray, activation: str) -> np.ndarray:
    """float32 [labels]: the scores of classes."""
    if activation == "none":
        return logits
    wide = logits.astype(np.float64)
    if activation == "sigmoid":
        return (0.5 * (1 + np.tanh(wide / 2))).astype(np.float32)  # does not overflow
    weights = np.exp(wide - wide.max())
    return (weights / weights.sum()).astype(np.float32)


def _encoded(output: Output, vector: np.ndarray) -> dict[str, Any]:
    return {
        "embedding": vector.tolist(),
        "meta_info": {
            "id": output.prompt.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.found.total,
            "e2e_latency": output.e2e_latency,
        },
    }


def parse_embeddings(
    fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None, ignored: Ignored | None = None
) -> EmbeddingCall:
    """Fields of ``POST /v1/embeddings``. Raises RequestRefused."""
    fields = settle_pooling_fields(fields, PROPERTIES, _OFF, ignored or Ignored())
    return EmbeddingCall(
        fields=read_common(fields, rid),
        names=names_of("input"),
        inputs=read_inputs(fields.get("input"), "input", max_prompts),
        shape="embeddings",
        encoding=one_of(fields.get("encoding_format", "float"), ("float", "base64"), "encoding_format"),
        **_form_of(fields),
    )


def parse_pooling(
    fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None, ignored: Ignored | None = None
) -> EmbeddingCall:
    """Fields of ``POST /pooling``. Raises RequestRefused."""
    task = fields.get("task")
    if task is not None and task not in _TASKS:
        raise RequestRefused(
            f"task is {task!r}; it takes embed or classify. Vectors of single tokens are not served", param="task"
        )
    fields = settle_pooling_fields(fields, POOLING_PROPERTIES, _OFF, ignored or Ignored())
    return EmbeddingCall(
        fields=read_common(fields, rid),
        names=names_of("input"),
        inputs=read_inputs(fields.get("input"), "input", max_prompts),
        shape="pooling",
        task=task,
        encoding=one_of(fields.get("encoding_format", "float"), ("float", "base64"), "encoding_format"),
        activates=typed(fields.get("use_activation", True), bool, "use_activation"),
        **_form_of(fields),
    )


def parse_encode(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    max_prompts: int | None = None,
    ignored: Ignored | None = None,
    task: Literal["embed", "classify"] | None = None,
) -> EmbeddingCall:
    """Fields of SGLang's ``POST /encode`` and of its ``/classify``, which differs only in the task, "classify".
    Raises RequestRefused."""
    fields = settle_pooling_fields(fields, ENCODE_PROPERTIES, ENCODE_OFF, ignored or Ignored())
    if ("text" in fields) == ("input_ids" in fields):
        both = "both are" if "text" in fields else "neither is"
        raise RequestRefused(f"give text or input_ids; {both} given", param="text")
    name = "text" if "text" in fields else "input_ids"
    inputs = read_inputs(fields[name], name, max_prompts)
    if (inputs.texts is None) == (name == "text"):
        takes = "a text or a list of texts" if name == "text" else "a list of token ids, or a list of such lists"
        raise RequestRefused(f"{name} takes {takes}", param=name)
    return EmbeddingCall(
        fields=read_common(fields, rid),
        names=names_of(name),
        inputs=inputs,
        shape="encode",
        task=task,
        **_form_of(fields),
    )


def _form_of(fields: dict[str, Any]) -> dict[str, Any]:
    dimensions, normalizes = fields.get("dimensions"), fields.get("normalize")
    activates = fields.get("use_activation")
    if dimensions is not None and typed(dimensions, int, "dimensions") < 1:
        raise RequestRefused(f"dimensions is {dimensions}; use 1 or more", param="dimensions")
    if normalizes is not None:
        typed(normalizes, bool, "normalize")
    if activates is not None:
        typed(activates, bool, "use_activation")
    if None not in (normalizes, activates) and normalizes != activates:
        raise RequestRefused("normalize and use_activation are the same; give one of them", param="use_activation")
    return {"dimensions": dimensions, "normalizes": activates if normalizes is None else normalizes}
