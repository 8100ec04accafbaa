"""Prompts that are pooled, for every endpoint that answers with vectors or scores: their fields, tokens and specs.

An endpoint's reader returns a `PooledCall`, which makes the prompts, and later the answer from their outputs. In
between, the HTTP routes or the Engine run the prompts. Each prompt is a request of its own, with ``max_new_tokens`` 0:
it is scheduled in chunks beside others, finds and leaves KV in the cache of its namespace, and can be aborted.

Its KV is evicted before all other KV (`RequestSpec.no_reuse_from`), except for prefixes that other prompts share: ten
thousand documents must not push conversations out of the cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from ...runtime.answer import Output
from ...runtime.clients import Client
from ...runtime.model_config import HeadKind, LabelActivation
from ...runtime.prompt import Prompt
from ...runtime.text.prompt_tokenizer import SLICE_CHARS, check_tokens_of_call
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import ContextOverflow, RequestRefused
from ...scheduler.request_spec import PoolingKind, PoolingSpec, RequestSpec
from ...scheduler.sampling_params import SamplingParams
from ..chat.messages import Conversation
from ..chat.rendering import Renderer
from ..description.json_schema import Properties, either, enum, flag, picked, string, whole
from ..fields.field_names import FieldNames
from ..fields.ignored import Ignored
from ..fields.namespaces import read_client, read_namespaces
from ..fields.prompts import SHARED_OF_CHATS, read_adapter, read_priority
from ..fields.reading import MODEL, RID, PerPrompt, one_of, read_rids, refuse_unserved, shown, typed

NO_OUTPUT = SamplingParams(max_new_tokens=0)

_INLINE_CHARS = 20_000
"""Longer texts are made in a thread."""

COMMON: Properties = {
    "model": MODEL,
    "rid": RID,
    "request_id": string("vLLM's name of rid."),
    **picked(SHARED_OF_CHATS, ("user", "cache_salt", "extra_key", "lora_path", "priority")),
    "truncate_prompt_tokens": whole(
        "Use only this many tokens of each prompt; special tokens around it are kept. -1: as many as the context "
        "holds. Without it, prompts that are too long are refused.",
        -1,
    ),
    "truncation_side": enum(
        "right", "left", about="With truncate_prompt_tokens: where tokens are cut off.", default="right"
    ),
    "add_special_tokens": flag("Put the tokenizer's special tokens around texts.", default=True),
}
"""Fields of every endpoint."""


def _overflow_words(overflow: ContextOverflow) -> str:
    return (
        f"This model's maximum context length is {overflow.context} tokens. However, an input has "
        f"{overflow.prompt_words}. Please reduce its length, or set truncate_prompt_tokens."
    )


def names_of(prompt: str) -> FieldNames:
    """prompt: the endpoint's field for texts and token ids."""
    return FieldNames(prompt=prompt, renamed={"token_ids_logprob": "label_token_ids"}, overflow_words=_overflow_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """How the served model pools prompts, as its worker described it: see `EmbeddingConfig`, `ServedConfig`."""

    kind: PoolingKind
    normalizes: bool
    is_embedder: bool
    refusal: str
    hidden_size: int
    head: HeadKind
    labels: tuple[str, ...]
    label_activation: LabelActivation

    def require_embeddings(self) -> None:
        """Raises RequestRefused if its embeddings cannot be computed."""
        if self.refusal:
            raise unsupported_by_model(f"{self.refusal}; --pooling last, mean or cls chooses one in spite of it")

    def require_labels(self) -> None:
        """Raises RequestRefused if it has no classification head."""
        if self.head != "labels":
            raise unsupported_by_model(
                "this model has no classification head (an architecture …ForSequenceClassification has one); "
                "use /v1/embeddings, or /v1/score with label_token_ids"
            )

    def require_language(self) -> None:
        """Raises RequestRefused if it computes no logits of the next token."""
        if self.head != "language":
            raise unsupported_by_model("this model has no language head, so it has no logits of the next token")


def unsupported_by_model(message: str) -> RequestRefused:
    return RequestRefused(message, code="unsupported_by_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFields:
    """The values of `COMMON`. truncate_to: -1 for the context's length, None for no truncation."""

    model: str | None
    rid: Any
    namespace: str
    adapter: str
    client: str
    priority: int
    truncate_to: int | None
    keeps_end: bool
    """Tokens are cut off at the beginning."""
    add_special_tokens: bool


def settle_pooling_fields(
    fields: dict[str, Any], served: Properties, unsupported: Mapping[str, tuple], ignored: Ignored
) -> dict[str, Any]:
    """The fields without nulls. Raises RequestRefused for unknown ones, and for unsupported ones that ask for
    something."""
    refuse_unserved(fields, served, unsupported, ignored=ignored)
    return {name: value for name, value in fields.items() if value is not None and name in served}


def read_common(fields: dict[str, Any], rid: str | None) -> PoolingFields:
    """rid: used if the body has none. Raises RequestRefused."""
    if "rid" in fields and "request_id" in fields:
        raise RequestRefused("rid and request_id are the same; give one of them", param="request_id")
    one = PerPrompt(fields, 1, is_batch=False)
    truncate_to = fields.get("truncate_prompt_tokens")
    if truncate_to is not None and (typed(truncate_to, int, "truncate_prompt_tokens") < -1 or truncate_to == 0):
        raise RequestRefused(
            f"truncate_prompt_tokens is {truncate_to}; use 1 or more, or -1 for the context's length",
            param="truncate_prompt_tokens",
        )
    return PoolingFields(
        model=fields.get("model"),
        rid=fields.get("rid", fields.get("request_id", rid)),
        namespace=read_namespaces(one)[0],
        adapter=one.read_values("lora_path", read_adapter, "")[0],
        client=read_client(fields),
        priority=one.read_values("priority", read_priority, 0)[0],
        truncate_to=truncate_to,
        keeps_end=one_of(fields.get("truncation_side", "right"), ("left", "right"), "truncation_side") == "left",
        add_special_tokens=typed(fields.get("add_special_tokens", True), bool, "add_special_tokens"),
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Either texts or lists of token ids. is_list: the caller gave a list of them. name: the field they came in."""

    name: str
    is_list: bool
    texts: list[str] | None = None
    id_lists: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.texts if self.texts is not None else self.id_lists or ())


@dataclass(frozen=True, slots=True)
class JoinedTexts:
    """Texts that each repeat a part of the request, such as the query before an item. Together they may be a thousand
    times as long as the request, so they are made a few at a time, as they are tokenised.

    name: the field that is blamed. lengths: of each text, in characters; those that a template adds may be missing.
    make_text: index -> the text.
    """

    name: str
    lengths: list[int]
    make_text: Callable[[int], str]

    def groups(self) -> Iterator[range]:
        """Indices of texts that are made and tokenised together: one at least, of `SLICE_CHARS` characters at most."""
        start = size = 0
        for index, length in enumerate(self.lengths):
            if index > start and size + length > SLICE_CHARS:
                yield range(start, index)
                start, size = index, 0
            size += length
        yield range(start, len(self.lengths))


INPUT = either(
    string(),
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    {"type": "array", "items": string(), "minItems": 1},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
     "minItems": 1},
    about="A text, token ids, or a list of either.",
)  # fmt: skip


def read_inputs(value: Any, name: str, max_prompts: int | None) -> Inputs:
    """A text, token ids, or a list of either. Raises RequestRefused, also for more than ``max_prompts``."""
    if isinstance(value, str):
        return Inputs(name, is_list=False, texts=[value])
    if not isinstance(value, list) or not value:
        raise RequestRefused(
            f"{name} is {shown(value)}; it takes a text, a list of token ids, or a list of either", param=name
        )
    if all(type(item) is int for item in value):
        return Inputs(name, is_list=False, id_lists=[value])
    check_count(len(value), name, max_prompts)
    if all(isinstance(item, str) for item in value):
        return Inputs(name, is_list=True, texts=value)
    if all(isinstance(item, list) for item in value) and all(type(each) is int for ids in value for each in ids):
        return Inputs(name, is_list=True, id_lists=value)
    raise RequestRefused(
        f"{name} is {shown(value)}; its elements are all texts, all token ids, or all lists of token ids", param=name
    )


def read_texts(value: Any, name: str, max_prompts: int | None) -> Inputs:
    """A text or a list of texts. Raises RequestRefused."""
    if isinstance(value, str):
        return Inputs(name, is_list=False, texts=[value])
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RequestRefused(f"{name} is {shown(value)}; it takes a text or a list of texts", param=name)
    check_count(len(value), name, max_prompts)
    return Inputs(name, is_list=True, texts=value)


def check_count(count: int, name: str, max_prompts: int | None) -> None:
    """Raises RequestRefused for more than ``max_prompts``."""
    if max_prompts is not None and count > max_prompts:
        raise RequestRefused(
            f"{name} holds {count} inputs; send at most {max_prompts} in one request (--max-prompts-per-request)",
            param=name,
        )


class PoolingTools:
    """The tools with which calls make their prompts and answers.

    model: the served model. shown_model: a request's ``model`` -> the name in its answer. render: the prompt of a
    chat, with the model's chat template. max_prompts: limit of one call, None for none.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        shown_model: Callable[[Any], str],
        render: Callable[[list[dict[str, Any]]], str],
        max_prompts: int | None = None,
    ) -> None:
        self._manager = manager
        self.shown_model = shown_model
        self.render = render
        self._model: PooledModel | None = None
        self.max_prompts = max_prompts

    @property
    def model(self) -> PooledModel:
        """Raises RequestRefused before the worker is ready."""
        self._manager.limits  # noqa: B018
        if self._model is None:
            self._model = msgspec.convert(self._manager.worker_info["pooling"], PooledModel)
        return self._model

    async def tokens_of(self, inputs: Inputs, fields: PoolingFields) -> list[list[int]]:
        """The token ids of each input, truncated. Raises RequestRefused, also for an input without tokens."""
        if inputs.texts is None:
            ids = self._truncated(inputs.id_lists or [], fields, ([], []))
        else:
            ids = await self._tokenize(inputs.texts, inputs.name, fields)
            ids = self._truncated(ids, fields, self._ids_around_texts(fields))
        _refuse_empty(ids, inputs.name, is_list=inputs.is_list)
        return ids

    async def tokens_of_joined(self, texts: JoinedTexts, fields: PoolingFields) -> list[list[int]]:
        """`tokens_of` for texts that are made on the way."""
        found: list[list[int]] = []
        total, around = 0, self._ids_around_texts(fields)
        for group in texts.groups():
            size = sum(texts.lengths[index] for index in group)
            made = _made(texts, group) if size <= _INLINE_CHARS else await asyncio.to_thread(_made, texts, group)
            ids = await self._tokenize(made, texts.name, fields)
            total += sum(map(len, ids))  # before they are truncated: all have been read
            check_tokens_of_call(total, texts.name)
            found += self._truncated(ids, fields, around)
        _refuse_empty(found, texts.name, is_list=True)
        return found

    async def _tokenize(self, texts: list[str], name: str, fields: PoolingFields) -> list[list[int]]:
        return await self._manager.tokenize(
            texts,
            add_special_tokens=fields.add_special_tokens,
            is_truncated=fields.truncate_to is not None,
            param=name,
        )

    def _ids_around_texts(self, fields: PoolingFields) -> tuple[list[int], list[int]]:
        """The special tokens that begin and end every text."""
        around = self._manager.tokenizer.special_ids_around if fields.add_special_tokens else None
        return around if around is not None else ([], [])

    def _truncated(
        self, ids: list[list[int]], fields: PoolingFields, around: tuple[list[int], list[int]]
    ) -> list[list[int]]:
        most = self._most(fields)
        return ids if most is None else [truncated(each, most, around, fields.keeps_end) for each in ids]

    def _most(self, fields: PoolingFields) -> int | None:
        """Tokens of a prompt after truncation; None for no truncation."""
        return self._manager.limits.context_length if fields.truncate_to == -1 else fields.truncate_to

    async def tokens_of_pairs(
        self, queries: list[str], documents: list[str], fields: PoolingFields, names: tuple[str, str]
    ) -> list[list[int]]:
        """The token ids of each document behind its query, as the tokenizer joins two texts. queries: one for all, or
        one for each. Only documents are truncated. Raises RequestRefused."""
        plain = dataclasses.replace(fields, add_special_tokens=False, truncate_to=None)
        asked = await self._tokenize(queries, names[0], plain)
        read = dataclasses.replace(plain, truncate_to=fields.truncate_to)
        found = self._truncated(await self._tokenize(documents, names[1], read), fields, ([], []))
        around = self._manager.tokenizer.special_ids_around_pair if fields.add_special_tokens else ([], [], [])
        if around is None:
            raise unsupported_by_model(
                "its tokenizer does more to pairs of texts than to put tokens around them; set add_special_tokens to "
                "false, and write what it needs into the texts"
            )
        before, between, after = around
        repeated = sum(map(len, asked)) * (len(found) if len(asked) == 1 else 1)
        check_tokens_of_call(repeated + sum(map(len, found)), names[1])
        joined = []
        for index, document in enumerate(found):
            query = asked[0 if len(asked) == 1 else index]
            if (most := self._most(fields)) is not None:
                room = max(1, most - len(before) - len(query) - len(between) - len(after))
                document = truncated(document, room, ([], []), fields.keeps_end)
            joined.append([*before, *query, *between, *document, *after])
        _refuse_empty(joined, names[1], is_list=True)
        return joined

    async def plain_tokens_of(self, texts: list[str], param: str) -> list[list[int]]:
        """The token ids of texts that bring their special tokens. Raises RequestRefused."""
        return await self._manager.tokenize(texts, add_special_tokens=False, param=param)


def _made(texts: JoinedTexts, group: range) -> list[str]:
    return [texts.make_text(index) for index in group]


def _refuse_empty(ids: list[list[int]], name: str, *, is_list: bool) -> None:
    """Raises RequestRefused for a prompt without tokens."""
    for index, each in enumerate(ids):
        if not each:
            place = f"{name}[{index}]" if is_list else name
            raise RequestRefused(f"{place} is empty; give at least one token", param=name)


def truncated(ids: list[int], most: int, around: tuple[list[int], list[int]], keeps_end: bool) -> list[int]:
    """The first ``most`` ids, or the last. around: the special tokens that begin and end every text; they stay, as with
    transformers, where both fit."""
    if len(ids) <= most:
        return ids
    special = around[0] if keeps_end else around[1]
    kept = special if len(special) <= most else []
    rest = most - len(kept)
    return kept + ids[len(ids) - rest :] if keeps_end else ids[:rest] + kept


def make_prompts(
    id_lists: Sequence[list[int]], pooling: PoolingSpec, fields: PoolingFields, *, is_list: bool
) -> list[Prompt]:
    """One prompt for each list of ids. Raises RequestRefused for names that do not fit them."""
    group, rids = read_rids(fields.rid, len(id_lists), is_list)
    return [
        Prompt(
            spec=RequestSpec(
                rid=rid,
                sampling=NO_OUTPUT,
                namespace=fields.namespace,
                adapter=fields.adapter,
                client=fields.client or fields.namespace,
                priority=fields.priority,
                retain_ttl=0.0,
                no_reuse_from=0,
                pooling=pooling,
            ),
            group=group,
            input_ids=ids,
        )
        for rid, ids in zip(rids, id_lists, strict=True)
    ]


class PooledCall(Protocol):
    """A parsed request."""

    @property
    def fields(self) -> PoolingFields: ...

    @property
    def names(self) -> FieldNames:
        """Names of the endpoint's fields, for error messages."""
        ...

    async def make_prompts(self, tools: PoolingTools) -> list[Prompt]:
        """Raises RequestRefused."""
        ...

    def build_answer(self, outputs: list[Output], tools: PoolingTools) -> Any:
        """The answer's JSON. ``outputs`` has that of each prompt, in order."""
        ...

    def answer_size(self, outputs: list[Output]) -> int:
        """An estimate of the numbers and characters in the answer."""
        ...


async def run_call(manager: TokenizerManager, client: Client, call: PooledCall, tools: PoolingTools) -> list[Output]:
    """The outputs of a call, for callers that wait for them. Raises RequestRefused."""
    with call.names.translated():
        prompts = await call.make_prompts(tools)
        with await manager.open_answer(client, prompts, stream=False) as answer:
            return checked_outputs(await answer.outputs())


def checked_outputs(outputs: list[Output]) -> list[Output]:
    """Raises RequestRefused if one was aborted: it has no vector."""
    for output in outputs:
        if output.finish is None or output.finish.type == "abort" or not output.vector:
            message = output.finish.message if output.finish is not None else None
            raise RequestRefused(message or "the request was aborted", code="aborted")
    return outputs


def vector_of(output: Output) -> np.ndarray:
    """float32 [n]"""
    return np.frombuffer(output.vector, dtype=np.float32)


def chat_renderer(renderer: Renderer) -> Callable[[list[dict[str, Any]]], str]:
    """The prompt of a chat in which the model answers at once, without thinking."""

    def render(messages: list[dict[str, Any]]) -> str:
        return renderer.render(Conversation(messages=messages, variables={"enable_thinking": False}))

    return render
